"""Show the number of documents and tokens, document lengths and decoded samples of a dataset in Megatron's layout.

The tokenizer is that of the manifest from `lowprec prepare-data`. For a dataset without a manifest, give --tokenizer;
otherwise samples are shown as token ids. A --tokenizer other than that of the manifest is an error.

exit status:
  0  done
  1  --check: files differ from the manifest, a document has no end-of-document token, or a token is out of range
  2  bad input: missing or inconsistent dataset, or --check without manifest and tokenizer

examples:
  lowprec inspect-data data/mix
  lowprec inspect-data data/mix --document 12 --characters 2000
  lowprec inspect-data data/mix --check
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lowprec_train.tools import options

if TYPE_CHECKING:
    from lowprec_train.data.indexed import IndexedDataset
    from lowprec_train.data.manifest import Manifest
    from lowprec_train.data.tokenizer import Tokenizer

HELP = "documents, lengths and decoded samples of a tokenised dataset"
_AT_ONCE = 1 << 24  # tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", metavar="PREFIX", type=options.path, help="the dataset, without .bin and .idx")
    parser.add_argument("--samples", metavar="N", type=int, default=3, help="number of evenly spaced documents to show")
    parser.add_argument("--document", metavar="I", type=int, action="append", help="show document I, counted from 0")
    parser.add_argument("--characters", metavar="N", type=int, default=300, help="characters shown per document")
    parser.add_argument(
        "--tokenizer", metavar="FILE", type=options.path, help="tokenizer of a dataset without a manifest"
    )
    parser.add_argument("--check", action="store_true", help="check all tokens, and the hashes of the manifest")


def run(arguments: argparse.Namespace) -> int:
    """Print the statistics and samples. Returns 1 if --check finds an error. Raises ValueError for bad input."""
    for name in ("characters", "samples"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"--{name} {getattr(arguments, name)} must not be negative")
    from lowprec_train.data.indexed import IndexedDataset
    from lowprec_train.data.manifest import Manifest
    from lowprec_train.data.tokenizer import load

    dataset, manifest = IndexedDataset(arguments.prefix), Manifest.read(arguments.prefix)
    if dataset.dtype.kind == "f":
        raise ValueError(f"{arguments.prefix}: holds {dataset.dtype} numbers, not token ids")
    path = arguments.tokenizer or (manifest and manifest.tokenizer_path(arguments.prefix))
    if arguments.check and not path:
        raise ValueError(f"{arguments.prefix} has no manifest: --check needs --tokenizer FILE to check its tokens with")
    tokenizer = load(path) if path else None
    if arguments.tokenizer and manifest and tokenizer and tokenizer.digest != manifest.tokenizer["sha256"]:
        raise ValueError(
            f"--tokenizer {path} has SHA-256 {tokenizer.digest[:12]}, but {arguments.prefix} was prepared with "
            f"{manifest.tokenizer_path(arguments.prefix)} of {manifest.tokenizer['sha256'][:12]}; leave out --tokenizer"
        )
    print(figures(dataset, manifest))
    for number in arguments.document or spaced(dataset.document_count, arguments.samples):
        print(f"\n{sample(dataset, number, tokenizer, arguments.characters)}")
    if not (arguments.check and tokenizer):
        return 0
    wrong = findings(dataset, manifest, tokenizer)
    files = "files, " if manifest else ""
    beside = "" if manifest else "; there is no manifest to compare the files with"
    print("", *(wrong or [f"checked: {files}document ends and tokens are as they should be{beside}"]), sep="\n")
    return 1 if wrong else 0


def figures(dataset: IndexedDataset, manifest: Manifest | None) -> str:
    """Return text with counts, and the distribution of document lengths."""
    lengths = document_lengths(dataset)
    lines = [
        f"{dataset.prefix}: {dataset.document_count:,} documents, {len(dataset):,} sequences, "
        f"{int(dataset.lengths.sum(dtype='int64')):,} tokens as {dataset.dtype}"
    ]
    if len(lengths):
        low, tenth, median, ninetieth, high = np.percentile(lengths, [0, 10, 50, 90, 100])
        lines.append(
            f"tokens a document: {low:,.0f} at least, {tenth:,.0f} at 10 %, {median:,.0f} at the median, "
            f"{ninetieth:,.0f} at 90 %, {high:,.0f} at most, {lengths.mean():,.1f} on average"
        )
    if manifest:
        tokenizer, size = manifest.tokenizer, f"{manifest.text_bytes / max(1, manifest.tokens):.3f} a token"
        lines += [
            f"text: {manifest.text_bytes:,} bytes, {size}; left out: {manifest.empty:,} empty, {manifest.bad:,} bad",
            f"tokenizer: {tokenizer['file']}, {tokenizer['vocab_size']:,} pieces, end of document {tokenizer['eod']}",
            f"from: {', '.join(each['name'] for each in manifest.inputs)}",
        ]
    return "\n".join(lines)


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the number of tokens of each document, int64 [documents]."""
    ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])
    bounds: np.ndarray = ends[dataset.documents]
    return np.diff(bounds)


def spaced(count: int, samples: int) -> list[int]:
    """Return at most `samples` numbers below `count`, evenly spaced from 0."""
    shown = min(samples, count)
    return [number * count // shown for number in range(shown)]


def sample(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None, characters: int) -> str:
    """Return the beginning of a document as text; without a tokenizer, its first token ids.

    Raises:
        ValueError: there is no such document.
    """
    if not 0 <= number < dataset.document_count:
        raise ValueError(f"document {number}: there are {dataset.document_count}, counted from 0")
    first, last = int(dataset.documents[number]), int(dataset.documents[number + 1])
    ids = [int(token) for sequence in range(first, last) for token in dataset[sequence][: 4 * characters]]
    length = int(dataset.lengths[first:last].sum(dtype="int64"))
    if tokenizer is None:
        return f"document {number}, {length:,} tokens: {ids[: characters // 4]}"
    if not all(0 <= i < tokenizer.vocab_size for i in ids):
        return f"document {number}, {length:,} tokens, some outside the vocabulary: {ids[: characters // 4]}"
    text = tokenizer.decode([i for i in ids if i != tokenizer.eod])
    shortened = len(text) > characters or length > len(ids)
    return f"document {number}, {length:,} tokens: {text[:characters]!r}{' ...' if shortened else ''}"


def findings(dataset: IndexedDataset, manifest: Manifest | None, tokenizer: Tokenizer) -> list[str]:
    """Return the errors of a dataset, one sentence each. With a manifest, its files are also checked."""
    from lowprec_train.data.manifest import hashes

    wrong = []
    if manifest:
        found = hashes(Path(dataset.prefix))
        wrong += [
            f"{dataset.prefix}.{ending} is not the file that the manifest describes"
            for ending, expected in manifest.files.items()
            if found[ending] != expected
        ]
    for token in extremes(dataset):
        if not 0 <= token < tokenizer.vocab_size:
            wrong.append(f"token {token} is outside the vocabulary of {tokenizer.vocab_size}")
    if open_documents := unclosed(dataset, tokenizer.eod):
        wrong.append(f"{open_documents:,} documents do not end with the end-of-document token {tokenizer.eod}")
    return wrong


def extremes(dataset: IndexedDataset) -> list[int]:
    """Return the lowest and the highest token; [] for a dataset without tokens."""
    parts = [dataset.data[at : at + _AT_ONCE] for at in range(0, len(dataset.data), _AT_ONCE)]
    found = [(int(part.min()), int(part.max())) for part in parts]
    return [min(low for low, _ in found), max(high for _, high in found)] if found else []


def unclosed(dataset: IndexedDataset, eod: int) -> int:
    """Return the number of documents whose last token is not `eod`, or that are empty."""
    filled = document_lengths(dataset) > 0
    last = dataset.documents[1:][filled] - 1
    at = dataset.offsets[last] // dataset.dtype.itemsize + dataset.lengths[last] - 1
    return int((~filled).sum() + np.count_nonzero(dataset.data[at] != eod))
