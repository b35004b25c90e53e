"""Sources of text: the running Python's own sources, or files that the user names.

A document is a name and a text. Names do not include the directory of the files, so the same files give the same corpus
anywhere. A document's name alone decides whether it is for training or validation.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lowprec_train.data import finding
from lowprec_train.data.records import Bad, Damaged, Document
from lowprec_train.data.sources import Source, check_sources

_log = logging.getLogger(__name__)
_NOT_SOURCES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled"})
_NOT_PORTABLE = ("_sysconfigdata", "sitecustomize", "usercustomize")  # written by the build or the system


class Documents(Protocol):
    """A collection that can be read several times, always in the same order."""

    name: str

    def __iter__(self) -> Iterator[Document]: ...

    def digest(self) -> str:
        """Return the SHA-256 of names and contents, equal for equal documents."""


class PythonSources:
    """The .py files under a directory in sorted order, tests and installed packages left out.

    `root`: None for the standard library of the running Python. Files that are not UTF-8 are skipped.

    Raises:
        ValueError: the directory is missing, or has no source.
    """

    def __init__(self, root: str | Path | None = None) -> None:
        self._root = Path(root or sysconfig.get_path("stdlib"))
        self._skipped: set[str] = set()
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
                if path not in self._skipped:  # warn once, even if the sources are read several times
                    _log.warning("warning: %s: skipped: it is not UTF-8", self._root / path)
                self._skipped.add(path)
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
    """Text files, or directories of them (`finding`). Documents are .txt and .md files, lines of .jsonl (with the text
    in `field`) and rows of .parquet.

    skip_bad: skip records without text, and the rest of damaged files, with a warning, instead of raising; `bad` counts
    those of the last iteration. remedy: how the user enables it, for errors.

    Raises:
        ValueError: a path is missing or of another kind, a directory has no such file, a record has no text in this
            field, a file is not UTF-8, or pyarrow is missing for .zst or .parquet.
    """

    def __init__(
        self, paths: str | Sequence[str], field: str = "text", *, skip_bad: bool = False, remedy: str = "--skip-bad"
    ) -> None:
        given = [paths] if isinstance(paths, str) else list(paths)
        self.name = ", ".join(given)
        self._field, self._skip_bad, self.bad = field, skip_bad, 0
        self._remedy, self._warned = f"{remedy} leaves out what cannot be read", False
        self._sources = finding.find(given)
        check_sources(self._sources, field, skip_bad=skip_bad, remedy=self._remedy)

    def __iter__(self) -> Iterator[Document]:
        self.bad = 0
        for source in self._sources:
            for found in self._records(source):
                if isinstance(found, Document):
                    yield found
                elif self._skip_bad:
                    self.bad += 1
                else:
                    raise ValueError(f"{found.reason}; {self._remedy}")
        self._warned = True

    @property
    def files(self) -> list[str]:
        """Paths of the files; of a file in parts, their common path."""
        return [source.path for source in self._sources]

    def digest(self) -> str:
        contents = ((source.name, bytes.fromhex(source.sha256())) for source in self._sources)
        named = [(f"{self._field}/{name}", content) for name, content in contents]
        return _digest([*named, ("skip_bad", b"")] if self._skip_bad else named)

    def _records(self, source: Source) -> Iterator[Document | Bad]:
        try:
            for segment, _, _ in source.segments(self._field):
                yield from segment.documents(self._field)
        except Damaged as error:
            if self._skip_bad and not self._warned:  # once, even if the files are read several times
                _log.warning("warning: the rest of this file is left out: %s", error)
            yield Bad(str(error))


def _digest(contents: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in contents:
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()
