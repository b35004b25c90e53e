"""Benchmark one GPU or several, and write the results as JSON and as a Markdown table. Compare only numbers of one run:
GPUs of the same model differ, and the speed of one GPU changes over time.

exit status:
  0  done; a contestant that failed has its error in its row
  1  --dry-run: a contestant cannot be built
  2  bad input, or the benchmark needs a CUDA device and there is none

examples:
  lowprec bench kernels --only 'rotate_fold*'
  lowprec bench gemm --out results
  lowprec bench step --recipes fp8,fp4,mxfp4 --peers plain,torchao,te
  lowprec bench step --model llama_1b3 --batch 16 --recipes fp8+head,coat+own --profile coat
  lowprec bench step --recipes fp8 --peers te:Delayed --apart --rounds 24
  lowprec bench step --model dim=4096,heads=32,ffn=11008,layers=8 --parameters fp32 --peers plain,linear --dry-run
  torchrun --nproc-per-node 8 -m lowprec_train.tools.cli bench comm
  torchrun --nproc-per-node 4 -m lowprec_train.tools.cli bench parallel --peers plain,torchao \
      --arm bf16 --arm fp8 --arm 'fp8 comm=fp8 parallel.param_all_gather=quantized' --arm 'fp8 parallel.tp=2'
  lowprec bench memory --model llama_7b_8layers --batches 4,2 --peers te:Delayed
  lowprec bench memory --arm bf16 --arm 'coat optim/master=bf16 model.recompute=full' --limit 24GB
  lowprec bench report results/gemm.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lowprec_train.tools.options import path, positive
from lowprec_train.train import cuda_allocator

HELP = "time of kernels, GEMMs and training steps on a GPU"
MODEL, BATCH, SEQ_LEN = "llama_7b_8layers", 8, 2048
RECIPES = "fp8,fp4,mxfp4"
LEAN = "optim=adamw_coat optim/master=bf16 optim.in_backward=true precision/saved_activations=coat"
ARMS = ("bf16", "coat", "fp4_fold", f"fp4_fold {LEAN}")  # default arms of `memory`; the last has the smallest memory
OUT = Path("bench")
COMM_MINUTES = 5.0  # timeout of a collective


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    kernels = kinds.add_parser("kernels", help="time of every op and optimizer, compared with a device copy")
    kernels.add_argument("--only", metavar="PATTERN", default="*", help="shell pattern, or part, of 'op case'")
    gemm = kinds.add_parser("gemm", help="TFLOP/s by format, and exactness")
    gemm.add_argument("--no-exactness", action="store_true", help="measure speeds only")
    linear = kinds.add_parser("linear", help="a linear layer forward and backward, by recipe")
    linear.add_argument("--recipes", type=names, default="fp8,fp4,mxfp4,mxfp4_fp8", help="default: %(default)s")
    _step_options(kinds.add_parser("step", help="training steps of recipes and peers, interleaved"))
    comm = kinds.add_parser("comm", help="gradient reductions by payload, under torchrun")
    comm.add_argument(
        "--model", default="llama_7b", help="reduce the gradients of one block of this model (default: %(default)s)"
    )
    comm.add_argument(
        "--rounds", type=positive, default=20, metavar="N", help="timed calls per payload (default: %(default)s)"
    )
    comm.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu uses the gloo backend")
    comm.add_argument(
        "--gradients",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the gradients: fp32, as sums of micro-batches, or bf16, as most are sent (default: %(default)s)",
    )
    comm.add_argument(
        "--cuda-graph",
        action="store_true",
        help="record each reduction as a CUDA graph, so that the host's time to launch it is not counted",
    )
    _parallel_options(kinds.add_parser("parallel", help="training steps on several GPUs, under torchrun"))
    _memory_options(kinds.add_parser("memory", help="peak memory of a training step by category, with a figure"))
    for each in (kernels, gemm, linear, comm, *(kinds.choices[name] for name in ("step", "parallel", "memory"))):
        each.add_argument("--out", metavar="DIR", type=path, default=OUT, help="default: %(default)s")
    report = kinds.add_parser("report", help="print the table of a JSON result, and draw its figure")
    report.add_argument("file", metavar="FILE.json", type=path)
    report.add_argument("--figure", metavar="FILE.svg", type=path, help="also draw the figure (parallel and memory)")
    report.add_argument(
        "--timeline", metavar="FILE.svg", type=path, help="also draw when kernels and collectives run, from profiles"
    )
    report.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="draw only this row's timeline; repeatable"
    )


def _step_options(step: argparse.ArgumentParser) -> None:
    step.add_argument("--model", default=MODEL, help="model configuration, or sizes: dim=..,heads=..,ffn=..,layers=..")
    step.add_argument("--batch", type=positive, default=BATCH, help="sequences per step (default: %(default)s)")
    step.add_argument("--seq-len", type=positive, default=SEQ_LEN, help="default: %(default)s")
    step.add_argument(
        "--recipes",
        type=names,
        default=RECIPES,
        help="recipes; suffix +own: with the recipe's optimizer, +head: with an FP8 head, +norms: with "
        "model.recompute=norms; default: %(default)s",
    )
    step.add_argument(
        "--peers",
        type=names,
        default="plain",
        help="plain, linear, torchao, te, or one variant such as te:Delayed; default: %(default)s",
    )
    step.add_argument("--head", metavar="RECIPE", help="recipe of the output head, except for BF16")
    step.add_argument(
        "--parameters", choices=("bf16", "fp32"), default="bf16", help="dtype of the weight matrices (default: bf16)"
    )
    step.add_argument(
        "--optimizer",
        choices=("fused", "own"),
        default="fused",
        help="fused: torch's fused AdamW; own: each recipe's optimizer, except for bf16",
    )
    step.add_argument("--clip", type=float, default=0.0, metavar="NORM", help="maximum gradient norm (default: none)")
    step.add_argument("--eager", action="store_true", help="do not compile")
    step.add_argument(
        "--set",
        metavar="OVERRIDE",
        action="append",
        default=[],
        help="Hydra override for the models of this package; of precision and recomputation: not for BF16",
    )
    step.add_argument("--groups", type=positive, default=4, metavar="N", help="contestants per group (default: 4)")
    step.add_argument(
        "--apart", action="store_true", help="run each contestant in a separate process (always so for te)"
    )
    step.add_argument(
        "--resident", type=positive, metavar="N", help="models in GPU memory at once (default: as many as fit)"
    )
    step.add_argument("--warm-up", type=positive, default=4, metavar="N")
    step.add_argument("--rounds", type=positive, default=8, metavar="N")
    step.add_argument(
        "--profile",
        metavar="NAMES",
        action="append",
        type=names,
        default=[],
        help="profile contestants whose name contains one of NAMES, a comma-separated list; 'all': every one",
    )
    step.add_argument("--dry-run", action="store_true", help="only build the models on the meta device; needs no GPU")


def _parallel_options(parallel: argparse.ArgumentParser) -> None:
    parallel.add_argument("--model", default=MODEL, help="configuration or sizes, as for step (default: %(default)s)")
    parallel.add_argument(
        "--batch", type=positive, default=4, help="sequences per micro-batch and GPU (default: %(default)s)"
    )
    parallel.add_argument("--seq-len", type=positive, default=SEQ_LEN, help="default: %(default)s")
    parallel.add_argument("--micro-batches", type=positive, default=1, metavar="N", help="per step (default: 1)")
    parallel.add_argument(
        "--arm",
        metavar="'RECIPE OVERRIDE ...'",
        action="append",
        default=[],
        help="a run to measure; with the word `alone`, each GPU trains without communication: the upper bound",
    )
    parallel.add_argument(
        "--peers", type=names, default="plain", help="plain, plain-pairs, torchao, torchao-rowwise, or none"
    )
    parallel.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu uses the gloo backend")
    parallel.add_argument("--eager", action="store_true", help="do not compile")
    parallel.add_argument("--groups", type=positive, default=4, metavar="N", help="contestants per group (default: 4)")
    parallel.add_argument(
        "--resident", type=positive, metavar="N", help="models in GPU memory at once (default: as many as fit)"
    )
    parallel.add_argument("--warm-up", type=positive, default=4, metavar="N")
    parallel.add_argument("--rounds", type=positive, default=8, metavar="N")
    parallel.add_argument("--no-profile", action="store_true", help="measure times and memory only")


def _memory_options(memory: argparse.ArgumentParser) -> None:
    memory.add_argument("--model", default=MODEL, help="configuration or sizes, as for step (default: %(default)s)")
    memory.add_argument("--seq-len", type=positive, default=SEQ_LEN, help="default: %(default)s")
    memory.add_argument(
        "--batches",
        type=counts,
        metavar="N,N",
        default="4,2",
        help="micro-batch sizes; the first is timed, and two determine the largest that fits (default: %(default)s)",
    )
    memory.add_argument(
        "--arm", metavar="'RECIPE OVERRIDE ...'", action="append", default=[], help="a run to measure; repeatable"
    )
    memory.add_argument("--peers", type=names, default="none", help="as for step (default: %(default)s)")
    memory.add_argument("--limit", metavar="SIZE", default="80GB", help="GPU memory, e.g. 24GiB (default: %(default)s)")
    memory.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu: count the bytes of tensor storages"
    )
    memory.add_argument("--eager", action="store_true", help="do not compile")
    memory.add_argument("--warm-up", type=positive, default=3, metavar="N")
    memory.add_argument("--rounds", type=positive, default=5, metavar="N")


def counts(text: str) -> list[int]:
    """Parse a comma-separated list of positive integers."""
    return [positive(each) for each in text.split(",")]


def names(text: str) -> list[str]:
    """Parse a comma-separated list of names; `none` and the empty string give an empty list."""
    return [] if text in ("", "none") else text.split(",")


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark; print its table and write the results. Raises ValueError for bad input."""
    commands = {"kernels": _kernels, "gemm": _gemm, "linear": _linear, "step": _step, "report": _report}
    commands |= {"comm": _comm, "parallel": _parallel, "memory": _memory}
    cuda_allocator.expand_segments()
    return commands[arguments.bench](arguments)


def _cuda(otherwise: str = "") -> Any:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"this benchmark needs a GPU, and torch {torch.__version__} finds no CUDA device{otherwise}")
    return torch.device("cuda", torch.cuda.current_device())


def _kernels(arguments: argparse.Namespace) -> int:
    device = _cuda()
    from lowprec_train.tools.bench import kernels

    return _finish(arguments, device, "kernels", kernels.measure(device, only=arguments.only))


def _gemm(arguments: argparse.Namespace) -> int:
    device = _cuda()
    from lowprec_train.tools.bench import gemm

    return _finish(arguments, device, "gemm", gemm.measure(device, exact=not arguments.no_exactness))


def _linear(arguments: argparse.Namespace) -> int:
    from lowprec_train.tools.bench import linear

    recipes = linear.recipes(arguments.recipes)
    device = _cuda()
    return _finish(arguments, device, "linear", linear.measure(device, recipes))


def _step(arguments: argparse.Namespace) -> int:
    import torch

    from lowprec_train.tools.bench import configuration, ours, peers, report, step
    from lowprec_train.tools.bench.contestant import Work

    contestants = ours.contestants(arguments.recipes, head=arguments.head, own=arguments.optimizer == "own")
    contestants += peers.chosen(arguments.peers)
    arguments.profile = [name for each in arguments.profile for name in each]
    profiled = step.profile_filters(arguments.profile, [each.name for each in contestants if not each.missing])
    device = torch.device("meta") if arguments.dry_run else _cuda()
    if arguments.apart:
        contestants = [replace(each, apart=True) for each in contestants]
    given = {name: getattr(arguments, name) for name in ("model", "batch", "seq_len", "parameters", "clip")}
    work = Work(**given, device=device, compiled=not arguments.eager, overrides=tuple(arguments.set))
    work.check()
    ours.check_precision(arguments.recipes, work)
    if arguments.dry_run:
        found = step.dry_run(contestants, work, largest=arguments.groups)
        print(report.dry(found))
        return int(any(row.get("failed") for row in found["rows"]))
    how = {"largest": arguments.groups, "resident": arguments.resident, "rounds": arguments.rounds}
    result = step.measure(contestants, work, **how, warm_up=arguments.warm_up, profiled=profiled, say=_say)
    return _finish(arguments, device, f"step_{configuration.model_name(arguments.model)}", result)


def _comm(arguments: argparse.Namespace) -> int:
    from lowprec_train.numerics import formats
    from lowprec_train.tools.bench import comm

    with _ranks(arguments) as (world, device):
        how = {"rounds": arguments.rounds, "cuda_graph": arguments.cuda_graph}
        gradients = formats.parse_format(arguments.gradients)
        result = comm.measure(device, comm.layer(arguments.model), gradients=gradients, **how)
        name = f"comm_{world.processes}{'_graph' if arguments.cuda_graph else ''}"
        name += "_bf16" if gradients is formats.BF16 else ""
        return _finish(arguments, device, name, result) if world.leads else 0


def _parallel(arguments: argparse.Namespace) -> int:
    from lowprec_train.tools.bench import configuration, parallel
    from lowprec_train.tools.bench.contestant import Work
    from lowprec_train.train import launch

    found = parallel.contestants(arguments.arm, arguments.peers, launch.world())
    name = f"parallel_{configuration.model_name(arguments.model)}_{launch.world().processes}"
    with _ranks(arguments) as (world, device):
        given = {each: getattr(arguments, each) for each in ("model", "batch", "seq_len", "micro_batches")}
        work = Work(**given, device=device, compiled=not arguments.eager, parameters="fp32")
        work.check()
        how = {"largest": arguments.groups, "resident": arguments.resident, "rounds": arguments.rounds}
        how |= {"profiled": [] if arguments.no_profile else [""], "say": _say if world.leads else lambda line: None}
        result = parallel.measure(found, work, world, warm_up=arguments.warm_up, **how)
        return _finish(arguments, device, name, result) if world.leads else 0


def _memory(arguments: argparse.Namespace) -> int:
    from lowprec_train.tools.bench import configuration, memory, peers
    from lowprec_train.tools.bench.contestant import Work
    from lowprec_train.tools.estimate.fit import parse_size
    from lowprec_train.train import checks

    arms = arguments.arm or ARMS
    found = memory.contestants(arms, peers.chosen(arguments.peers))
    device = checks.device("cpu") if arguments.device == "cpu" else _cuda("; name --device cpu for a small model")
    batches, limit = arguments.batches, parse_size(arguments.limit, "--limit")
    given = {"model": arguments.model, "seq_len": arguments.seq_len, "batch": batches[0], "device": device}
    work = Work(**given, compiled=not arguments.eager, parameters="fp32", overrides=tuple(_eager(arguments)))
    work.check()
    how = {"batches": batches, "limit": limit, "rounds": arguments.rounds, "warm_up": arguments.warm_up}
    result = memory.measure(found, work, **how, say=_say)
    return _finish(arguments, device, f"memory_{configuration.model_name(arguments.model)}", result)


def _eager(arguments: argparse.Namespace) -> list[str]:
    """Return overrides with which `lowprec estimate` describes the measured run."""
    return ["compile='off'"] if arguments.eager else []


@contextmanager
def _ranks(arguments: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """Yield (world, device) within the process group of all ranks. Raises ValueError for one process."""
    import torch

    from lowprec_train.train import checks, launch, rendezvous

    world = launch.world()
    if world.processes < 2:
        raise ValueError("this benchmark needs at least 2 processes: start it with torchrun --nproc-per-node N")
    device = checks.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    started = rendezvous.met(world, timedelta(minutes=COMM_MINUTES))
    with started as meeting, launch.joined(world, device, COMM_MINUTES, meeting.store):
        yield world, device


def _report(arguments: argparse.Namespace) -> int:
    from lowprec_train.tools.bench import report, result, timeline_plot

    if arguments.only and not arguments.timeline:
        raise ValueError(f"--only {arguments.only[0]} chooses a row of --timeline, which is not given")
    found = result.load(arguments.file)
    print(report.markdown(found))
    if arguments.figure and not _drawn(found, arguments.figure):
        raise ValueError(f"--figure: {arguments.file} is from bench {found['bench']}; allowed: parallel, memory")
    if arguments.timeline and not timeline_plot.save(found, arguments.timeline, arguments.only):
        raise ValueError(f"--timeline: {arguments.file} has no profile with a timeline")
    return 0


def _drawn(result: dict[str, Any], file: Path) -> bool:
    """Write the figure of a result. Returns False if this benchmark has none."""
    from lowprec_train.tools.bench import memory_plot, parallel_plot

    saves = {"memory": memory_plot.save, "parallel": parallel_plot.save}
    return result["bench"] in saves and saves[result["bench"]](result, file)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _finish(arguments: argparse.Namespace, device: Any, name: str, measured: dict[str, Any]) -> int:
    """Write the result and print its table."""
    from lowprec_train.tools.bench import report, result

    about = {"bench": arguments.bench, "environment": result.environment(device, _command(sys.argv[1:]))}
    made = about | {"options": _options(arguments)} | measured
    written = result.save(made, arguments.out, name)
    if _drawn(made, figure := arguments.out / f"{name}.svg"):
        written.append(figure)
    print(report.markdown(made))
    print(f"Saved {', '.join(map(str, written))}")
    return 0


def _command(arguments: Sequence[str]) -> list[str]:
    """Return the command that repeats this measurement, without --out."""
    from lowprec_train.train import launch

    words = list(arguments)
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    processes = launch.world().processes
    if processes == 1:
        return ["lowprec", *words]
    return ["torchrun", "--nproc-per-node", str(processes), "-m", "lowprec_train.tools.cli", *words]


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {key: value for key, value in vars(arguments).items() if key not in ("run", "command", "bench", "out")}
    return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
