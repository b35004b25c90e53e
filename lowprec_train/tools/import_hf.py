"""Convert a LLaMA, Mistral, Qwen 2 or 3, OLMo 2 or GPT-2 model from Hugging Face format to a directory for training,
evaluation and export: model.yaml, safetensors in this package's layout, and the tokenizer. Reads one tensor at a time.

Tensors keep their dtype. Unsupported models are refused: RoPE scaling other than that of Llama 3.1, other activation
functions, sliding windows, quantised weights.

exit status:
  0  done
  2  bad input: missing model, unsupported family, tensors that do not fit config.json, or --out exists

examples:
  lowprec import-hf downloads/llama --out imported/llama
  torchrun train.py weights=imported/llama model=from_checkpoint +recipe=fp4
"""

import argparse
import re

from lowprec_train.tools import options

HELP = "import a Hugging Face model as the initial weights of a run"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", type=options.path, help="directory with config.json and safetensors")
    options.weights_directory(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="name of the model, part of the names of its runs (default: that of --out)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Import a model and print its sizes. Raises ValueError or OSError for bad input."""
    from lowprec_train.tools.huggingface import shards, tokenizer, transfer
    from lowprec_train.train.packages import needs_package
    from lowprec_train.train.rundir import NAME

    needs_package("safetensors", extra="hf", what="import-hf")
    limit = shards.size(arguments.max_shard_size)
    name = arguments.name or re.sub(r"[^A-Za-z0-9_.=+-]", "_", arguments.out.resolve().name)
    if not NAME.fullmatch(name):
        raise ValueError(f"--name {name!r} cannot be part of a run's name: letters, digits and _ . = + - only")
    files = tokenizer.read_files(arguments.model)
    model = transfer.import_(arguments.model, arguments.out, name=name, max_bytes=limit, tokenizer=files)
    print(f"{arguments.out}: {model.layers} layers of width {model.dim}, {model.vocab_size} words")
    print(f"tokenizer: {', '.join(files)}" if files else "no tokenizer there")
    print(f"train.py weights={arguments.out} model=from_checkpoint begins with it")
    return 0
