"""Damaged checkpoints: found, kept, and replaced by the newest whole one, or an error that changes nothing."""

import json
import re
from pathlib import Path

import pytest

from lowprec_train.data.appending import write_whole
from lowprec_train.train import digests
from lowprec_train.train.checkpoint import Checkpointer, CheckpointError
from tests.train.damage import DAMAGES, invert, shards, truncate, without_checksums
from tests.train.standins import bits, make_trainer, same
from tests.train.test_rundir import record


def keeper(directory, **changes):
    return Checkpointer(directory, **({"interval": 4, "keep": 3, "asynchronous": False} | changes))


@pytest.fixture(scope="module")
def trained():
    """A trainer after 4, 8 and 12 steps."""
    trainers = [make_trainer() for _ in range(3)]
    for number, trainer in enumerate(trainers, start=1):
        for _ in range(4 * number):
            trainer.step()
    return {4 * number: trainer for number, trainer in enumerate(trainers, start=1)}


@pytest.fixture
def saved(tmp_path, trained):
    """A folder with step-4, step-8 and step-12, each of its own state."""
    saver = keeper(tmp_path)
    for step, trainer in trained.items():
        saver.save(trainer.checkpoint_parts(), step)
    return tmp_path


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_one_is_taken_and_the_damaged_one_kept(saved, trained, damage, caplog):
    DAMAGES[damage](saved / "step-12")
    left, read = contents(saved / "step-12"), make_trainer()
    assert keeper(saved).load(read.checkpoint_parts()) == 8 == read.steps_done
    assert same(bits(read), bits(trained[8]))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(r"step-12 is (damaged|incomplete)\b.*; kept as damaged-step-12; continuing from step-8$", said)
    assert contents(saved / "damaged-step-12") == left
    assert (saved / "latest").read_text() == "step-8\n" and names(saved) == [
        *("damaged-step-12", "latest", "step-4", "step-8")
    ]


def test_each_file_and_every_part_of_it_is_verified(saved, monkeypatch):
    """One bit anywhere, with chunks so small that a file has many."""
    monkeypatch.setattr(digests, "CHUNK", 4096)
    monkeypatch.setattr(digests, "PIECE", 1024)
    keeper(saved).save(make_trainer().checkpoint_parts(), 16)
    path = saved / "step-16"
    digests.verify(path)
    (file,) = shards(path)
    size = file.stat().st_size
    assert size > 6 * 4096
    for at in (0, 4095, 4096, size // 2, size - 1):
        invert(file, count=1, at=at)
        start = at // 4096 * 4096
        with pytest.raises(CheckpointError, match=f"{file.name} is not .* bytes {start} to {min(start + 4096, size)} "):
            digests.verify(path)
        invert(file, count=1, at=at)
    digests.verify(path)


def test_ranks_share_the_reading(saved, monkeypatch):
    """Each chunk is read by one of them."""
    monkeypatch.setattr(digests, "CHUNK", 4096)
    keeper(saved).save(make_trainer().checkpoint_parts(), 16)
    manifest, seen = digests.read(saved / "step-16"), []
    monkeypatch.setattr(digests.Manifest, "_damage", lambda self, name, chunk: seen.append((name, chunk)) or "")
    for ranks in (1, 3, 64):
        seen.clear()
        assert not any(manifest.damage(rank, ranks) for rank in range(ranks))
        chunks = [(name, i) for name, digest in manifest.files.items() for i in range(len(digest.crc32))]
        assert sorted(seen) == sorted(chunks) and len(chunks) > 6


def test_none_is_whole_and_nothing_is_changed(saved):
    for step in (4, 8, 12):
        invert(shards(saved / f"step-{step}")[0])
    before = contents(saved)
    with pytest.raises(CheckpointError, match="(?s)step-12 is damaged.*step-8 is.*step-4 is.*nothing was changed"):
        keeper(saved).load(make_trainer().checkpoint_parts())
    assert contents(saved) == before


def test_sizes_alone_are_compared_where_it_is_said(saved):
    invert(shards(saved / "step-12")[0], count=1)
    assert keeper(saved, verify=False).load(make_trainer().checkpoint_parts()) == 12
    truncate(shards(saved / "step-12")[0])
    assert keeper(saved, verify=False).load(make_trainer().checkpoint_parts()) == 8


def test_what_torch_cannot_read_is_damage_too(saved, caplog):
    """Found only while tensors are read: all of them are read again from the older one."""
    file = shards(saved / "step-12")[0]
    file.write_bytes(b"\0" * file.stat().st_size)
    read = make_trainer()
    assert keeper(saved, verify=False).load(read.checkpoint_parts()) == 8 == read.steps_done
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "\n" not in said and said.endswith("; kept as damaged-step-12; continuing from step-8")


def test_a_file_of_which_the_manifest_says_nothing_is_damage(saved):
    told = json.loads((saved / "step-12" / "manifest.json").read_text())
    del told["files"][shards(saved / "step-12")[0].name]
    (saved / "step-12" / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="step-12 is damaged: manifest.json does not list __0_0.distcp"):
        keeper(saved).load(make_trainer().checkpoint_parts(), 12)


def test_a_pointer_to_an_older_one_is_reported(saved, caplog):
    (saved / "latest").write_text("step-4\n")
    assert keeper(saved).load(make_trainer().checkpoint_parts()) == 4
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith("latest names step-4, but there are newer checkpoints: [8, 12]; continuing from step-4")


def test_a_checkpoint_without_checksums_loads_and_says_so(saved, caplog):
    without_checksums(saved / "step-12")
    assert keeper(saved).load(make_trainer().checkpoint_parts()) == 12
    assert [r.getMessage() for r in caplog.records if "cannot be verified" in r.getMessage()] == [
        f"warning: checkpoint {saved / 'step-12'} was written without checksums: its bytes cannot be verified"
    ]
    invert(saved / "step-12" / ".metadata", at=0)
    assert keeper(saved).load(make_trainer().checkpoint_parts()) == 8


def test_retention_keeps_what_was_taken_in_place_of_a_damaged_one(saved):
    invert(shards(saved / "step-12")[0])
    saver, trainer = keeper(saved, keep=1), make_trainer()
    assert saver.load(trainer.checkpoint_parts()) == 8
    assert saver.steps() == [4, 8]
    saver.save(trainer.checkpoint_parts(), 12)
    assert names(saved) == ["damaged-step-12", "latest", "step-12"]
    invert(shards(saved / "step-12")[0])
    saver.save(trainer.checkpoint_parts(), 16)


def test_damaged_twice(saved, trained):
    for count in (1, 2):
        invert(shards(saved / "step-12")[0])
        assert keeper(saved).load(make_trainer().checkpoint_parts()) == 8
        keeper(saved).save(trained[12].checkpoint_parts(), 12)
        assert len([name for name in names(saved) if name.startswith("damaged-step-12")]) == count


# --- which one is taken ---


@pytest.mark.parametrize("pointer", [None, "", "nonsense", b"\xff\x00", "step-99\n"])
def test_a_lost_pointer_leads_to_the_newest(saved, pointer, caplog):
    (saved / "latest").unlink()
    if pointer is not None:
        (saved / "latest").write_bytes(pointer if isinstance(pointer, bytes) else pointer.encode())
    read = make_trainer()
    assert keeper(saved).load(read.checkpoint_parts()) == 12 == read.steps_done
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "latest" in said and said.endswith("continuing from step-12")
    assert (saved / "latest").read_text() == "step-12\n" and keeper(saved).steps() == [4, 8, 12]


@pytest.mark.parametrize("inside", [False, True])
def test_a_directory_in_place_of_the_pointer_is_kept_aside(saved, inside, caplog):
    def replace():
        (saved / "latest").unlink(missing_ok=True)
        (saved / "latest").mkdir()
        if inside:
            (saved / "latest" / "a").write_text("b")

    replace()
    assert keeper(saved).load(make_trainer().checkpoint_parts()) == 12
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith("latest: Is a directory; continuing from step-12")
    assert (saved / "latest").read_text() == "step-12\n" and (saved / "latest.1" / "a").exists() == inside
    replace()
    keeper(saved, keep=9).save(make_trainer().checkpoint_parts(), 16)
    assert (saved / "latest").read_text() == "step-16\n"
    assert names(saved) == ["latest", "latest.1", "latest.2", *sorted(f"step-{step}" for step in (4, 8, 12, 16))]


def test_a_failed_save_is_told_where_the_pointer_is_unreadable(saved, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    (saved / "latest").write_text("nonsense")
    monkeypatch.setattr(Checkpointer, "_publish", full)
    with pytest.raises(CheckpointError, match="(?s)step 16 could not be written .*No space left.*, not 'nonsense'"):
        keeper(saved).save(make_trainer().checkpoint_parts(), 16)


def test_nothing_partial_is_left_of_a_file_that_cannot_be_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    for shared in (False, True):
        with pytest.raises(IsADirectoryError, match=f"{tmp_path}/a"):
            write_whole(tmp_path / "a", b"b", shared=shared)
    assert names(tmp_path) == ["a"]


def test_a_lost_pointer_and_a_damaged_newest(saved):
    (saved / "latest").unlink()
    invert(shards(saved / "step-12")[0])
    assert keeper(saved).load(make_trainer().checkpoint_parts()) == 8


def test_a_pointer_without_any_checkpoint_is_an_error(saved):
    for step in (4, 8, 12):
        (saved / f"step-{step}").rename(saved / f"elsewhere-{step}")
    with pytest.raises(CheckpointError, match=r"latest names step-12, which does not exist; checkpoints there: \[\]"):
        keeper(saved).load(make_trainer().checkpoint_parts())


def test_one_is_chosen_by_its_step(saved, trained):
    read = make_trainer()
    assert keeper(saved).load(read.checkpoint_parts(), step=4) == 4 and same(bits(read), bits(trained[4]))
    with pytest.raises(CheckpointError, match=r"has no step-5; checkpoints there: \[4, 8, 12\]"):
        keeper(saved).load(read.checkpoint_parts(), step=5)
    invert(shards(saved / "step-8")[0])
    with pytest.raises(CheckpointError, match=r"step-8 is damaged.*; checkpoints there: \[4, 8, 12\]"):
        keeper(saved).load(read.checkpoint_parts(), step=8)
    assert keeper(saved).steps() == [4, 8, 12]


def test_a_folder_that_cannot_be_read_is_no_empty_one(saved, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    saver = keeper(saved)
    monkeypatch.setattr("os.listdir", refused)
    with pytest.raises(CheckpointError, match="cannot read the checkpoints in .*: Permission denied"):
        saver.load(make_trainer().checkpoint_parts())


def test_everything_is_on_disk_before_the_pointer_names_it(tmp_path, monkeypatch):
    saver, events = keeper(tmp_path), []
    rename = Path.rename
    record(monkeypatch, events)
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append(f"rename {to.name}"), rename(path, to))[1])
    saver.save(make_trainer().checkpoint_parts(), 4)
    assert events == [
        *("sync __0_0.distcp", "sync .metadata.tmp", "rename .metadata"),
        *("sync manifest.json.partial", "replace manifest.json", "sync .tmp-step-4"),
        *("rename step-4", f"sync {tmp_path.name}"),
        *("sync latest.partial", "replace latest", f"sync {tmp_path.name}"),
    ]


def test_steps_that_are_kept(tmp_path):
    saver = keeper(tmp_path, keep=1, kept=[6])
    assert [step for step in range(1, 13) if saver.due(step)] == [4, 6, 8, 12]
    for step in (4, 6, 8, 12):
        saver.save(make_trainer().checkpoint_parts(), step)
    assert saver.steps() == [6, 12]
