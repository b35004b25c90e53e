"""Train arms (recipes with overrides) on several seeds, one run on each GPU, and estimate the gap of each arm to a
baseline, with confidence intervals that hold for other seeds. STUDY is a YAML file or the name of a shipped study
(docs/study.md).

`run` continues a study from its folder, on any machine: it skips finished runs and resumes the others. After --minutes
the active runs save a checkpoint and end, and the command lists the remaining runs. As each run finishes, its results
are added to results.json in the folder.

exit status:
  0  finished, or stopped after --minutes
  1  a run failed
  2  bad input: unknown study, recipe or key; a seed with two purposes

examples:
  lowprec study list short_33m
  lowprec study run short_33m --per-gpu 2 --minutes 9 --set data=indexed data.train=data/mix data.split=[9,1]
  lowprec study run tiny --nproc 2
  lowprec study list main_130m --slurm | sh
  lowprec study report short_33m --set data=indexed data.train=data/mix data.split=[9,1]
  lowprec study report tiny --results other_machine/results.json
"""

from __future__ import annotations

import argparse
import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowprec_train.tools import options

if TYPE_CHECKING:
    from lowprec_train.tools.study.definition import Study
    from lowprec_train.tools.study.plan import StudyRun

HELP = "train recipes on several seeds and estimate their loss gaps"
_print_line = partial(print, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="study", metavar="WHAT", required=True)
    run_ = kinds.add_parser("run", help="train the runs of a study that are not finished, on this machine")
    where = run_.add_mutually_exclusive_group()
    where.add_argument("--gpus", metavar="N", default="all", help="number of GPUs, or `all` (default: all)")
    where.add_argument("--nproc", metavar="N", type=options.positive, help="train N runs at the same time on the CPU")
    run_.add_argument(
        "--per-gpu",
        metavar="N",
        type=options.positive,
        default=1,
        help="runs at the same time on each GPU (default: 1)",
    )
    run_.add_argument(
        "--minutes", metavar="M", type=minutes, help="stop after M minutes; active runs save a checkpoint"
    )
    list_ = kinds.add_parser("list", help="list the runs of a study and the state of each")
    list_.add_argument(
        "--task", metavar="I", type=int, help="print the overrides of run I (counted from 0), one a line"
    )
    list_.add_argument(
        "--slurm", action="store_true", help="print the sbatch command that trains all runs as a job array"
    )
    report = kinds.add_parser(
        "report", help="write the estimates from the finished runs: Markdown, JSON, a figure and an HTML page"
    )
    report.add_argument(
        "--results",
        metavar="FILE",
        nargs="+",
        type=options.path,
        default=[],
        help="also use the runs in these results.json files, written by `run` or `report` on other machines",
    )
    for each in (run_, list_, report):
        each.add_argument("file", metavar="STUDY", type=options.path, help="YAML file, or the name of a shipped study")
        each.add_argument(
            "--out", metavar="DIR", type=options.path, help="folder of the study (default: runs/study/NAME)"
        )
        each.add_argument("--arms", metavar="ARM", nargs="+", help="use only these arms")
        each.add_argument("--seeds", metavar="N", nargs="+", type=int, help="use only runs with these seeds")
        each.add_argument("--purpose", choices=("gate", "sweep", "estimate"), help="use only runs with this purpose")
        each.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], help="overrides for all runs")
    evaluate = kinds.add_parser("evaluate", help="evaluate finished runs that have no evaluation.json")
    evaluate.add_argument("runs", metavar="RUN", nargs="+", type=options.path, help="run directory")
    evaluate.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status. Raises ValueError for bad input."""
    return {"run": _run, "list": _list, "evaluate": _evaluate, "report": _report}[arguments.study](arguments)


def minutes(text: str) -> float:
    """Parse a positive, finite number of minutes."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")


def _run(arguments: argparse.Namespace) -> int:
    from lowprec_train.data.appending import write_whole
    from lowprec_train.tools.study import plan, progress, running
    from lowprec_train.train.launch import check_one_process

    check_one_process("lowprec study run")
    study, planned, out = _planned(arguments)
    workers = _workers(arguments)
    configured = plan.check(study, planned)
    _check_root(out)
    _check_folder(study, out)
    purposes = _purposes(study, out)  # before the text, which can take long to prepare
    plan.check_text(study, configured)
    write_whole(out / "seeds.json", f"{json.dumps(purposes, indent=2)}\n".encode())
    whole = plan.runs(study)
    runner = running.Runner(
        planned,
        out,
        workers,
        minutes=arguments.minutes,
        keep_checkpoints=study.keep_checkpoints,
        whole=whole,
        say=_print_line,
        on_finished=partial(_write_results, study.name, whole, out),
    )
    try:
        failed = runner.run()
    except KeyboardInterrupt:
        _print_line("stopped by a second interrupt; each run resumes from its last checkpoint")
        return 1
    for name, text in failed.items():
        _print_line(f"{name} failed:\n{text}")
    for line in progress.summary(planned, out):
        _print_line(line)
    return int(bool(failed))


def _write_results(name: str, whole: list[StudyRun], out: Path) -> None:
    """Write results.json of all finished runs in the folder. If it cannot be written, training goes on."""
    from lowprec_train.data.appending import write_whole
    from lowprec_train.tools.study import results, stored_results

    try:
        found, _ = results.read(whole, out)
        write_whole(out / stored_results.FILE, stored_results.to_json(name, found).encode())
    except (ValueError, OSError) as error:
        _print_line(f"{out / stored_results.FILE} is not up to date: {error}")


def _workers(arguments: argparse.Namespace) -> list[Any]:
    from lowprec_train.tools import train
    from lowprec_train.tools.study import running
    from lowprec_train.train.processes import visible_gpus

    if arguments.nproc:
        return running.cpu_workers(arguments.nproc)
    count = train.gpus(arguments.gpus)
    return running.gpu_workers(visible_gpus()[:count], arguments.per_gpu)


def _list(arguments: argparse.Namespace) -> int:
    from lowprec_train.tools.study import plan, progress

    study, planned, out = _planned(arguments)
    if arguments.task is not None or arguments.slurm:
        _check_root(out)
    if arguments.task is not None:
        if not 0 <= arguments.task < len(planned):
            raise ValueError(f"--task {arguments.task}: study {study.name} has runs 0 to {len(planned) - 1}")
        print(*planned[arguments.task].command(out), sep="\n")
    elif arguments.slurm:
        plan.check(study, planned)  # here rather than in each job
        print(_array(arguments, planned))
    else:
        found = progress.states(planned, out)
        width = max(len(run.name) for run in planned)
        for run in planned:
            print(f"{run.name:{width}}  {run.purpose:8}  {found[run.name].value}")
        print(*progress.summary(planned, out), sep="\n")
    return 0


def _array(arguments: argparse.Namespace, planned: list[StudyRun]) -> str:
    """Return the sbatch command of the job array. Raises ValueError for forks, which depend on another run."""
    forked = [run.name for run in planned if run.trunk]
    if forked:
        raise ValueError(
            f"--slurm: {forked[0]} forks from another run, and the jobs of an array do not wait for each other"
        )
    words = ["sbatch", f"--array=0-{len(planned) - 1}", "scripts/slurm/study.sbatch", str(arguments.file)]
    for option in ("out", "purpose"):
        words += [f"--{option}", str(value)] if (value := getattr(arguments, option)) else []
    for option in ("arms", "seeds", "set"):
        words += [f"--{option}", *map(str, value)] if (value := getattr(arguments, option)) else []
    return shlex.join(words)


def _report(arguments: argparse.Namespace) -> int:
    from lowprec_train.train.packages import needs_package

    needs_package("scipy", extra="study", what="lowprec study report")
    from lowprec_train.tools.study import figure, measure, page, plan, report, results, stored_results

    study, planned, out = _planned(arguments)
    folder = out / "report"
    stored, kept = folder / stored_results.FILE, {}
    if stored.exists() and (arguments.arms or arguments.seeds or arguments.purpose):
        stored_results.read(
            [stored], plan.runs(study), study.name
        )  # refuses what is not of this study as it is planned
        kept = stored_results.stored_runs(stored, study.name)
    found, left = results.read(planned, out, stored_results.read(arguments.results, planned, study.name))
    measured = measure.measure(study, found, left)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "figure.svg" if measured.cells else None
    if picture:
        figure.save(measured, picture)
    sweep = "sweep.svg" if figure.save_sweep(measured, folder / "sweep.svg") else ""
    text = report.to_markdown(measured, study, figure="figure.svg", sweep=sweep)
    contents = {"report.md": text, "report.json": report.to_json(measured)}
    contents[stored_results.FILE] = stored_results.to_json(study.name, found, kept)
    if curves := [each.run for each in found if each.logged and (out / each.run.name).is_dir()]:
        contents["report.html"] = page.to_html(measured, curves, out, picture)
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    print(text)
    print(f"Saved {folder}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from lowprec_train.tools.study.evaluation import evaluated

    for each in arguments.runs:
        losses = evaluated(each, device=arguments.device)["loss"]
        print(f"{each}: {', '.join(f'{forward} {loss:.5f}' for forward, loss in losses.items())}")
    return 0


def _planned(arguments: argparse.Namespace) -> tuple[Study, list[StudyRun], Path]:
    """Return the study, the selected runs with those that they fork from, and the folder."""
    from lowprec_train.tools.study import definition, plan

    study = definition.load(definition.find(arguments.file)).with_overrides(arguments.set)
    for arm in arguments.arms or ():
        if arm not in study.arms:
            raise ValueError(f"--arms {arm}: study {study.name} has {', '.join(study.arms)}")
    for seed in arguments.seeds or ():
        if seed not in study.seeds:
            raise ValueError(f"--seeds {seed}: study {study.name} has {', '.join(map(str, study.seeds))}")
    everything = [each for each in plan.runs(study) if arguments.purpose in (None, each.purpose)]
    chosen = [
        each
        for each in everything
        if each.arm in (arguments.arms or (each.arm,)) and each.seed in (arguments.seeds or (each.seed,))
    ]
    trunks = {each.trunk for each in chosen}
    wanted = [each for each in everything if each in chosen or each.name in trunks]
    if not wanted:
        arms = f" of --arms {' '.join(arguments.arms)}" if arguments.arms else ""
        seeds = f" with --seeds {' '.join(map(str, arguments.seeds))}" if arguments.seeds else ""
        purpose = f" for --purpose {arguments.purpose}" if arguments.purpose else ""
        raise ValueError(f"study {study.name} has no run{arms}{seeds}{purpose}")
    plan.check_used(arguments.set, wanted)
    return study, wanted, arguments.out or Path("runs") / "study" / study.name


def _check_root(out: Path) -> None:
    """Raise ValueError if Hydra would read another value from the override run_root=... of a run."""
    from lowprec_train.train.command_line import Setting

    if Setting.of(f"run_root={out}").text() != str(out):
        raise ValueError(f"--out {out}: Hydra does not read this path as it is; choose letters, digits and _ - . /")


def _check_folder(study: Study, out: Path) -> None:
    """Raise ValueError if the folder has the results of another study: each study writes the same files there."""
    from lowprec_train.config import read_object
    from lowprec_train.tools.study import stored_results

    if (name := read_object(out / stored_results.FILE).get("study", study.name)) != study.name:
        raise ValueError(f"{out} has the results of study {name}, and this is study {study.name}: give another --out")


def _purposes(study: Study, out: Path) -> dict[str, Any]:
    """Return each seed's purpose, those in seeds.json of the folder included, and make the folder.

    Raises ValueError if a seed had another purpose there, and OSError if the folder cannot be made.
    """
    from lowprec_train.config import read_object

    out.mkdir(parents=True, exist_ok=True)
    before = read_object(out / "seeds.json")
    for seed, purpose in study.seeds.items():
        if before.get(str(seed), purpose) != purpose:
            raise ValueError(
                f"seed {seed} has the purpose {before[str(seed)]} in {out / 'seeds.json'}, and {purpose} in the study"
            )
    return before | {str(seed): purpose for seed, purpose in study.seeds.items()}
