"""Tokenised data: Megatron's indexed datasets, alone or blended, with Megatron's splits.

A blend is written as on Megatron's command line, `[weight, prefix, weight, prefix, ...]`. Without weights, `[prefix,
prefix, ...]` or a directory of datasets is one set in several files. A split is a list of shares for train, validation
and test, `949,50,1`: each dataset is divided into ranges of whole documents in that order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lowprec_train.data.corpus import VALID_SEED, Corpus, warn_of_shared
from lowprec_train.data.finding import files_below, location
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.loader import Dataset, Stream
from lowprec_train.data.manifest import Manifest
from lowprec_train.data.order import Blend
from lowprec_train.data.tokenizer import check_vocabulary

_READ_WHOLE = 256 << 20  # bytes; of a longer file this many are hashed, in evenly spaced blocks
_BLOCK = 1 << 20
_WHOLE = (1.0, 0.0, 0.0)

Blended = str | Sequence[str | float]


def indexed(
    *,
    train: Blended,
    seq_len: int,
    vocab_size: int | None = None,
    seed: int = 0,
    valid: Blended | None = None,
    split: str | Sequence[float] | None = None,
    document_mask: bool = False,
    name: str = "indexed",
) -> Corpus:
    """Return the corpus of existing `<prefix>.bin` and `<prefix>.idx` files, named without extension.

    train, valid: one prefix, several, a directory of them, or `[weight, prefix, weight, prefix, ...]`.
    split: shares of train, validation (and test) that divide the documents of `train`; replaces `valid`.
    vocab_size: of the tokenizer that made the data; reading a token outside it is an error. None: as in the manifests
        of `lowprec prepare-data`.

    Raises:
        ValueError: a blend or split that cannot be parsed, both or neither of valid and split, a file that is missing,
            truncated or of another format, a part without documents or too short for seq_len, datasets of different
            tokenizers, or vocab_size None without a manifest.
    """
    if (valid is None) == (split is None):
        raise ValueError(f"exactly one of valid and split must be given, not valid={valid!r} and split={split!r}")
    shares = _WHOLE if split is None else parse_split(split)
    blend = parse_blend(train, "data.train")
    training = _Part("train", blend, shares, 0)
    held_out = (
        _Part("valid", blend, shares, 1)
        if valid is None
        else _Part("valid", parse_blend(valid, "data.valid"), _WHOLE, 0)
    )
    if valid is not None:
        warn_of_shared(training.blend.prefixes, held_out.blend.prefixes)
    prefixes = dict.fromkeys((*training.blend.prefixes, *held_out.blend.prefixes))
    # Missing and invalid files are reported before manifests are read. Each file is mapped once.
    mapped = {prefix: IndexedDataset(prefix) for prefix in prefixes}
    size, tokenizer = _tokenizer(prefixes, vocab_size)

    def dataset(part: _Part, seed: int) -> Dataset:
        return Dataset(
            streams=tuple(part.stream(mapped[prefix]) for prefix in part.blend.prefixes),
            order=part.blend.order,
            seq_len=seq_len,
            vocab_size=size,
            seed=seed,
            document_mask=document_mask,
        )

    return Corpus(
        train=dataset(training, seed),
        valid=dataset(held_out, VALID_SEED),
        hash=hashlib.sha256(training.digest() + held_out.digest()).hexdigest(),
        vocab_size=size,
        name=name,
        tokenizer=tokenizer,
    )


def _tokenizer(prefixes: Iterable[str], vocab_size: int | None) -> tuple[int, Path | None]:
    """Return the size of the tokenizer that all datasets share, and its file if a manifest names it."""
    manifests = {prefix: Manifest.read(prefix) for prefix in sorted(prefixes)}
    known = {prefix: manifest for prefix, manifest in manifests.items() if manifest}
    if len({manifest.tokenizer["sha256"] for manifest in known.values()}) > 1:
        tokenizers = {prefix: manifest.tokenizer for prefix, manifest in known.items()}
        raise ValueError(f"datasets of different tokenizers cannot be read together: {tokenizers}")
    if vocab_size is None and len(known) < len(manifests):
        unknown = [prefix for prefix in manifests if prefix not in known]
        raise ValueError(f"data.vocab_size must be given: {unknown} have no .manifest.json")
    if not known:
        assert vocab_size is not None
        return vocab_size, None
    prefix, manifest = next(iter(known.items()))
    size = int(manifest.tokenizer["vocab_size"])
    if vocab_size is not None:
        check_vocabulary(tokenizer=size, vocab_size=vocab_size, name=prefix)
    return vocab_size or size, manifest.tokenizer_path(prefix)


@dataclass(frozen=True)
class Mixture:
    """Prefixes of indexed datasets, and the order in which their samples are read; None: they are one set."""

    prefixes: tuple[str, ...]
    order: Blend | None = None


def parse_blend(blend: Blended, key: str = "blend") -> Mixture:
    """Parse a prefix, a directory of datasets, `[prefix, prefix, ...]` or `[weight, prefix, weight, prefix, ...]`.

    key: names the blend in errors.

    Raises:
        ValueError: it is none of these, it has a dataset twice, a directory without datasets or with a weight, or
            `Blend` refuses a weight.
    """
    items = [blend] if isinstance(blend, str) else list(blend)
    weighted = len(items) > 1 and any(map(_is_number, items))
    if not items or (weighted and len(items) % 2):
        raise ValueError(f"{key}={items}: expected a prefix, several, or weight, prefix, weight, prefix, ...")
    weights, named = (items[0::2], items[1::2]) if weighted else ([], items)
    for weight, prefix in zip(weights or [1.0] * len(named), named, strict=True):
        if not _is_number(weight) or _is_number(prefix) or not isinstance(prefix, str):
            raise ValueError(f"{key}={items}: expected a weight and a prefix, got {weight!r}, {prefix!r}")
    expanded = [os.path.expanduser(str(prefix)) for prefix in named]
    if not weighted:
        expanded = [prefix for each in expanded for prefix in _datasets(each)]
    if len(set(map(location, expanded))) != len(expanded):
        raise ValueError(f"{key}={items}: names a dataset twice")
    return Mixture(tuple(expanded), Blend([float(weight) for weight in weights]) if weighted else None)


def _datasets(prefix: str) -> list[str]:
    """Return the dataset with this prefix, or all datasets in the directory and below, sorted by path."""
    if not os.path.isdir(prefix) or os.path.isfile(f"{prefix}.idx"):
        return [prefix]
    found = [str(path.with_suffix("")) for path in files_below(Path(prefix)) if path.suffix == ".idx"]
    if not found:
        raise ValueError(f"{prefix}: a directory without a dataset (.idx and .bin)")
    return found


def parse_split(split: str | Sequence[float]) -> tuple[float, float, float]:
    """Return shares of train, validation and test that sum to 1, from `949,50,1`, `[949, 50, 1]` or two numbers.

    Raises:
        ValueError: not two or three numbers, or no share for train or validation.
    """
    written = split.split(",") if isinstance(split, str) else list(split)
    if not all(map(_is_number, written)):
        raise ValueError(f"split {split!r}: expected numbers such as 949,50,1")
    values = [float(value) for value in written]
    values += [0.0] * (3 - len(values))
    if len(values) != 3 or not (values[0] > 0 and values[1] > 0 and values[2] >= 0 and sum(values) < float("inf")):
        raise ValueError(
            f"split {split!r}: expected shares of train, validation and test such as 949,50,1; train and validation "
            "need a share above 0"
        )
    train, valid, test = (value / sum(values) for value in values)
    return train, valid, test


def split_documents(count: int, shares: Sequence[float], position: int) -> range:
    """Return the documents of one part, with Megatron's rounding: whole documents in file order."""
    return range(round(sum(shares[:position]) * count), round(sum(shares[: position + 1]) * count))


@dataclass(frozen=True)
class _Part:
    """Training or validation: the same share of every dataset of a mixture."""

    name: str
    blend: Mixture
    shares: tuple[float, float, float]
    position: int

    def stream(self, source: IndexedDataset) -> Stream:
        documents = split_documents(source.document_count, self.shares, self.position)
        if not documents:
            raise ValueError(
                f"{source.prefix}: the {self.name} part is empty: {source.document_count} documents, shares "
                f"{self.shares}; change data.split, or name held-out data with data.valid=... and data.split=null"
            )
        return Stream(source, documents)

    def digest(self) -> bytes:
        """Return the SHA-256 of shares and contents, without paths."""
        blended = self.blend.order.shares if self.blend.order else (1.0,)
        digest = hashlib.sha256(f"{blended} {self.shares} {self.position}".encode())
        for prefix in self.blend.prefixes:
            digest.update(_file_digest(Path(f"{prefix}.idx")))
            digest.update(_file_digest(Path(f"{prefix}.bin")))
        return digest.digest()


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _file_digest(path: Path) -> bytes:
    """Return the SHA-256 of size and content. A file above 256 MiB is sampled: start-up does not read a terabyte."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        for start in _blocks(size):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.digest()


def _blocks(size: int) -> Iterator[int]:
    if size <= _READ_WHOLE:
        yield from range(0, size, _BLOCK)
    else:
        count = _READ_WHOLE // _BLOCK
        yield from ((size - _BLOCK) * block // (count - 1) for block in range(count))
