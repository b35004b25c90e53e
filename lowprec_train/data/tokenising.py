"""Tokenise large text into an indexed dataset: one process reads, many tokenise; the output keeps the input order.

Reading and unpacking are quick beside tokenising, so the first process cuts the input into chunks of a megabyte and
hands them to workers; it appends what they return, in order, and notes with it how far the input was read. So the
dataset depends neither on the number of workers nor on how often the work was interrupted, and what an interruption
costs is the chunks in flight. A long document is tokenised in pieces (`cuts`), which may lie in several chunks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train.data import sources
from lowprec_train.data.appending import AppendingWriter, forget, unfinished
from lowprec_train.data.cuts import TextSpan
from lowprec_train.data.indexed import token_dtype
from lowprec_train.data.manifest import Manifest, hashes
from lowprec_train.data.records import Bad, Damaged, Segment
from lowprec_train.data.sources import Place, Source, check_sources
from lowprec_train.data.tokenizer import Tokenizer, encode_pieces, load, store
from lowprec_train.data.workers import in_order

_log = logging.getLogger(__name__)
_COMMIT_SECONDS = 1.0
_REMEDY = "--skip-bad leaves out what cannot be read"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of what was done: `read` bytes of the stored input from its beginning, and what the manifest counts."""

    read: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    inexact_cuts: int = 0

    def __add__(self, later: Counts) -> Counts:
        total = {what: count + getattr(later, what) for what, count in vars(self).items()}
        return Counts(**total | {"read": later.read})


@dataclass(frozen=True, kw_only=True)
class Job:
    """Text to tokenise.

    field: of .jsonl lines and .parquet rows. workers: processes beside this one; 0: this one alone.
    skip_bad: leave out records that hold no text, and what follows damage in a file, and count them, instead of
    stopping at the first; files are named in a warning.
    chunk: bytes of text that a worker is given at once. longest_line: bytes of a line of .jsonl; a longer one is an
    error.
    """

    inputs: Sequence[Source]
    tokenizer: Tokenizer
    field: str = "text"
    workers: int = 1
    skip_bad: bool = False
    chunk: int = sources.SEGMENT
    longest_line: int = sources.LONGEST_LINE

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers {self.workers} must not be negative")

    @property
    def size(self) -> int:
        """Bytes of all inputs as stored."""
        return sum(source.size for source in self.inputs)


def prepare(job: Job, prefix: Path, report: Callable[[Counts], None] = lambda counts: None) -> Manifest:
    """Write `<prefix>.bin`, `.idx` and `.manifest.json` and, beside them, the tokenizer.

    What an earlier call that was killed has left is gone on with; a dataset that is whole already is left as it is.
    `report` is told the counts so far, after every chunk.

    Raises:
        ValueError: another dataset or tokenizer lies there, an unfinished one was begun with other input, an input
            cannot be read, or was changed meanwhile, or, unless skip_bad, a record holds no text.
        OSError: the disk is full, or a worker died.
    """
    check_sources(job.inputs, job.field, skip_bad=job.skip_bad, remedy=_REMEDY)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if (done := Manifest.read(prefix)) is not None:
        _check_same(done, job, prefix)
        forget(prefix)
        return done
    tokenizer = store(job.tokenizer, prefix.parent)
    identity = _identity(job)
    with AppendingWriter(prefix, token_dtype(job.tokenizer.vocab_size), identity) as writer:
        counts = Counts(**writer.remembered.get("counts", {}))
        if not writer.whole:
            counts = _append_all(job, tokenizer, writer, counts, report)
        if not counts.documents:
            raise ValueError(f"no document with text in {', '.join(source.path for source in job.inputs)}")
        inputs = [{"name": source.name, "bytes": source.size, "sha256": source.sha256()} for source in job.inputs]
        _check_unchanged(identity, job, prefix)
        writer.finish({"counts": vars(counts)})
        manifest = _manifest(job, counts, inputs, prefix)
        manifest.write(prefix)
        forget(prefix)
    return manifest


def _append_all(
    job: Job, tokenizer: Path, writer: AppendingWriter, counts: Counts, report: Callable[[Counts], None]
) -> Counts:
    """Append the rest of the input to what an earlier writer left; returns the counts of all of it."""
    report(counts)
    committed = time.monotonic()
    for done in in_order(_encode, _chunks(job, str(tokenizer), writer.remembered.get("position", {})), job.workers):
        writer.append(done.tokens, done.lengths)
        for damage in done.damage:
            _log.warning("warning: the rest of this file is left out: %s", damage)
        counts += done.counts
        report(counts)
        if time.monotonic() - committed >= _COMMIT_SECONDS:
            writer.commit({"counts": vars(counts), "position": done.position})
            committed = time.monotonic()
    return counts


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A worker's task: segments that follow each other.

    position: where the input was after them, the number of the source and the `Place` in it. read: stored bytes of all
    sources up to there. tokenizer, digest: the file, and what it holds.
    """

    segments: tuple[Segment, ...]
    position: dict[str, int]
    read: int
    tokenizer: str
    digest: str
    field: str
    skip_bad: bool


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A chunk as tokens, in the dataset's dtype, and the lengths of documents that end in it. counts: of it alone.

    Tokens beyond these lengths are of a document that goes on in the next chunk. damage: of files, as errors say it.
    """

    tokens: bytes
    lengths: np.ndarray
    damage: tuple[str, ...]
    counts: Counts
    position: dict[str, int]


def _chunks(job: Job, tokenizer: str, start: Mapping[str, int]) -> Iterator[Chunk]:
    """The rest of the input, cut into chunks of about `job.chunk` bytes."""
    segments: list[Segment] = []
    size, digest = 0, job.tokenizer.digest
    for segment, position, read in _segments(job, **start):
        segments.append(segment)
        size += segment.size
        last = Chunk(
            segments=tuple(segments),
            position=position,
            read=read,
            tokenizer=tokenizer,
            digest=digest,
            field=job.field,
            skip_bad=job.skip_bad,
        )
        if size >= job.chunk:
            yield last
            segments, size = [], 0
    if segments:
        yield last


def _segments(
    job: Job, *, source: int = 0, offset: int = 0, records: int = 0
) -> Iterator[tuple[Segment, dict[str, int], int]]:
    """The input from a place in one source on: segments, the position after each, and the bytes read by then."""
    before = sum(each.size for each in job.inputs[:source])
    place = Place(offset=offset, records=records)
    for number, each in enumerate(job.inputs[source:], source):
        try:
            for segment, after, read in each.segments(job.field, place, job.chunk, job.tokenizer, job.longest_line):
                yield segment, {"source": number, **vars(after)}, before + read
        except Damaged as error:
            yield _damage(each, error), {"source": number + 1}, before + each.size
        before += each.size
        place = Place()


def _damage(source: Source, error: Damaged) -> Segment:
    """What stands for the rest of a source that cannot be read on."""
    return Segment(kind="damaged", name=source.name, path=source.path, before=0, content=[str(error)])


def _encode(chunk: Chunk) -> Encoded:
    """The work of a worker. Raises ValueError for a record that holds no text, unless these are skipped."""
    tokenizer = _tokenizer(chunk.tokenizer, chunk.digest)
    dtype = token_dtype(tokenizer.vocab_size)
    pieces, empty, bad = _pieces(chunk, tokenizer)
    tokens: list[bytes] = []
    lengths, length = [], 0
    for piece, ids in zip(pieces, encode_pieces(pieces, tokenizer), strict=True):
        tokens.append(np.array([*ids, tokenizer.eod] if piece.last else ids, dtype).tobytes())
        length += len(ids) + piece.last
        if piece.last:
            lengths.append(length)
            length = 0
    return Encoded(
        tokens=b"".join(tokens),
        lengths=np.array(lengths, np.int64),
        damage=tuple(str(each) for segment in chunk.segments if segment.kind == "damaged" for each in segment.content),
        counts=Counts(
            read=chunk.read,
            documents=len(lengths),
            tokens=sum(lengths) + length,
            text_bytes=sum(len(piece.text.encode()) for piece in pieces),
            empty=empty,
            bad=bad,
            inexact_cuts=sum(piece.inexact for piece in pieces),
        ),
        position=chunk.position,
    )


def _pieces(chunk: Chunk, tokenizer: Tokenizer) -> tuple[list[TextSpan], int, int]:
    """The chunk's documents in pieces; how many records were empty, and how many bad."""
    pieces, empty, bad = [], 0, 0
    for segment in chunk.segments:
        for found in segment.pieces(chunk.field, tokenizer):
            if isinstance(found, Bad):
                if not chunk.skip_bad:
                    raise ValueError(f"{found.reason}; {_REMEDY}")
                bad += 1
            elif found.text:
                pieces.append(found)
            else:
                empty += 1
    return pieces, empty, bad


@lru_cache(maxsize=1)
def _tokenizer(path: str, digest: str) -> Tokenizer:
    """Read once a process and job: it does not travel with every chunk. `digest` tells another one of the same path."""
    return load(path)


def _identity(job: Job) -> dict[str, Any]:
    """What an unfinished dataset depends on; contents of files stand in by their sizes and times of change."""
    return {
        "field": job.field,
        "tokenizer": job.tokenizer.digest,
        "inputs": [
            [source.name, [[path.stat().st_size, path.stat().st_mtime_ns] for path in source.paths]]
            for source in job.inputs
        ],
    }


def _check_unchanged(identity: Mapping[str, Any], job: Job, prefix: Path) -> None:
    """Whether what was read is still what lies there, so that a manifest's hashes are those of the text."""
    both = zip(identity["inputs"], _identity(job)["inputs"], strict=True)
    if changed := [name for (name, old), (_, new) in both if old != new]:
        raise ValueError(f"{', '.join(changed)} changed while read; remove {unfinished(prefix)} and begin anew")


def _check_same(done: Manifest, job: Job, prefix: Path) -> None:
    """Whether a whole dataset is the one that is asked for; reads the input, unless its sizes say enough."""
    pairs = {
        "field": (done.field, job.field),
        "tokenizer": (done.tokenizer["sha256"], job.tokenizer.digest),
        "inputs": ([[each["name"], each["bytes"]] for each in done.inputs], [[s.name, s.size] for s in job.inputs]),
    }
    for what, (old, new) in pairs.items():
        if old != new:
            raise ValueError(
                f"{prefix}: is prepared already, with other {what}: {old}, now {new}; choose another place"
            )
    both = zip(done.inputs, job.inputs, strict=True)
    if changed := [source.name for each, source in both if each["sha256"] != source.sha256()]:
        raise ValueError(
            f"{prefix}: is prepared already, from other contents of {', '.join(changed)}; choose another place"
        )


def _manifest(job: Job, counts: Counts, inputs: list[dict[str, Any]], prefix: Path) -> Manifest:
    from lowprec_train import __version__

    tokenizer = job.tokenizer
    counted = {what: count for what, count in vars(counts).items() if what != "read"}
    return Manifest(
        **counted,
        dtype=str(token_dtype(tokenizer.vocab_size)),
        field=job.field,
        tokenizer={
            "file": tokenizer.file_name,
            "sha256": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
        },
        inputs=inputs,
        files=hashes(prefix),
        versions={"lowprec_train": __version__, **tokenizer.versions},
    )
