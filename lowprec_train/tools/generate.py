"""Continue a prompt with a trained model, under its training recipe or any other. The prompt is processed in one
forward pass; keys and values are cached, so each new token needs a pass over one token. The text is printed to stdout
while it is generated, the speed to stderr.

The prompt follows the end-of-document token, as a document in training; with --start none it follows no token.
Generation stops at the end-of-document token or after --max-tokens. The same seed gives the same text.

exit status:
  0  done
  2  bad input: missing checkpoint or tokenizer, unknown recipe, prompt too long

examples:
  lowprec generate runs/fp4 --prompt "def main("
  lowprec generate runs/fp4 --prompt "The" --recipe bf16 --temperature 0 --max-tokens 200
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from lowprec_train.tools import options

HELP = "generate text with a trained model"


def add_options(parser: argparse.ArgumentParser) -> None:
    options.trained_model(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a new document)")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="maximum number of new tokens (default: 128, or less at the model's max_seq_len)",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="sampling temperature; 0: most likely token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=0.95,
        help="probability mass of nucleus sampling (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="random seed of sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--recipe", metavar="NAME", default="run", help="run (the run's recipe), fp32, or a recipe name (default: run)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and the generated text. Raises ValueError for bad input."""
    from lowprec_train.model.generation import Sampling, check_length, generate
    from lowprec_train.tools.evaluate import evaluation
    from lowprec_train.train import checks
    from lowprec_train.train.launch import check_one_process
    from lowprec_train.train.trained import Trained

    check_one_process("lowprec generate")
    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
    trained, device = Trained(arguments.model, arguments.step), checks.device(arguments.device)
    tokenizer = evaluation.tokenizer_of(trained, arguments.tokenizer)
    if tokenizer is None:
        raise ValueError(f"no tokenizer is known for {arguments.model}: name it with --tokenizer")
    sizes = trained.weights.model
    start = evaluation.start_token(arguments.start, tokenizer, sizes.vocab_size)
    if any("\ud800" <= letter <= "\udfff" for letter in arguments.prompt):  # Python's stand-ins for bytes that are none
        raise ValueError(f"--prompt {arguments.prompt!r} is not UTF-8")
    written = tokenizer.encode([arguments.prompt])[0]
    prompt = ([] if start is None else [start]) + written
    if not prompt:
        raise ValueError(f"--start {arguments.start} and an empty prompt leave the model nothing to begin with")
    if len(prompt) >= sizes.max_seq_len:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens is too long: the model has positions for {sizes.max_seq_len}, what it "
            "writes included"
        )
    room = min(128, sizes.max_seq_len - len(prompt)) if arguments.max_tokens is None else arguments.max_tokens
    check_length(len(prompt), room, sizes.max_seq_len)
    model = trained.model(arguments.recipe, device=device)
    print(arguments.prompt, end="", flush=True)
    times = [time.perf_counter()]

    def timed() -> Iterator[int]:
        words = tokenizer.vocab_size
        for token in generate(model, prompt, max_tokens=room, sampling=sampling, stop=tokenizer.eod, vocab_size=words):
            times.append(time.perf_counter())
            yield token

    for piece in pieces(timed(), tokenizer.decode, written):
        print(piece, end="", flush=True)
    print()
    print(rate(len(prompt), times), file=sys.stderr)
    return 0


def pieces(tokens: Iterable[int], decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> Iterator[str]:
    """Pieces of the generated text. A character is held back until all its bytes are generated.

    Prompt and new tokens are decoded together, because decoding only the new tokens may lose the space before the first
    word.
    """
    ids = list(prompt)
    printed = decode(ids)
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if text.startswith(printed) and not text.endswith("\ufffd"):
            yield text[len(printed) :]
            printed = text
    yield decode(ids)[len(printed) :]


def rate(prompt: int, times: Sequence[float]) -> str:
    """The time to the first token and the rate after it, in a sentence. times: of the start and of each token, s."""
    count = len(times) - 1
    if not count:
        return f"{prompt} tokens read; the model closes the document at once"
    after = f", then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s" if count > 1 else ""
    return f"{prompt} tokens read, the first of {count} after {times[1] - times[0]:.2f} s{after}"
