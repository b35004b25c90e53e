"""An indexed dataset that is written document by document and survives crashes.

Until it is complete it lies in `<prefix>.unfinished/`: two append-only files with the tokens and the document lengths,
and `state.json`, which is replaced after both are synced. The state has the lengths of the files and the caller's
progress (how far its input was read). After a crash the next writer truncates both files to the state and continues, so
the result does not depend on crashes. At the end .bin and .idx get their final names; the manifest that the caller then
writes marks them as complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from lowprec_train import json_schema
from lowprec_train.data.finding import shown
from lowprec_train.data.indexed import to_disk, write_index
from lowprec_train.json_schema import FLAG, OBJECT, WHOLE

STATE = {"identity": OBJECT, "remembered": OBJECT, "whole": FLAG, "documents": WHOLE, "tokens": WHOLE, "open?": WHOLE}
_LONGEST = 2**31 - 1  # tokens of a document: an int32 in the index


class AppendingWriter:
    """Appends to the unfinished dataset of a prefix: a new one, or one that an earlier writer left.

    identity: must be equal for the work of an earlier writer to be continued; plain JSON values.
    progress: the argument of the last commit; empty for a new dataset. complete: nothing is left to append.

    Raises:
        ValueError: another process writes it, it was started with another identity, or there are finished files without
            a manifest.
        OSError: from every method that writes, with the path: the disk is full or fails.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], identity: Mapping[str, Any]) -> None:
        self._prefix, self._dtype = prefix, dtype
        self._identity = json.loads(json.dumps({**identity, "dtype": str(dtype)}))
        self._directory = unfinished(prefix)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self._directory)
        try:
            state = self._read_state()
            for ending in () if state["whole"] else ("bin", "idx"):  # whole: a writer may have died between two renames
                if Path(f"{prefix}.{ending}").exists():
                    raise ValueError(
                        f"{prefix}.{ending} exists, without a manifest of this command; choose another output path"
                    )
        except ValueError:
            self._lock.close()
            raise
        self.progress: dict[str, Any] = state["remembered"]
        self.complete: bool = state["whole"]
        self.documents: int = state["documents"]
        self.tokens: int = state["tokens"]
        self._open: int = state.get("open", 0)  # tokens of a document that is not complete

    def __enter__(self) -> AppendingWriter:
        if not self.complete:
            try:
                self._bin = _cut(self._directory / "bin", self.tokens * self._dtype.itemsize)
                self._lengths = _cut(self._directory / "lengths", self.documents * 4)
            except ValueError:
                self._lock.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.complete:
                with named(self._directory), self._lengths, self._bin:
                    pass
        finally:
            self._lock.close()

    def append(self, tokens: bytes, lengths: np.ndarray) -> None:
        """Append documents of these lengths (in tokens), in the dataset's dtype.

        Tokens beyond these lengths start a document. The first length of a later call adds its last tokens.

        Raises:
            ValueError: a document has more tokens than the index can represent.
        """
        lengths = lengths.astype(np.int64)
        rest = len(tokens) // self._dtype.itemsize - int(lengths.sum())
        assert rest >= 0, rest
        if len(lengths):
            lengths[0] += self._open
            self._open = 0
        self._open += rest
        if int(lengths.max(initial=self._open)) > _LONGEST:
            raise ValueError(f"{self._prefix}: document {self.documents + 1} has more than {_LONGEST:,} tokens")
        with named(self._directory):
            self._bin.write(tokens)
            self._lengths.write(lengths.astype("<i4").tobytes())
        self.tokens += len(tokens) // self._dtype.itemsize
        self.documents += len(lengths)

    def commit(self, progress: Mapping[str, Any], *, complete: bool = False) -> None:
        """Make everything that was appended, and `progress`, survive a crash."""
        with named(self._directory):
            for file in (self._bin, self._lengths):
                to_disk(file)
        state = {
            "identity": self._identity,
            "documents": self.documents,
            "tokens": self.tokens,
            "open": self._open,
            "whole": complete,
            "remembered": dict(progress),
        }
        write_whole(self._directory / "state.json", json.dumps(state, indent=1).encode())

    def finish(self, progress: Mapping[str, Any]) -> None:
        """Rename .bin and .idx to their final names. After an interruption the next writer repeats this."""
        if not self.complete:
            self.commit(progress, complete=True)
        bin_, idx = self._directory / "bin", self._directory / "idx"
        lengths = np.fromfile(self._directory / "lengths", "<i4")
        with named(idx), open(idx, "wb") as file:
            write_index(file, self._dtype, lengths, np.arange(len(lengths) + 1))
        if bin_.exists():
            os.replace(bin_, f"{self._prefix}.bin")
        os.replace(idx, f"{self._prefix}.idx")

    def _read_state(self) -> dict[str, Any]:
        path = self._directory / "state.json"
        if not path.exists():
            return {"remembered": {}, "whole": False, "documents": 0, "tokens": 0}
        try:
            state: dict[str, Any] = json.loads(path.read_text())
            wrong = json_schema.fault(state, STATE)
        except ValueError as error:
            wrong = f"it is not JSON: {error}"
        if wrong:
            raise ValueError(f"{path}: {wrong}; remove {self._directory} to start again")
        differ = [key for key, value in self._identity.items() if state["identity"].get(key) != value]
        if differ:
            told = [f"{key} {difference(state['identity'].get(key), self._identity[key])}" for key in differ]
            raise ValueError(
                f"{self._directory} was started with other input: {'; '.join(told)}; remove it to start again, or give "
                "the same input to continue"
            )
        return state


def unfinished(prefix: Path) -> Path:
    """Return the directory of the dataset of a prefix until it is complete."""
    return prefix.with_name(f"{prefix.name}.unfinished")


def difference(old: Any, new: Any) -> str:
    """Return `old, now new` for an error line. Of two lists it has only the entries that differ, and at most five."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"{old}, now {new}"
    before, now = ([_entry(each) for each in entries] for entries in (old, new))
    lost, found = ([each for each in a if each not in b] for a, b in ((before, {*now}), (now, {*before})))
    if not lost and not found:
        return f"{len(old)} in another order"
    return f"{shown(lost) or 'none'}, now {shown(found) or 'none'}"


def _entry(entry: Any) -> str:
    """Return a file of a list as text: its name and bytes, and its modification time if that is known."""
    if not (isinstance(entry, list) and len(entry) == 2):
        return str(entry)
    name, about = entry
    if not isinstance(about, list):
        return f"{name} ({about:,} bytes)"
    changed = datetime.fromtimestamp(max(time for _, time in about) / 1e9)
    return f"{name} ({sum(size for size, _ in about):,} bytes of {changed})"


def forget(prefix: Path) -> None:
    """Remove the unfinished directory of a complete dataset."""
    shutil.rmtree(unfinished(prefix), ignore_errors=True)


def _locked(directory: Path) -> IO[bytes]:
    lock = open(directory / "lock", "wb")  # noqa: SIM115 (held until the writer ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{directory}: another process is writing there") from None
    except OSError:
        pass  # a file system without locks: the user must avoid two writers
    return lock


def _cut(path: Path, size: int) -> IO[bytes]:
    """Truncate the file to `size` bytes and open it for appending. Raises ValueError if it has fewer."""
    path.touch()
    if (there := path.stat().st_size) < size:
        raise ValueError(f"{path} has {there:,} of {size:,} bytes; remove {path.parent} to start again")
    os.truncate(path, size)
    return path.open("ab")


def write_whole(path: Path, content: bytes, *, shared: bool = False) -> None:
    """Write a file atomically and sync it to disk. `shared`: several processes may write it at the same time.

    Raises:
        OSError: it cannot be written; has the path.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial" if shared else f"{path.name}.partial")
    with named(path):
        try:
            with open(partial, "wb") as file:
                file.write(content)
                to_disk(file)
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the path to an OSError: Python names the file if it cannot be opened, not if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
