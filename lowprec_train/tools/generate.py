"""`lowprec generate`: what a trained model writes after a prompt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from lowprec_train.tools import options

HELP = "text that a trained model writes after a prompt"
DESCRIPTION = """\
Let a trained model continue a prompt, under the recipe that it trained with or any other. The prompt is read in one
pass; each token after it costs one pass over one token, whatever came before. The text goes to stdout as it comes, its
rate to stderr.
"""
EPILOG = """\
The prompt begins a document: it stands after the end-of-document token, as in training (--start none: alone). The model
stops when it closes the document, or at --max-tokens. The same seed gives the same text.

exit status:
  0  done
  2  bad input: no checkpoint, no tokenizer, no such recipe, a prompt that is too long

examples:
  lowprec generate runs/fp4 --prompt "def main("
  lowprec generate runs/fp4 --prompt "The" --recipe bf16 --temperature 0 --max-tokens 200
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    options.trained_model(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a new document)")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="at most (default: 128, or what the model has room for)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: the likeliest (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=0.95, help="mass of the nucleus (default: %(default)s)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the choices (default: %(default)s)")
    parser.add_argument(
        "--recipe", metavar="NAME", default="run", help="to compute with: run, fp32, or a recipe (default: run)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and the text that the model adds. Raises ValueError for bad input."""
    from lowprec_train.model.generation import Sampling, check_length, generate
    from lowprec_train.tools.evaluate import evaluation
    from lowprec_train.train import checks
    from lowprec_train.train.trained import Trained

    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
    trained, device = Trained(arguments.model, arguments.step), checks.device(arguments.device)
    tokenizer = evaluation.tokenizer_of(trained, arguments.tokenizer)
    if tokenizer is None:
        raise ValueError(f"no tokenizer is known for {arguments.model}: name it with --tokenizer")
    sizes = trained.weights.model
    start = evaluation.start_token(arguments.start, tokenizer, sizes.vocab_size)
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
        for token in generate(model, prompt, max_tokens=room, sampling=sampling, stop=tokenizer.eod):
            times.append(time.perf_counter())
            yield token

    for piece in pieces(timed(), tokenizer.decode, written):
        print(piece, end="", flush=True)
    print()
    print(rate(len(prompt), times), file=sys.stderr)
    return 0


def pieces(tokens: Iterable[int], decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> Iterator[str]:
    """Text that follows the prompt's, as it becomes certain: a character whose bytes are not all there yet waits for
    them. Decoded together with the prompt: by itself, a text's first word may lose the space before it.
    """
    ids = list(prompt)
    told = decode(ids)
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        if text.startswith(told) and not text.endswith("\ufffd"):
            yield text[len(told) :]
            told = text
    yield decode(ids)[len(told) :]


def rate(prompt: int, times: Sequence[float]) -> str:
    """The time to the first token and the rate after it, in a sentence. times: of the start and of each token, s."""
    count = len(times) - 1
    if not count:
        return f"{prompt} tokens read; the model closes the document at once"
    after = f", then {(count - 1) / (times[-1] - times[1]):.1f} tokens/s" if count > 1 else ""
    return f"{prompt} tokens read, the first of {count} after {times[1] - times[0]:.2f} s{after}"
