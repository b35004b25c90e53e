"""`lowprec prepare-data`: text files to a Megatron dataset, by many processes, and again where it was interrupted."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowprec_train.data.manifest import Manifest

HELP = "text files to a tokenised dataset, restartable"
DESCRIPTION = """\
Tokenise text into PREFIX.bin and PREFIX.idx, which `data=indexed data.train=PREFIX` trains on and Megatron reads too.
Reads .txt and .md (a document a file), .jsonl (a document a line), these also as .gz, .xz and .zst and cut into parts
(NAME.zst.00 NAME.zst.01 ...), and .parquet (a document a row); a directory stands for all of these below it.
"""
EPILOG = """\
Every document is closed by the tokenizer's end-of-document token; documents without text are left out. Beside the two
files go the tokenizer and PREFIX.manifest.json: counts, and SHA-256 of what was read and written.

A long document is tokenised in pieces that are cut where no token changes; a text without such a place is cut all the
same, which is counted and said. --skip-bad leaves out records that hold no text, files that are damaged from the damage
on, and counts them; files are named.

Killed at any moment, the same command goes on where it was, and what comes out is the same, byte for byte, whatever the
number of workers. Until it is whole the dataset lives in PREFIX.unfinished/.

exit status:
  0    done, or done already
  2    bad input: no such file, a record without text, another dataset in that place
  130  interrupted; the same command goes on

examples:
  lowprec train-tokenizer wiki.jsonl.zst --vocab-size 32000 --out tokenizer.model
  lowprec prepare-data wiki.jsonl.zst books/ --tokenizer tokenizer.model --out data/wiki
  lowprec prepare-data mix.jsonl.zst.0* --tokenizer llama/tokenizer.json --eod '<|end_of_text|>' --out data/mix
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="file, part of a file, or directory")
    parser.add_argument(
        "--tokenizer", metavar="FILE", required=True, help="SentencePiece model or tokenizer.json, or their directory"
    )
    parser.add_argument("--out", metavar="PREFIX", type=Path, required=True, help="where the dataset goes")
    parser.add_argument("--eod", metavar="TOKEN", help="token that closes documents (default: the tokenizer's own)")
    parser.add_argument(
        "--field", default="text", help="of .jsonl lines and .parquet rows that holds the text (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", metavar="N", type=int, help="processes that tokenise; 0: none but this (default: one a core)"
    )
    parser.add_argument(
        "--max-line-mib",
        metavar="N",
        type=int,
        default=64,
        help="longest line of .jsonl; one takes some twenty times its size of memory (default: %(default)s)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be read instead of stopping")


def run(arguments: argparse.Namespace) -> int:
    """Prepare a dataset with a progress display and print a summary. Raises ValueError or OSError for bad input."""
    from lowprec_train.data import finding, tokenising
    from lowprec_train.data.tokenizer import load
    from lowprec_train.tools import progress

    if arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out} is a directory; name the dataset in it, as {arguments.out / 'train'}")
    if arguments.max_line_mib < 1:
        raise ValueError(f"--max-line-mib {arguments.max_line_mib} must be at least 1")
    workers = len(os.sched_getaffinity(0)) if arguments.workers is None else arguments.workers
    job = tokenising.Job(
        inputs=finding.find(arguments.inputs),
        tokenizer=load(arguments.tokenizer, arguments.eod),
        field=arguments.field,
        workers=workers,
        skip_bad=arguments.skip_bad,
        longest_line=arguments.max_line_mib << 20,
    )
    began = time.monotonic()
    try:
        with progress.of_preparation(job.size) as report:
            manifest = tokenising.prepare(job, arguments.out, report)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on")
        return 130
    print(summary(manifest, arguments.out, time.monotonic() - began))
    return 0


def summary(manifest: Manifest, prefix: Path, seconds: float) -> str:
    """Two lines about the dataset: its sizes, and how to train on it."""
    left_out = f"; left out: {manifest.empty:,} empty, {manifest.bad:,} bad" if manifest.empty or manifest.bad else ""
    bytes_a_token = manifest.text_bytes / max(1, manifest.tokens)
    size = f"{manifest.text_bytes / 1e6:,.1f} MB of text ({bytes_a_token:.2f} bytes a token)"
    cuts = f"; {manifest.inexact_cuts:,} cuts beside which tokens may differ" if manifest.inexact_cuts else ""
    return (
        f"{prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens of {size}{left_out}{cuts}\n"
        f"{seconds:.1f} s in this call. Train on it: data=indexed data.train={prefix} "
        f"model.vocab_size={manifest.tokenizer['vocab_size']}"
    )
