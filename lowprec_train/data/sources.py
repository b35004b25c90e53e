"""Files of text as they lie on disk: .txt, .jsonl and .parquet; the first two also as .gz or .zst, and cut into parts.

A source is one such file, or the parts `NAME.00`, `NAME.01`, ... of one that was cut (not of .parquet): their bytes,
end to end, are the file. It is read as segments, runs of records still as they are stored, so that one process can read
what others turn into documents. A `Place` says how far a source was read; reading may begin at any place where a
segment ended.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import io
import itertools
import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lowprec_train.data.records import Segment

_log = logging.getLogger(__name__)
ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet")
SEGMENT = 1 << 20  # bytes of text read at once, and handed to a worker: a fraction of a second of work
_NAME = re.compile(r"(?P<whole>.+\.(?P<kind>txt|jsonl|parquet)(?P<packed>\.gz|\.zst)?)(?:\.(?P<part>\d+))?", re.DOTALL)
_BUFFER = 1 << 20
_SHOWN = 5  # names of skipped files in a message
_ROWS = 64  # read from a .parquet file at once


@dataclass(frozen=True, kw_only=True)
class Place:
    """How far a source was read: bytes of its unpacked text (0 in .parquet), and lines or rows."""

    offset: int = 0
    records: int = 0


@dataclass(frozen=True)
class Source:
    """One file of text: a name without the place where it lies, its kind, and the parts it is stored in."""

    name: str
    kind: str
    packed: str
    paths: tuple[Path, ...]

    @property
    def path(self) -> str:
        """The name for messages: the file, or the name that its parts share."""
        return str(self.paths[0] if len(self.paths) == 1 else self.whole)

    @property
    def whole(self) -> Path:
        """The name that its parts share, or its own."""
        return self.paths[0].with_name(Path(self.name).name)

    @property
    def size(self) -> int:
        """Bytes of all parts as stored, packed or not."""
        return sum(path.stat().st_size for path in self.paths)

    def sha256(self) -> str:
        """SHA-256 of the stored bytes, parts end to end."""
        with _Parts(self.paths) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def check(self, field: str) -> None:
        """Raises ValueError when this kind of file needs a package that is missing, or lacks the column `field`."""
        if self.kind == "parquet":
            _parquet(self.path, field)
        elif self.packed == ".zst":
            _pyarrow(self.path)

    def segments(self, field: str, start: Place = Place(), size: int = SEGMENT) -> Iterator[tuple[Segment, Place, int]]:
        """Segments of about `size` bytes, the place where each ends, and the stored bytes read by then.

        A segment of .jsonl is whole lines, of .parquet rows, of .txt the whole file.

        Raises:
            ValueError: the file cannot be unpacked, is cut off, or its kind cannot be read here (as `check`).
        """
        if self.kind == "parquet":
            return self._rows(field, start, size)
        return self._text(start, size)

    def _text(self, start: Place, size: int) -> Iterator[tuple[Segment, Place, int]]:
        place = start
        with _Parts(self.paths, 0 if self.packed else start.offset) as parts, self._unpacked(parts) as stream:
            try:
                _skip(stream, start.offset if self.packed else 0)
                while content := _whole(stream, place) if self.kind == "txt" else _lines(stream, size):
                    segment = Segment(
                        kind=self.kind, name=self.name, path=self.path, before=place.records, content=content
                    )
                    place = Place(offset=place.offset + len(content), records=place.records + content.count(b"\n"))
                    yield segment, place, parts.position
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"{self.path}: cannot be read to its end: {error}") from error

    def _unpacked(self, parts: _Parts) -> IO[bytes]:
        if self.packed == ".gz":
            return gzip.GzipFile(fileobj=io.BufferedReader(parts, _BUFFER), mode="rb")  # type: ignore[return-value]
        if self.packed == ".zst":
            arrow = _pyarrow(self.path)
            return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(parts, "r"), "zstd"), _BUFFER)
        return io.BufferedReader(parts, _BUFFER)

    def _rows(self, field: str, start: Place, size: int) -> Iterator[tuple[Segment, Place, int]]:
        file, stored = _parquet(self.path, field), self.size
        place = start
        try:
            for rows in _batches(file, field, start.records, size):
                segment = Segment(kind=self.kind, name=self.name, path=self.path, before=place.records, content=rows)
                place = Place(records=place.records + len(rows))
                yield segment, place, stored * place.records // file.metadata.num_rows
        except (_pyarrow(self.path).ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path}: cannot be read past row {place.records}: {error}") from error


def find(paths: Sequence[str | Path]) -> list[Source]:
    """The sources that paths name, in their order; a directory stands for all below it, sorted, a part for its whole.

    Raises:
        ValueError: a path is absent or of another kind, a directory holds no text, a part is missing or there twice, a
            file is named twice, or as a whole and as its parts.
    """
    found = [source for path in paths for source in _find(Path(path).expanduser())]
    if not found:
        raise ValueError(f"empty corpus: no files in {[str(path) for path in paths]}")
    once: dict[Path, Source] = {}
    for source in found:
        first, whole = source.paths[0], source.whole
        if whole in once and once[whole].paths != source.paths:
            raise ValueError(f"{whole}: there whole and in parts; name one of the two, or remove it")
        if whole in once and len(source.paths) == 1:
            raise ValueError(f"{first}: named twice")
        once[whole] = source
    return list(once.values())


def _find(path: Path) -> list[Source]:
    if path.is_dir():
        inside = sorted(each for each in path.rglob("*") if _NAME.fullmatch(each.name) and each.is_file())
        others = _others(path)
        if not inside:
            found = f", only {others}" if others else ""
            raise ValueError(f"empty corpus: {path} holds no file that ends in {', '.join(ENDINGS)}{found}")
        if others:
            _log.warning("warning: %s: skipped, for they end in none of %s: %s", path, ", ".join(ENDINGS), others)
        return [_source(each, path) for each in inside]
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory of text")
    if not _NAME.fullmatch(path.name):
        raise ValueError(f"{path}: can read {', '.join(ENDINGS)}")
    return [_source(path, path.parent)]


def _others(directory: Path) -> str:
    """Files below a directory that are of no kind that is read, hidden ones left out: their number, and some names."""
    below = (each.relative_to(directory) for each in sorted(directory.rglob("*")) if each.is_file())
    names = [each.as_posix() for each in below if not _NAME.fullmatch(each.name) and not _hidden(each)]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"{len(names)} other{'s' if len(names) > 1 else ''} ({shown})" if names else ""


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _source(path: Path, root: Path) -> Source:
    """The source that this file is, or is a part of; named relative to `root`."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    whole = path.with_name(match["whole"])
    if match["kind"] == "parquet" and match["part"] is not None:
        raise ValueError(f"{path}: .parquet files are not read in parts; put these together as {whole}")
    paths = (path,) if match["part"] is None else _parts(whole)
    return Source(whole.relative_to(root).as_posix(), match["kind"], match["packed"] or "", paths)


def _parts(whole: Path) -> tuple[Path, ...]:
    numbered: dict[int, Path] = {}
    for path in sorted(whole.parent.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match["whole"] == whole.name and match["part"]:
            if (number := int(match["part"])) in numbered:
                raise ValueError(f"{whole}: part {number} is there twice: {numbered[number].name} and {path.name}")
            numbered[number] = path
    numbers = sorted(numbered)
    if numbers != [*range(numbers[0], numbers[0] + len(numbers))] or numbers[0] > 1:
        raise ValueError(f"{whole}: cut into parts, of which some are missing: there are {numbers}")
    return tuple(numbered[number] for number in numbers)


class _Parts(io.RawIOBase):
    """The bytes of files, end to end, from byte `position` on."""

    def __init__(self, paths: Sequence[Path], position: int = 0) -> None:
        super().__init__()
        self.position = position
        self._left = list(paths)
        while len(self._left) > 1 and position >= self._left[0].stat().st_size:
            position -= self._left.pop(0).stat().st_size
        self._file = self._left.pop(0).open("rb", buffering=0)
        self._file.seek(position)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not (count := self._file.readinto(buffer) or 0) and self._left and len(buffer):
            self._file.close()
            self._file = self._left.pop(0).open("rb", buffering=0)
        self.position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _skip(stream: IO[bytes], count: int) -> None:
    while count and (block := stream.read(min(count, _BUFFER))):
        count -= len(block)


def _lines(stream: IO[bytes], size: int) -> bytes:
    return stream.read(size) + stream.readline()


def _whole(stream: IO[bytes], place: Place) -> bytes:
    """The content of a file at the first call, then nothing."""
    return b"" if place.offset else stream.read()


def _batches(file: Any, field: str, skipped: int, size: int) -> Iterator[list[Any]]:
    """Values of a column from row `skipped` on, in lists of about `size` bytes; row groups before it are not read."""
    counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    ends = [*itertools.accumulate(counts)]
    first = bisect.bisect_right(ends, skipped)
    skipped -= sum(counts[:first])
    gathered: list[Any] = []
    for batch in file.iter_batches(_ROWS, row_groups=[*range(first, len(counts))], columns=[field]):
        values = batch.column(0).to_pylist()
        gathered += values[skipped:]
        skipped = max(0, skipped - len(values))
        if sum(len(text) for text in gathered if isinstance(text, str)) >= size:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


def _parquet(path: str, field: str) -> Any:
    arrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a .parquet file: {error}") from error
    if field not in file.schema_arrow.names:
        raise ValueError(f"{path}: no column {field!r}; the file holds {file.schema_arrow.names}")
    return file


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"reading {path} needs the package 'pyarrow': pip install 'lowprec_train[data]'") from error
    return pyarrow
