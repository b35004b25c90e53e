"""Where text comes from: the running Python's own sources, or files that the user names.

A document is a name and a text. Names do not hold the place where the files lie, so the same files give the same corpus
anywhere; which half of the split a document falls into depends on its name alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

_NOT_SOURCES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"})
_NOT_PORTABLE = ("_sysconfigdata", "sitecustomize", "usercustomize")  # written by the build or the system
_SUFFIXES = (".txt", ".jsonl", ".txt.zst", ".jsonl.zst")


@dataclass(frozen=True)
class Document:
    """A text and the name that places it in the split."""

    name: str
    text: str


class Documents(Protocol):
    """A collection that can be read again and again, always in the same order."""

    name: str

    def __iter__(self) -> Iterator[Document]: ...

    def digest(self) -> str:
        """SHA-256 of names and contents: equal digests hold equal documents."""
        ...


class PythonSources:
    """The .py files under a directory in sorted order, tests and installed packages left out.

    `root`: None for the standard library of the running Python. Files that are not UTF-8 are skipped.

    Raises:
        ValueError: the directory is absent, or holds no source.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self._root = Path(root or sysconfig.get_path("stdlib"))
        self.name = f"Python sources in {self._root}"
        if not self._root.is_dir():
            raise ValueError(f"{self._root}: no such directory of Python sources")
        self._files = sorted(self._find(), key=lambda path: path.relative_to(self._root).parts)
        if not self._files:
            raise ValueError(
                f"empty corpus: {self._root} holds no .py files (tests and installed packages do not count)"
            )

    def __iter__(self) -> Iterator[Document]:
        for path, content in self._contents():
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            yield Document(path, text)

    def digest(self) -> str:
        return _digest(self._contents())

    def _find(self) -> Iterator[Path]:
        for directory, inside, files in os.walk(self._root):
            inside[:] = [name for name in inside if name not in _NOT_SOURCES and not name.startswith("config-")]
            for name in files:
                if name.endswith(".py") and not name.startswith(_NOT_PORTABLE):
                    yield Path(directory, name)

    def _contents(self) -> Iterator[tuple[str, bytes]]:
        for path in self._files:
            yield path.relative_to(self._root).as_posix(), path.read_bytes()


class TextFiles:
    """.txt files (a document each) and .jsonl files (a document a line, its text in `field`), either also as .zst.

    A directory stands for all such files below it, sorted. Documents are named `file` or `file:line`.

    Raises:
        ValueError: a path is absent or of another kind, a directory holds no such file, a line is no JSON object with
            this field, a file is not UTF-8, or .zst is asked for without pyarrow.
    """

    def __init__(self, paths: str | Sequence[str], field: str = "text") -> None:
        given = [paths] if isinstance(paths, str) else list(paths)
        self.name = ", ".join(given)
        self._field = field
        self._files = [found for path in given for found in _find_texts(Path(path).expanduser())]
        if not self._files:
            raise ValueError(f"empty corpus: no files in {given}")

    def __iter__(self) -> Iterator[Document]:
        for name, path in self._files:
            with _open_text(path) as file:
                try:
                    if path.name.removesuffix(".zst").endswith(".jsonl"):
                        yield from self._lines(name, path, file)
                    else:
                        yield Document(name, file.read())
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}: not UTF-8: {error}") from error

    def digest(self) -> str:
        files = ((name, hashlib.file_digest(path.open("rb"), "sha256").digest()) for name, path in self._files)
        return _digest((f"{self._field}/{name}", content) for name, content in files)

    def _lines(self, name: str, path: Path, file: Iterable[str]) -> Iterator[Document]:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Document(f"{name}:{number}", self._text(line, f"{path}:{number}"))

    def _text(self, line: str, place: str) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON: {error}") from error
        text = record.get(self._field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            holds = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{place}: no text in field {self._field!r}; the line holds {holds}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise ValueError(f"{place}: not Unicode text: {error}") from error
        return text


def _find_texts(path: Path) -> list[tuple[str, Path]]:
    """(name, file) of a file, or of the text files below a directory; names are relative to it."""
    if path.is_dir():
        inside = sorted(found for found in path.rglob("*") if found.name.endswith(_SUFFIXES) and found.is_file())
        if not inside:
            raise ValueError(f"empty corpus: {path} holds no file that ends in {', '.join(_SUFFIXES)}")
        return [(found.relative_to(path).as_posix(), found) for found in inside]
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory of text")
    if not path.name.endswith(_SUFFIXES):
        raise ValueError(f"{path}: can read {', '.join(_SUFFIXES)}")
    return [(path.name, path)]


def _open_text(path: Path) -> IO[str]:
    if path.suffix != ".zst":
        return path.open(encoding="utf-8", newline="")
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(
            f"{path}: reading .zst needs pyarrow, which is not installed; or decompress the file"
        ) from error
    return io.TextIOWrapper(pyarrow.input_stream(str(path), compression="zstd"), encoding="utf-8", newline="")


def _digest(contents: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in contents:
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
