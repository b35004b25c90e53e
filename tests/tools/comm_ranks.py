"""A rank that runs `lowprec bench comm` as torchrun would start it."""

import contextlib
import io
import os

from lowprec_train.tools import cli

RANKS = 2


def work(rank: int, directory: str, port: int, options: tuple[str, ...] = ("--device", "cpu")) -> str:
    """What it prints."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = ["bench", "comm", "--model", "llama_tiny", "--rounds", "3", *options, "--out", directory]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert not cli.main(command)
    return printed.getvalue()
