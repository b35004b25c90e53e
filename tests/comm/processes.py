"""Runs every case on several processes and saves each rank's results; started once for all tests.

Usage: processes.py DIRECTORY [nccl]. Without `nccl`, RANKS processes over gloo, forked from one that has imported
torch; with it, two GPUs. They meet through a file.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lowprec_train.comm import collectives
from lowprec_train.comm.block_scaled import BlockScaledCodec
from lowprec_train.comm.shared_scale import MuSchedule, SharedScaleCodec
from tests.comm.cases import CASES, RANKS, ROW, gradients, of_two_ranks

ROOT = Path(__file__).parents[2]


def launch(directory, *arguments):
    """Run this file to its end in processes of its own; what each rank saved."""
    command = [sys.executable, __file__, str(directory), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [torch.load(path) for path in sorted(Path(directory).glob("rank-*.pt"))]


def run(case, rank, device="cpu"):
    """This rank's result, on the CPU."""
    collective, flat = getattr(collectives, case.kind), case.flats[rank].to(device)
    mu = torch.tensor(case.mu, device=device)
    total, saturated = collective(flat, None, case.codec, case.layout, mu=mu, chunk=case.chunk)
    return total.cpu() if saturated is None else (total.cpu(), saturated.cpu())


def scheduled(rank, steps=6):
    """mu and the share at the maximum, step by step, of identical gradients from mu = 1 on."""
    schedule, history = MuSchedule(RANKS), []
    schedule.load_state_dict({"level": torch.tensor(0)})
    flat = gradients(RANKS * ROW.size)[0]
    for _ in range(steps):
        mu = schedule.mu
        _, share = collectives.reduce_scatter(flat, None, SharedScaleCodec(), ROW, mu=mu)
        schedule.update(share)
        history.append(torch.stack((mu, share)))
    return torch.stack(history)


def refusals():
    """The messages of what must be refused: averages, and sizes that do not fit."""
    messages = []
    for kind, size in (("reduce_scatter", RANKS * ROW.size), ("all_reduce", ROW.size)):
        for options in ({"op": dist.ReduceOp.AVG}, {"op": dist.ReduceOp.MAX}, {"short": 1}, {"chunk": 100}):
            options = dict(options)
            flat = torch.zeros(size - options.pop("short", 0))
            try:
                getattr(collectives, kind)(flat, None, BlockScaledCodec(), ROW, **options)
                messages.append(None)
            except ValueError as error:
                messages.append(str(error))
    return messages


def subgroups(rank):
    """Two ranks each, where whole contributions are summed; and one rank alone, where nothing is rounded."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    case = CASES["all_reduce-e4m3"]
    flat = case.flats[rank]
    return {
        "pair": collectives.all_reduce(flat, pairs[rank // 2], case.codec, ROW).total,
        "alone": collectives.all_reduce(flat, alone, case.codec, ROW).total,
        "alone-scattered": collectives.reduce_scatter(flat, alone, case.codec, ROW).total,
        "alone-shared": collectives.reduce_scatter(flat, alone, SharedScaleCodec(), ROW, mu=torch.tensor(1.0)).total,
    }


def work(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    results = {name: run(case, rank) for name, case in CASES.items()}
    results |= {"schedule": scheduled(rank), "refusals": refusals(), **subgroups(rank)}
    torch.save(results, Path(directory) / f"rank-{rank}.pt")
    dist.destroy_process_group()


def work_on_gpu(rank, directory):
    """The cases on two ranks, and their all-reduces once more in two steps, which two ranks would not choose."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{directory}/store", rank=rank, world_size=2, device_id=device)
    cases = {name: of_two_ranks(case) for name, case in CASES.items()}
    results = {name: run(case, rank, device=device) for name, case in cases.items()}
    BlockScaledCodec.sends_whole = lambda *_: False
    results |= {
        f"{name}-two-steps": run(case, rank, device=device) for name, case in cases.items() if case.kind == "all_reduce"
    }
    torch.save(results, Path(directory) / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2:] == ["nccl"]:
        mp.start_processes(work_on_gpu, args=(sys.argv[1],), nprocs=2, start_method="spawn")
    else:
        mp.start_processes(work, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
