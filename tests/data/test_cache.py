"""A directory that is built once, whole or not at all."""

import errno
import os
import threading
import time

import pytest

from lowprec_train.data import cache
from lowprec_train.data.cache import build_once


def contents(root) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def test_built_once_by_many(tmp_path):
    """Eight at the same moment: one builds, and nobody sees half of it."""
    built, seen, barrier = [], [], threading.Barrier(8)

    def build(directory):
        built.append(directory)
        (directory / "first").write_text("1")
        time.sleep(0.2)
        (directory / "second").write_text("2")

    def use():
        barrier.wait()
        seen.append(contents(build_once(tmp_path / "a", build)))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and seen == [["first", "second"]] * 8
    assert contents(tmp_path) == ["a"]


def test_failed_build_leaves_nothing(tmp_path):
    def fail(directory):
        (directory / "half").write_text("h")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        build_once(tmp_path / "a", fail)
    assert contents(tmp_path) == []
    build_once(tmp_path / "a", lambda directory: (directory / "whole").write_text("w"))
    assert contents(tmp_path / "a") == ["whole"]


def test_rests_of_killed_builders_are_removed(tmp_path):
    (tmp_path / "a.0badc0de.unfinished").mkdir()
    (tmp_path / "b.0badc0de.unfinished").mkdir()
    build_once(tmp_path / "a", lambda directory: None)
    assert contents(tmp_path) == ["a", "b.0badc0de.unfinished"]


def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    def overtaken(directory):
        other = tmp_path / "a"
        other.mkdir()
        (other / "theirs").write_text("t")
        (directory / "ours").write_text("o")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    (tmp_path / "a.0badc0de.unfinished").mkdir()  # may belong to a builder that is alive
    build_once(tmp_path / "a", overtaken)
    assert contents(tmp_path / "a") == ["theirs"]
    assert contents(tmp_path) == ["a", "a.0badc0de.unfinished"]
    assert "no file locks in" in caplog.text


def test_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache .*file cannot be written to \(.*\); set data\.cache"):
        build_once(tmp_path / "file" / "a", lambda directory: None)


def test_built_directory_needs_no_lock(tmp_path, monkeypatch):
    """A finished cache may be read-only."""
    os.mkdir(tmp_path / "a")
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("opened a file"))
    assert build_once(tmp_path / "a", lambda directory: pytest.fail("built again")) == tmp_path / "a"
