"""Documents from stored records: a line of JSON, a row of a table, a whole file.

A document is a name and a text. Names do not include the directory of the files, so the same files give the same corpus
anywhere: `file` for a file that is one document, otherwise `file:line` and `file:row`, counted from 1.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowprec_train.data.cuts import Cutter, TextSpan, blocks, pieces


@dataclass(frozen=True)
class Document:
    """A text, and the name that decides its split."""

    name: str
    text: str


@dataclass(frozen=True)
class Bad:
    """A record without text, and the reason."""

    reason: str


class Damaged(ValueError):
    """A file that cannot be read, or not beyond some record; the records before it are valid."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive records of a file, after `before` others: bytes, or rows of a column.

    piece: this part of a file that is one long document; else None.
    """

    kind: str
    name: str
    path: str
    before: int
    content: bytes | list[Any]
    piece: TextSpan | None = None

    @property
    def size(self) -> int:
        """Approximate number of bytes of text."""
        if self.piece:
            return len(self.piece.text)
        if isinstance(self.content, bytes):
            return len(self.content)
        return sum(len(text) for text in self.content if isinstance(text, str))

    def documents(self, field: str) -> Iterator[Document | Bad]:
        """Yield each record as a document, or the reason why it is not one. Blank lines are not records."""
        return _READERS[self.kind](self, field)

    def pieces(self, field: str, cutter: Cutter) -> Iterator[TextSpan | Bad]:
        """Yield each record as one piece, or as several if it is long, or the reason why it is not a document."""
        if self.piece:
            yield self.piece
            return
        for found in self.documents(field):
            if isinstance(found, Bad):
                yield found
            else:
                yield from pieces(blocks(found.text), cutter)


def _file(segment: Segment, field: str) -> Iterator[Document | Bad]:
    try:
        yield Document(segment.name, bytes(segment.content).removeprefix(BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        yield Bad(f"{segment.path}: not UTF-8: {error}")


def _lines(segment: Segment, field: str) -> Iterator[Document | Bad]:
    for number, line in enumerate(bytes(segment.content).split(b"\n"), segment.before + 1):
        line = line.removeprefix(BOM_UTF8) if number == 1 else line
        if line.strip():
            place = f"{segment.path}:{number}"
            try:
                record = _parsed(line.decode())
            except UnicodeDecodeError as error:
                yield Bad(f"{place}: not UTF-8: {error}")
            except (ValueError, RecursionError) as error:
                yield Bad(f"{place}: not JSON: {error}")
            else:
                yield _document(f"{segment.name}:{number}", record, field, place)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        return json.loads(line, parse_int=float)  # an integer that is too long for Python


def _rows(segment: Segment, field: str) -> Iterator[Document | Bad]:
    for number, text in enumerate(segment.content, segment.before + 1):
        yield _document(f"{segment.name}:{number}", {field: text}, field, f"{segment.path}:{number}")


def _document(name: str, record: Any, field: str, place: str) -> Document | Bad:
    if not isinstance(record, dict):
        return Bad(f"{place}: no text in field {field!r}; the record holds {_shown(record)}")
    if field not in record:
        return Bad(f"{place}: no text in field {field!r}; the record holds {sorted(record)}")
    if not isinstance(text := record[field], str):
        return Bad(f"{place}: no text in field {field!r}, but {_shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Bad(f"{place}: not Unicode text: {error}")
    return Document(name, text)


def _shown(value: Any) -> str:
    """Return the type of a value and the first 40 characters of its JSON."""
    written = json.dumps(value, default=repr)
    return f"{type(value).__name__} {written if len(written) <= 40 else written[:37] + '...'}"


def _unreadable(segment: Segment, field: str) -> Iterator[Bad]:
    yield from (Bad(reason) for reason in segment.content if isinstance(reason, str))


_READERS = {"txt": _file, "md": _file, "jsonl": _lines, "parquet": _rows, "damaged": _unreadable}
