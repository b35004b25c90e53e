"""The data of a run: a training and a validation set, and a hash that is equal if two runs read the same text.

`stdlib` needs only the running Python, `text` reads the user's files, `blend.indexed` reads tokenised data. Each file
of configs/data names one of them as `_target_`; its other keys are the arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lowprec_train.data.documents import Documents, PythonSources, TextFiles
from lowprec_train.data.finding import location
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.loader import Dataset, Stream
from lowprec_train.data.prepare import Preparation
from lowprec_train.data.tokenizer import check_vocabulary, load

_log = logging.getLogger(__name__)
VALID_SEED = 0  # validation reads the same samples in every run, whatever its seed


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and validation data of a run. `hash`: of the tokens; `vocab_size`: of the tokenizer.

    `tokenizer`: its file, if known.
    """

    train: Dataset
    valid: Dataset
    hash: str
    vocab_size: int
    name: str
    tokenizer: Path | None = None


def stdlib(
    *,
    seq_len: int,
    vocab_size: int = 4096,
    seed: int = 0,
    valid_fraction: float = 0.05,
    document_mask: bool = False,
    cache: str | None = None,
    root: str | None = None,
    name: str = "stdlib",
) -> Corpus:
    """Return a corpus of the running Python's standard library (or the Python sources under `root`), a document a file.

    Raises:
        ValueError: there are no sources, they are too few for this vocabulary, split or seq_len, or the cache cannot be
            written.
    """
    preparation = Preparation(train=PythonSources(root), valid_fraction=valid_fraction, vocab_size=vocab_size)
    return _corpus(preparation, cache, name, seq_len=seq_len, seed=seed, document_mask=document_mask)


def warn_of_shared(train: Iterable[str], valid: Iterable[str]) -> None:
    """Warn about files or datasets that are for training and for validation."""
    trained = set(map(location, train))
    if both := [name for name in valid if location(name) in trained]:
        _log.warning("warning: data.valid=%s is in data.train too: valid/loss is of training text", ", ".join(both))


def text(
    *,
    train: str | Sequence[str],
    seq_len: int,
    vocab_size: int | None = 4096,
    seed: int = 0,
    valid: str | Sequence[str] | None = None,
    valid_fraction: float = 0.05,
    field: str = "text",
    tokenizer: str | None = None,
    document_mask: bool = False,
    skip_bad: bool = False,
    cache: str | None = None,
    name: str = "text",
) -> Corpus:
    """Return a corpus of text files: .txt, .md, .jsonl, .parquet, or directories of them (see `documents.TextFiles`).

    `valid`: held-out files; None holds out `valid_fraction` of the documents of `train`, by their names.
    `tokenizer`: an existing SentencePiece model or `tokenizer.json`; None trains one of `vocab_size` pieces on the
    training documents. With an existing one `vocab_size` is an upper limit of its size, or None.
    `skip_bad`: skip what cannot be read.

    Raises:
        ValueError: see `TextFiles`; the files have no text; they are too few for this vocabulary, split or seq_len; the
            tokenizer has more pieces than vocab_size, or cannot be read.
    """
    model = None if tokenizer is None else load(tokenizer)
    if model is None and vocab_size is None:
        raise ValueError("vocab_size is None: give the size of the tokenizer to train, or an existing tokenizer")
    if model is not None and vocab_size is not None:
        check_vocabulary(tokenizer=model.vocab_size, vocab_size=vocab_size, name=str(tokenizer))
    texts = partial(TextFiles, field=field, skip_bad=skip_bad, remedy="data.skip_bad=true")
    training, held_out = texts(train), None if valid is None else texts(valid)
    if held_out is not None:
        warn_of_shared(training.files, held_out.files)
    preparation = Preparation(
        train=training,
        valid=held_out,
        valid_fraction=valid_fraction,
        tokenizer=model,
        vocab_size=vocab_size,
    )
    return _corpus(preparation, cache, name, seq_len=seq_len, seed=seed, document_mask=document_mask)


def _corpus(
    preparation: Preparation, cache: str | None, name: str, *, seq_len: int, seed: int, document_mask: bool
) -> Corpus:
    prepared = preparation.run(cache, name)

    def dataset(prefix: Path, seed: int, texts: Documents) -> Dataset:
        source = IndexedDataset(prefix)
        if len(source.data) <= seq_len:
            raise ValueError(
                f"{texts.name}: {prefix.name}: {len(source.data)} tokens, a sample of seq_len {seq_len} needs "
                f"{seq_len + 1}; give more text, or a shorter data.seq_len"
            )
        return Dataset(
            streams=(Stream(source, range(source.document_count)),),
            seq_len=seq_len,
            vocab_size=prepared.vocab_size,
            seed=seed,
            document_mask=document_mask,
        )

    return Corpus(
        train=dataset(prepared.train, seed, preparation.train),
        valid=dataset(prepared.valid, VALID_SEED, preparation.valid or preparation.train),
        hash=prepared.hash,
        vocab_size=prepared.vocab_size,
        name=name,
        tokenizer=prepared.tokenizer,
    )
