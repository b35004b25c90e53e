"""Tokenise large text into an indexed dataset: one process reads, several tokenise; the output keeps the input order.

Reading and unpacking are fast compared with tokenising. The first process splits the input into chunks of a megabyte
and passes them to workers. It appends their results in order, and stores with them how far the input was read. So the
dataset depends neither on the number of workers nor on interruptions, and an interruption loses the chunks in flight
only. A long document is tokenised in pieces (`cuts`), which may lie in several chunks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lowprec_train.data import sources
from lowprec_train.data.appending import AppendingWriter, difference, forget, unfinished
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
    """Counts of finished work: `read` bytes of the stored input, and the counts of the manifest."""

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

    field: of .jsonl lines and .parquet rows. workers: number of worker processes; 0: this process tokenises.
    skip_bad: skip and count records without text, and the rest of damaged files, instead of stopping at the first;
    warnings name the files.
    chunk: bytes of text per task of a worker. longest_line: bytes of a line of .jsonl; a longer one is an error.
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
    """Write `<prefix>.bin`, `.idx` and `.manifest.json` and, in the same directory, the tokenizer.

    The work of an earlier call that was killed is continued; a complete dataset is left unchanged.
    `report` is called with the counts so far after every chunk.

    Raises:
        ValueError: another dataset or tokenizer is there, an unfinished one was started with other input, an input
            cannot be read, or has changed meanwhile, or, unless skip_bad, a record has no text.
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
        counts = Counts(**writer.progress.get("counts", {}))
        if not writer.complete:
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
    """Append the rest of the input; return the counts of the whole input."""
    report(counts)
    committed = time.monotonic()
    digest = job.tokenizer.digest
    encode = partial(_encode, tokenizer=str(tokenizer), digest=digest, field=job.field, skip_bad=job.skip_bad)
    for done in in_order(encode, _chunks(job, writer.progress.get("position", {})), job.workers):
        writer.append(done.tokens, done.lengths)
        for damage in done.damage:
            _log.warning("warning: the rest of this file is left out: %s", damage)
        counts += done.counts
        report(counts)
        if time.monotonic() - committed >= _COMMIT_SECONDS:
            writer.commit({"counts": vars(counts), "position": done.position})
            committed = time.monotonic()
    return counts


Chunk = tuple[list[Segment], dict[str, int], int]
"""A worker's task: consecutive segments, the position in the input after them (number of the source and the `Place` in
it), and the stored bytes of all sources up to there.
"""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A chunk as tokens in the dataset's dtype, and the lengths of the documents that end in it. counts: of this chunk.

    Tokens beyond these lengths belong to a document that continues in the next chunk. damage: errors of damaged files.
    """

    tokens: bytes
    lengths: np.ndarray
    damage: tuple[str, ...]
    counts: Counts
    position: dict[str, int]


def _chunks(job: Job, start: Mapping[str, int]) -> Iterator[Chunk]:
    """Yield the rest of the input in chunks of about `job.chunk` bytes."""
    segments: list[Segment] = []
    size = 0
    for segment, position, read in _segments(job, **start):
        segments.append(segment)
        size += segment.size
        if size >= job.chunk:
            yield segments, position, read
            segments, size = [], 0
    if segments:
        yield segments, position, read


def _segments(
    job: Job, *, source: int = 0, offset: int = 0, records: int = 0
) -> Iterator[tuple[Segment, dict[str, int], int]]:
    """Yield the input from a place in one source on: segments, the position after each, and the bytes read so far."""
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
    """Return the segment that replaces the unreadable rest of a source."""
    return Segment(kind="damaged", name=source.name, path=source.path, before=0, content=[str(error)])


def _encode(chunk: Chunk, *, tokenizer: str, digest: str, field: str, skip_bad: bool) -> Encoded:
    """Tokenise a chunk, in a worker. Raises ValueError for a record without text, unless these are skipped.

    tokenizer, digest: its file, and the hash of its content.
    """
    (segments, position, read), encoder = chunk, _tokenizer(tokenizer, digest)
    dtype = token_dtype(encoder.vocab_size)
    pieces, empty, bad = _pieces(segments, encoder, field, skip_bad)
    tokens: list[bytes] = []
    lengths, length = [], 0
    for piece, ids in zip(pieces, encode_pieces(pieces, encoder), strict=True):
        tokens.append(np.array([*ids, encoder.eod] if piece.last else ids, dtype).tobytes())
        length += len(ids) + piece.last
        if piece.last:
            lengths.append(length)
            length = 0
    return Encoded(
        tokens=b"".join(tokens),
        lengths=np.array(lengths, np.int64),
        damage=tuple(str(each) for segment in segments if segment.kind == "damaged" for each in segment.content),
        counts=Counts(
            read=read,
            documents=len(lengths),
            tokens=sum(lengths) + length,
            text_bytes=sum(len(piece.text.encode()) for piece in pieces),
            empty=empty,
            bad=bad,
            inexact_cuts=sum(piece.inexact for piece in pieces),
        ),
        position=position,
    )


def _pieces(
    segments: Sequence[Segment], tokenizer: Tokenizer, field: str, skip_bad: bool
) -> tuple[list[TextSpan], int, int]:
    """Return the documents in pieces, and the numbers of empty and of bad records."""
    pieces, empty, bad = [], 0, 0
    for segment in segments:
        for found in segment.pieces(field, tokenizer):
            if isinstance(found, Bad):
                if not skip_bad:
                    raise ValueError(f"{found.reason}; {_REMEDY}")
                bad += 1
            elif found.text:
                pieces.append(found)
            else:
                empty += 1
    return pieces, empty, bad


@lru_cache(maxsize=1)
def _tokenizer(path: str, digest: str) -> Tokenizer:
    """Load it once per process and job, not with every chunk. `digest` distinguishes tokenizers of the same path."""
    return load(path)


def _identity(job: Job) -> dict[str, Any]:
    """Return what an unfinished dataset depends on; sizes and modification times represent the contents of files."""
    return {
        "field": job.field,
        "tokenizer": job.tokenizer.digest,
        "inputs": [
            [source.name, [[path.stat().st_size, path.stat().st_mtime_ns] for path in source.paths]]
            for source in job.inputs
        ],
    }


def _check_unchanged(identity: Mapping[str, Any], job: Job, prefix: Path) -> None:
    """Check that the input has not changed while it was read, so that the manifest's hashes are those of the text."""
    both = zip(identity["inputs"], _identity(job)["inputs"], strict=True)
    if changed := [name for (name, old), (_, new) in both if old != new]:
        raise ValueError(f"{', '.join(changed)} changed while read; remove {unfinished(prefix)} and start again")


def _check_same(done: Manifest, job: Job, prefix: Path) -> None:
    """Check that a complete dataset is the requested one. Reads the input, unless its sizes differ."""
    pairs = {
        "field": (done.field, job.field),
        "tokenizer": (done.tokenizer["sha256"], job.tokenizer.digest),
        "inputs": ([[each["name"], each["bytes"]] for each in done.inputs], [[s.name, s.size] for s in job.inputs]),
    }
    for what, (old, new) in pairs.items():
        if old != new:
            raise ValueError(
                f"{prefix}: is prepared already, with other {what}: {difference(old, new)}; choose another output path"
            )
    both = zip(done.inputs, job.inputs, strict=True)
    if changed := [source.name for each, source in both if each["sha256"] != source.sha256()]:
        raise ValueError(
            f"{prefix}: is prepared already, from other contents of {', '.join(changed)}; choose another output path"
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
