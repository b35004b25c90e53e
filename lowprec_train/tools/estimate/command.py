"""`lowprec estimate`: the command line."""

from __future__ import annotations

import argparse
import json

from lowprec_train.tools.estimate.device import DEVICES, device_of

HELP = "memory, traffic and time of a run, before there is a GPU"
DESCRIPTION = """\
What a run needs of each GPU and of the network, from its configuration alone: no GPU is touched and no memory taken.
Takes the overrides that train.py takes. Memory is at the moment of a step when it is most; CUDA's context, NCCL's
buffers and fragmentation come on top (docs/parallelism.md). With --device, the time of a step from measured rates.
"""
EPILOG = """\
examples:
  lowprec estimate +recipe=fp4 model=llama_7b parallel.dp_shard=8 parallel.tp=2 micro_batch=1 data.seq_len=2048
  lowprec estimate --gpus 1024 +recipe=coat model=llama_13b parallel.dp_replicate=16 model.recompute=selective --json
  lowprec estimate --fit 24GiB +recipe=coat model=llama_7b data.seq_len=1024 tokens_per_step=65536
  lowprec estimate --device h200 +recipe=fp8 model=llama_7b model.layers=8 micro_batch=8 data.seq_len=2048
  lowprec estimate --table
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the configuration, as for train.py")
    parser.add_argument("--gpus", type=int, help="processes; a dp_shard of -1 takes what the other axes leave")
    parser.add_argument(
        "--device", metavar="NAME", help=f"the GPU that the time of a step is for: {', '.join(DEVICES)}"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="numbers in bytes and FLOPs, with every moment of a step")
    form.add_argument(
        "--fit", metavar="SIZE", help="settings and micro-batches that fit a GPU of so much memory, as 24GiB or 80GB"
    )
    form.add_argument("--table", action="store_true", help="the table of docs/parallelism.md: recipes by layouts")


def run(arguments: argparse.Namespace) -> int:
    """Estimate and print."""
    from lowprec_train.tools.estimate import fit, report, table
    from lowprec_train.train import ranges
    from lowprec_train.train.compose import composed

    device = None if arguments.device is None else device_of(arguments.device)
    if arguments.table:
        if device is not None:
            raise ValueError(f"--table has no times: leave --device {arguments.device} out")
        print(table.markdown(arguments.overrides))
        return 0
    if arguments.gpus is not None and arguments.gpus < 1:
        raise ValueError(f"--gpus {arguments.gpus} must be at least 1")
    if arguments.fit is not None:
        size = fit.parse_size(arguments.fit)
        print(fit.text(fit.fits(arguments.overrides, size, arguments.gpus, device), size))
        return 0
    run = composed(*arguments.overrides)
    ranges.check(run)
    found = report.estimate(run, arguments.gpus, device)
    print(json.dumps(found, indent=1) if arguments.json else report.text(found))
    return 0
