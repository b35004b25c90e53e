"""Estimate the memory per GPU and the communication of a run from its configuration, without a GPU. Accepts the
overrides of train.py. Memory is the peak within a step, without the CUDA context, NCCL buffers and fragmentation
(docs/parallelism.md). With --device, also the time of a step, from measured rates.

examples:
  lowprec estimate +recipe=fp4 model=llama_7b parallel.dp_shard=8 parallel.tp=2 micro_batch=1 data.seq_len=2048
  lowprec estimate --gpus 1024 +recipe=coat model=llama_13b parallel.dp_replicate=16 model.recompute=selective --json
  lowprec estimate --fit 24GiB +recipe=coat model=llama_7b data.seq_len=1024 tokens_per_step=8192
  lowprec estimate --device h200 +recipe=fp8 model=llama_7b model.layers=8 micro_batch=8 data.seq_len=2048
  lowprec estimate --table
"""

from __future__ import annotations

import argparse
import json
import sys

from lowprec_train.tools.estimate.device import DEVICES, device_of

HELP = "estimate memory, communication and step time of a run, without a GPU"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="Hydra override, as for train.py")
    parser.add_argument("--gpus", type=int, help="number of GPUs; determines dp_shard=-1")
    parser.add_argument("--device", metavar="NAME", help=f"GPU for the estimate of time: {', '.join(DEVICES)}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, in bytes and FLOPs, with all phases of a step")
    form.add_argument(
        "--fit", metavar="SIZE", help="find settings and micro-batches that fit a GPU of this memory, e.g. 24GiB, 80GB"
    )
    form.add_argument("--table", action="store_true", help="print the table of docs/parallelism.md: recipes by layouts")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate. Raises ValueError for bad input."""
    from lowprec_train.tools.estimate import fit, report, subject, table
    from lowprec_train.train.compose import composed

    device = None if arguments.device is None else device_of(arguments.device)
    if arguments.table:
        if device is not None:
            raise ValueError(f"--table has no times; remove --device {arguments.device}")
        print(table.markdown(arguments.overrides))
        return 0
    if arguments.fit is not None:
        size = fit.parse_size(arguments.fit)
        if fit.names_micro_batch(arguments.overrides):
            _warn(subject.check_step(composed(*arguments.overrides), arguments.overrides, arguments.gpus))
        asked = (arguments.overrides, size, arguments.gpus, device)
        found = fit.fits(*asked)
        print(fit.text(found, size, None if any(each.found for each in found) else fit.shorter(*asked)))
        return 0
    run = composed(*arguments.overrides)
    uneven = subject.check_step(run, arguments.overrides, arguments.gpus)
    estimated = report.estimate(run, arguments.gpus, device)
    _warn(uneven, f"; this estimate is of {estimated['tokens_per_step']:,} tokens a step")
    print(json.dumps(estimated, indent=1) if arguments.json else report.text(estimated))
    return 0


def _warn(uneven: str, taken: str = "") -> None:
    """Print a warning that a run would be refused for a reason that is not ""."""
    if uneven:
        print(f"warning: {uneven}{taken}, and a run would be refused", file=sys.stderr)
