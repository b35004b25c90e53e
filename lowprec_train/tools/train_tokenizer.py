"""Train a SentencePiece byte-pair encoding. Text is encoded and decoded without loss, except for the character U+2581,
SentencePiece's own mark of a space, which is decoded as a space. Newlines are kept, digits are single pieces, and rare
characters are encoded as bytes. Accepts the same files as `lowprec prepare-data`.

The command reads all input and trains on an evenly spaced sample of its lines. The same input gives the same model,
byte for byte.

exit status:
  0  done
  2  bad input: missing file, record without text, too little text for --vocab-size, or --out exists

examples:
  lowprec train-tokenizer wiki.jsonl.zst books/ --vocab-size 32000 --out tokenizer.model
"""

from __future__ import annotations

import argparse
from itertools import islice

from lowprec_train.tools import options

HELP = "train a SentencePiece tokenizer on text files"
_TRIED = 200  # documents on which the compression is measured


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="file, part of a file, or directory")
    parser.add_argument(
        "--vocab-size", metavar="N", type=int, required=True, help="number of pieces; 256 of them are bytes"
    )
    parser.add_argument("--out", metavar="FILE", type=options.path, required=True, help="file of the tokenizer model")
    parser.add_argument("--field", default="text", help="field with the text (default: %(default)s)")
    parser.add_argument(
        "--sample",
        metavar="CHARACTERS",
        type=int,
        default=16_000_000,
        help="size of the training sample; 16 million take some seconds (default: %(default)s)",
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip unreadable text instead of stopping")


def run(arguments: argparse.Namespace) -> int:
    """Train a tokenizer, write it and print its compression. Raises ValueError or OSError for bad input."""
    from lowprec_train.data.appending import write_whole
    from lowprec_train.data.documents import TextFiles
    from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer

    options.check_directory_above(arguments.out)
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} exists; choose another name")
    documents = TextFiles(arguments.inputs, arguments.field, skip_bad=arguments.skip_bad)
    texts = (document.text for document in documents)
    learnt = SentencePieceTokenizer.train(texts, arguments.vocab_size, documents.name, arguments.sample)
    if documents.bad:
        print(f"left out {documents.bad:,} records without text in field {arguments.field!r}, or damaged")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out, learnt.content)
    tried = [document.text for document in islice(documents, _TRIED)]
    tokens = sum(map(len, learnt.encode(tried)))
    size = sum(len(text.encode()) for text in tried)
    print(
        f"{arguments.out}: {learnt.vocab_size:,} pieces; {size / max(1, tokens):.2f} bytes a token on the first "
        f"{len(tried)} documents"
    )
    return 0
