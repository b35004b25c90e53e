"""A rank that runs `lowprec bench parallel` over gloo, as torchrun would start it."""

import contextlib
import io
import os

from lowprec_train.tools import cli

RANKS = 2
SIZES = "dim=64,heads=2,kv_heads=2,ffn=128,layers=2,vocab_size=128"
ARMS = ("bf16", "fp8 parallel.param_all_gather=quantized comm=fp8", "fp8 parallel.tp=2", "fp8 alone")

BROKEN = "mxfp4 model.ffn=100"


def work(rank: int, directory: str, port: int) -> str:
    """What it prints."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = ["bench", "parallel", "--model", SIZES, "--batch", "2", "--seq-len", "32", "--micro-batches", "2"]
    command += ["--rounds", "2", "--warm-up", "4", "--groups", "7", "--resident", "7"]
    command += ["--peers", "plain,plain-pairs"]
    command += ["--device", "cpu", "--eager", "--out", directory]
    for arm in (*ARMS, BROKEN):
        command += ["--arm", arm]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert not cli.main(command)
    return printed.getvalue()
