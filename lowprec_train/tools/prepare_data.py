"""Tokenise text into PREFIX.bin and PREFIX.idx, for training with `data=indexed data.train=PREFIX` or with Megatron.
Reads .txt and .md (one document per file), .jsonl (one per line) and .parquet (one per row). Text files may be
compressed (.gz, .xz, .zst) and split into parts (NAME.zst.00 NAME.zst.01 ...). Directories are read recursively.

Each document ends with the tokenizer's end-of-document token; empty documents are left out. The command also writes the
tokenizer and PREFIX.manifest.json, with counts and the SHA-256 of all inputs and outputs.

Long documents are tokenised in pieces, split where the split changes no token. If there is no such place, the document
is split anyway; the command counts and reports these splits. With --skip-bad, records without text are skipped and
counted, and a damaged file is read up to the damage and reported.

If the command is interrupted or killed, the same command resumes it. The result is the same, byte for byte, for any
number of workers. An incomplete dataset is in PREFIX.unfinished/.

exit status:
  0    done, also if the dataset was complete before
  2    bad input: missing file, record without text, or another dataset at PREFIX
  130  interrupted; run the same command to resume

examples:
  lowprec train-tokenizer wiki.jsonl.zst --vocab-size 32000 --out tokenizer.model
  lowprec prepare-data wiki.jsonl.zst books/ --tokenizer tokenizer.model --out data/wiki
  lowprec prepare-data mix.jsonl.zst.0* --tokenizer llama/tokenizer.json --eod '<|end_of_text|>' --out data/mix
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lowprec_train.tools import options

if TYPE_CHECKING:
    from lowprec_train.data.manifest import Manifest

HELP = "tokenise text files into a dataset; resumable"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="file, part of a file, or directory")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=options.path,
        required=True,
        help="SentencePiece model or tokenizer.json, or their directory",
    )
    parser.add_argument("--out", metavar="PREFIX", type=options.path, required=True, help="where the dataset goes")
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
        help="longest line of .jsonl, to within 1 MiB; one takes some twenty times its size of memory "
        "(default: %(default)s)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be read instead of stopping")


def run(arguments: argparse.Namespace) -> int:
    """Prepare a dataset with a progress display and print a summary. Raises ValueError or OSError for bad input."""
    from lowprec_train.data import finding, tokenising
    from lowprec_train.data.tokenizer import load
    from lowprec_train.tools import progress

    if arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out} is a directory; name the dataset in it, as {arguments.out / 'train'}")
    if arguments.out.suffix in (".bin", ".idx"):
        raise ValueError(
            f"--out {arguments.out}: name the dataset without its ending, as {arguments.out.with_suffix('')}"
        )
    options.check_directory_above(arguments.out)
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
        print("interrupted; run the same command to resume")
        return 130
    print(summary(manifest, arguments.out, time.monotonic() - began))
    return 0


def summary(manifest: Manifest, prefix: Path, seconds: float) -> str:
    """Return two lines about the dataset: its sizes, and how to train on it."""
    from lowprec_train.train.command_line import Setting

    left_out = f"; left out: {manifest.empty:,} empty, {manifest.bad:,} bad" if manifest.empty or manifest.bad else ""
    bytes_a_token = manifest.text_bytes / max(1, manifest.tokens)
    size = f"{manifest.text_bytes / 1e6:,.1f} MB of text ({bytes_a_token:.2f} bytes a token)"
    cuts = f"; {manifest.inexact_cuts:,} cuts beside which tokens may differ" if manifest.inexact_cuts else ""
    forms = [f"data.train={quote}{prefix}{quote}" for quote in ("", '"', "'")]
    train = shlex.quote(next((form for form in forms if Setting.of(form).text() == str(prefix)), forms[0]))
    return (
        f"{prefix}: {manifest.documents:,} documents, {manifest.tokens:,} tokens of {size}{left_out}{cuts}\n"
        f"{seconds:.1f} s in this call. Train on it: data=indexed {train} "
        f"model.vocab_size={manifest.tokenizer['vocab_size']}"
    )
