"""Export a run's model for Hugging Face transformers: config.json, safetensors and the tokenizer. Reads checkpoints of
any parallel layout, one tensor at a time. Needs neither a GPU nor transformers.

LLaMA models become LlamaForCausalLM, GPT models GPT2LMHeadModel. In FP32 the logits equal the model's own in FP32.

exit status:
  0  done
  2  bad input: missing checkpoint, a model without a transformers class, --out exists, or a missing tokenizer

examples:
  lowprec export-hf runs/fp4 --out exported/fp4
  lowprec export-hf runs/fp4 --out exported/fp4-step-1000 --step 1000 --dtype bf16 --max-shard-size 5GB
  lowprec export-hf runs/fp8 --out exported/fp8 --quantized fp8-tensor --dtype bf16
  lowprec export-hf runs/nvfp4 --out exported/nvfp4 --quantized nvfp4 --calibration data/val --dtype bf16
  lowprec export-hf runs/bf16 --out exported/nvfp4 --quantized nvfp4 --requantize
"""

import argparse
from typing import Any

from lowprec_train.tools import options

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
DECODED_TO_BF16 = ("nvfp4", "mxfp8", "mxfp4")  # by compressed-tensors; other layers in FP32 cannot take their results
FORMATS = ("fp8-tensor", "fp8-channel", "fp8-block", "nvfp4", "mxfp8", "mxfp4")
ACTIVATIONS = ("none", "dynamic", "mx", "static")

HELP = "export a run's model to Hugging Face format"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", type=options.path, help="run directory, or one that import-hf made")
    options.weights_directory(parser)
    options.step(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of all tensors that are not quantised (default: the narrowest that is exact; bf16 with --quantized "
        "nvfp4, mxfp8 or mxfp4, whose layers transformers runs in BF16)",
    )
    parser.add_argument(
        "--quantized",
        choices=FORMATS,
        help="write quantised weights in the layout of compressed-tensors, which transformers and vLLM load",
    )
    parser.add_argument(
        "--requantize", action="store_true", help="quantise weights that were not trained in this format"
    )
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        help="quantisation of the inputs of these layers at inference: none (W8A16, W4A16); dynamic (FP32 scales of "
        "the engine); mx (E4M3 with power-of-two scales of groups of 32); static (scales from --calibration) (default: "
        "the one that reproduces training, else none)",
    )
    parser.add_argument(
        "--calibration",
        metavar="PATH",
        type=options.path,
        help="text file or prepared set from which static scales of inputs are computed",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=options.path,
        help="SentencePiece model or tokenizer.json, or 'none' (default: that of the run's data)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Export a model and print what was written. Raises ValueError or OSError for bad input."""
    import torch

    from lowprec_train.config import run_and_step
    from lowprec_train.tools.huggingface import shards, tokenizer, transfer
    from lowprec_train.train.packages import needs_package
    from lowprec_train.train.weights import open_weights

    needs_package("safetensors", extra="hf", what="export-hf")
    limit = shards.size(arguments.max_shard_size)
    weights = open_weights(arguments.model, arguments.step)
    directory, _ = run_and_step(arguments.model)
    model = weights.model
    sizes = {"max_length": model.max_seq_len, "vocab_size": model.vocab_size}
    files, eos = tokenizer.of_model(directory, arguments.tokenizer, **sizes)
    named = arguments.dtype or ("bf16" if arguments.quantized in DECODED_TO_BF16 else None)
    dtype = getattr(torch, DTYPES[named]) if named else None
    other = arguments.tokenizer not in (None, tokenizer.NONE)  # its ids are not those that the model came with
    ids = {"eos_token_id": eos, **({} if other else transfer.special_ids(directory))}
    quantization = _quantization(arguments)
    settings = {"max_bytes": limit, "tokenizer": files, "ids": ids, "quantization": quantization}
    written = transfer.export(weights, arguments.out, dtype=dtype, **settings)
    print(f"{arguments.out}: {model.name} from {weights.source}, {str(written).removeprefix('torch.')}")
    if quantization is not None:
        print(quantization.summary)
    print(f"tokenizer: {', '.join(files)}" if files else "no tokenizer: --tokenizer FILE adds one")
    return 0


def _quantization(arguments: argparse.Namespace) -> Any:
    """The QuantizedExport of `--quantized`; None without it."""
    from lowprec_train.tools.huggingface.calibration import input_amax
    from lowprec_train.tools.huggingface.quantized import quantized_export
    from lowprec_train.train.trained import OF_RUN, UNQUANTISED, Trained

    if arguments.quantized is None:
        if arguments.requantize or arguments.activations or arguments.calibration:
            raise ValueError("--requantize, --activations and --calibration need --quantized FORMAT")
        return None
    trained = Trained(arguments.model, arguments.step)
    forward = trained.forward(UNQUANTISED if arguments.requantize else OF_RUN)
    settings = {"requantize": arguments.requantize, "activations": arguments.activations}
    if arguments.calibration is not None:
        settings["amax"] = input_amax(trained, arguments.calibration, arguments.tokenizer)
    settings |= {"recipe": trained.recipe_name(OF_RUN), "saved": forward.saved_activations}
    return quantized_export(arguments.quantized, forward.recipes, **settings)
