"""The bytes of stored files: parts joined, and unpacked from .gz, .xz or .zst, as far as they can be.

A packed file that was truncated or damaged gives all bytes before that place, for any size of the reads, and stores the
error: records before the damage are valid.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from lowprec_train.data.columns import pyarrow_for

BUFFER = 1 << 20
_BLOCK = 1 << 12  # bytes unpacked at once, on a grid from the beginning of the file: the most that damage in .zst loses

_TOO_SHORT = "Compressed file ended before the end-of-stream marker was reached"
_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
if find_spec("_lzma"):  # some Pythons are built without it
    import lzma

    _ERRORS += (lzma.LZMAError,)


class Joined(io.RawIOBase):
    """The concatenated bytes of files, from byte `position` on."""

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


class Unpacked(io.RawIOBase):
    """The unpacked bytes of stored files. `error`: what ended them early; None if nothing did.

    skipped: unpacked bytes to skip. Read it through `io.BufferedReader`.

    Raises:
        ValueError: the package that unpacks this kind is not installed.
    """

    def __init__(self, paths: Sequence[Path], packed: str, path: str, skipped: int = 0) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._stored = Joined(paths, 0 if packed else skipped)
        self._stream = _OPENERS[packed](self._stored, path)
        # A read of exactly _BLOCK bytes loses those before damage; read1 of Python's own streams returns them first.
        self._read = partial(self._stream.read, _BLOCK) if packed == ".zst" else partial(self._stream.read1, BUFFER)
        self._held = b""
        if packed and not sum(path.stat().st_size for path in paths):
            self.error = EOFError(_TOO_SHORT)
        left = skipped if packed else 0
        while left and (block := self._block()):
            self._held = block[left:]
            left -= min(left, len(block))

    @property
    def position(self) -> int:
        """Number of stored bytes that were read."""
        return self._stored.position

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._held or self._block()
        count = min(len(block), len(buffer))
        buffer[:count] = block[:count]
        self._held = block[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        self._stored.close()
        super().close()

    def _block(self) -> bytes:
        if self.error:
            return b""
        try:
            return self._read()
        except _ERRORS as error:
            self.error = error
            return b""


def check(packed: str, path: str) -> None:
    """Raise ValueError if the package that unpacks this kind is not installed."""
    if packed == ".zst":
        pyarrow_for(path)
    elif packed == ".xz":
        _lzma(path)


def _plain(stored: Joined, path: str) -> IO[bytes]:
    return io.BufferedReader(stored, BUFFER)


def _gz(stored: Joined, path: str) -> Any:
    return gzip.GzipFile(fileobj=io.BufferedReader(stored, BUFFER), mode="rb")


def _xz(stored: Joined, path: str) -> Any:
    return _XzStreams(stored, _lzma(path))


class _XzStreams:
    """Reads the streams of a .xz file one after another, with zeros between and after them. Python's LZMAFile treats
    anything that is not a stream as the end, which silently loses the rest of a damaged file, and refuses the zeros.
    """

    def __init__(self, stored: Joined, module: Any) -> None:
        self._stored, self._module = io.BufferedReader(stored, BUFFER), module
        self._stream = module.LZMADecompressor()

    def read1(self, size: int) -> bytes:
        while not self._stream.eof or self._next_stream():
            stored = self._stored.read(io.DEFAULT_BUFFER_SIZE) if self._stream.needs_input else b""
            if self._stream.needs_input and not stored:
                raise EOFError(_TOO_SHORT)
            if block := self._stream.decompress(stored, size):
                return bytes(block)
        return b""

    def close(self) -> None:
        self._stored.close()

    def _next_stream(self) -> bool:
        begun: bytes = self._stream.unused_data.lstrip(b"\0")
        while not begun and (more := self._stored.read(io.DEFAULT_BUFFER_SIZE)):
            begun = more.lstrip(b"\0")
        if begun:
            self._stream = self._module.LZMADecompressor()
            self._stream.decompress(begun, 0)
        return bool(begun)


def _zst(stored: Joined, path: str) -> Any:
    arrow = pyarrow_for(path)
    return arrow.CompressedInputStream(arrow.PythonFile(stored, "r"), "zstd")


def _lzma(path: str) -> Any:
    if find_spec("_lzma") is None:
        raise ValueError(f"reading {path} needs Python's module 'lzma', which this Python was built without")
    return lzma


_OPENERS = {"": _plain, ".gz": _gz, ".xz": _xz, ".zst": _zst}
