"""Read a source in segments: stored records that follow each other, which others turn into documents.

A source is one file, or the parts `NAME.00`, `NAME.01`, ... of one that was split: their concatenated bytes are the
file. A `Place` is a position in a source; reading may start at any place where a segment ended. A long .txt or .md file
is read in pieces (`cuts`) if there is a cutter. It is then read twice: no piece is returned before the whole file is
known to be text.
"""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowprec_train.data import unpacking
from lowprec_train.data.columns import Column
from lowprec_train.data.cuts import PIECE, Cutter, TextSpan, pieces
from lowprec_train.data.records import Damaged, Segment
from lowprec_train.data.unpacking import BUFFER, Joined, Unpacked

SEGMENT = 1 << 20  # bytes of text per read, and per task of a worker: a fraction of a second of work
LONGEST_LINE = 64 << 20  # bytes of a line of .jsonl, which is read whole: it needs twenty times its size in memory


@dataclass(frozen=True, kw_only=True)
class Place:
    """A position in a source: bytes of unpacked text (0 in .parquet), and number of lines, rows or whole documents."""

    offset: int = 0
    records: int = 0


@dataclass(frozen=True)
class Source:
    """One file of text: its name without the directory, its kind, and the parts in which it is stored."""

    name: str
    kind: str
    packed: str
    paths: tuple[Path, ...]

    @property
    def path(self) -> str:
        """The path for messages: the file, or the common path of its parts."""
        return str(self.paths[0] if len(self.paths) == 1 else self.whole)

    @property
    def whole(self) -> Path:
        """The common path of its parts, or its own."""
        return self.paths[0].with_name(Path(self.name).name)

    @property
    def size(self) -> int:
        """Stored bytes of all parts, packed or not."""
        return sum(path.stat().st_size for path in self.paths)

    def sha256(self) -> str:
        """Return the SHA-256 of the stored bytes of all parts."""
        with Joined(self.paths) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def check(self, field: str) -> None:
        """Check from its beginning or footer that the source can be read here.

        Raises:
            Damaged: it is not of its kind, or lacks the column `field`.
            ValueError: a package that reads its kind is missing.
        """
        if self.kind == "parquet":
            Column(self.path, field)
        unpacking.check(self.packed, self.path)

    def segments(
        self,
        field: str,
        start: Place = Place(),
        size: int = SEGMENT,
        cutter: Cutter | None = None,
        longest_line: int = LONGEST_LINE,
    ) -> Iterator[tuple[Segment, Place, int]]:
        """Yield segments of about `size` bytes, the place where each ends, and the stored bytes read so far.

        A segment is whole lines of .jsonl, rows of .parquet, a whole .txt or .md file or, with a cutter, a piece of it.

        Raises:
            Damaged: the file cannot be unpacked or read to its end; raised after the records before that place.
            ValueError: a package that reads its kind is missing, or a line of .jsonl has more than `longest_line` bytes
                (within `size`).
        """
        if self.kind == "parquet":
            return self._rows(field, start, size)
        if self.kind == "jsonl":
            return self._lines(start, size, longest_line)
        return self._document(start, cutter)

    def _segment(self, content: bytes | list[Any], place: Place = Place(), piece: TextSpan | None = None) -> Segment:
        return Segment(
            kind=self.kind, name=self.name, path=self.path, before=place.records, content=content, piece=piece
        )

    def _open(self, start: int = 0) -> tuple[Unpacked, io.BufferedReader]:
        unpacked = Unpacked(self.paths, self.packed, self.path, start)
        return unpacked, io.BufferedReader(unpacked, BUFFER)

    def _lines(self, start: Place, size: int, longest: int) -> Iterator[tuple[Segment, Place, int]]:
        place = start
        unpacked, stream = self._open(start.offset)
        with stream:
            while content := stream.read(size):
                if len(rest := stream.readline(longest + 1)) > longest:
                    number = place.records + content.count(b"\n") + 1
                    raise ValueError(
                        f"{self.path}:{number}: a line of more than {longest:,} bytes, and lines are read whole; raise "
                        "the limit with --max-line-mib of prepare-data, or store long documents as .txt files, which "
                        "are read in pieces"
                    )
                content += rest
                if unpacked.error:
                    content = content[: content.rfind(b"\n") + 1]
                if content:
                    segment = self._segment(content, place)
                    place = Place(offset=place.offset + len(content), records=place.records + content.count(b"\n"))
                    yield segment, place, unpacked.position
            if unpacked.error:
                raise Damaged(f"{self.path}: cannot be read to its end: past line {place.records}: {unpacked.error}")

    def _document(self, start: Place, cutter: Cutter | None) -> Iterator[tuple[Segment, Place, int]]:
        if start.records:
            return
        if start.offset == 0:
            unpacked, stream = self._open()
            with stream:
                content = stream.read(-1 if cutter is None else PIECE + 1)
            if unpacked.error:
                raise Damaged(f"{self.path}: cannot be read to its end: {unpacked.error}") from unpacked.error
            if cutter is None or len(content) <= PIECE:
                yield self._segment(content), Place(offset=len(content), records=1), self.size
                return
            self._check_text()
        assert cutter
        yield from self._pieces(start, cutter)

    def _check_text(self) -> None:
        """Read the whole file. Raises `Damaged` if it cannot be read to its end, or is not UTF-8."""
        unpacked, stream = self._open()
        decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
        with stream:
            while content := stream.read(BUFFER):
                held = len(decoder.getstate()[0])
                try:
                    decoder.decode(content)
                except UnicodeDecodeError as error:
                    place = read - held + error.start
                    raise Damaged(f"{self.path}: not UTF-8: {error.reason} in position {place}") from error
                read += len(content)
        if unpacked.error:
            raise Damaged(f"{self.path}: cannot be read to its end: {unpacked.error}") from unpacked.error
        if decoder.getstate()[0]:
            raise Damaged(f"{self.path}: not UTF-8: it ends inside of a character")

    def _pieces(self, start: Place, cutter: Cutter) -> Iterator[tuple[Segment, Place, int]]:
        offset = start.offset
        unpacked, stream = self._open(offset)
        begun = bool(offset)
        if not begun and stream.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
            offset += len(stream.read(len(codecs.BOM_UTF8)))
        with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
            for piece in pieces(iter(lambda: text.read(PIECE), ""), cutter, continued=begun):
                if unpacked.error:  # the whole file could be read before
                    raise ValueError(f"{self.path}: cannot be read again: {unpacked.error}")
                offset += len(piece.text.encode())
                place = Place(offset=offset, records=int(piece.last))
                yield self._segment(b"", piece=piece), place, unpacked.position

    def _rows(self, field: str, start: Place, size: int) -> Iterator[tuple[Segment, Place, int]]:
        column, stored = Column(self.path, field), self.size
        place = start
        for rows in column.values(start.records, size):
            segment = self._segment(rows, place)
            place = Place(records=place.records + len(rows))
            yield segment, place, stored * place.records // column.rows


def check_sources(sources: Iterable[Source], field: str, *, skip_bad: bool, remedy: str) -> None:
    """Check each source before any is read. With `skip_bad` damage is reported when its file is read.

    Raises:
        ValueError: a file cannot be read; says what to do about damage (`remedy`).
    """
    for source in sources:
        try:
            source.check(field)
        except Damaged as error:
            if not skip_bad:
                raise ValueError(f"{error}; {remedy}") from error
