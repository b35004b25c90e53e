"""Two processes that run `lowprec bench comm` over gloo, as torchrun would start them: comm_ranks.py DIRECTORY."""

import os
import socket
import sys

import torch
import torch.multiprocessing as mp

from lowprec_train.tools import cli

RANKS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(rank: int, directory: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = ["bench", "comm", "--model", "llama_tiny", "--rounds", "3", "--device", "cpu", "--out", directory]
    if cli.main(command):
        sys.exit(1)


if __name__ == "__main__":
    mp.start_processes(work, args=(sys.argv[1], free_port()), nprocs=RANKS, start_method="fork")
