"""Prepared data is a function of its input: not of the number of workers, nor of where and how often it was killed."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lowprec_train.data import appending, finding, tokenising
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.manifest import Manifest, sha256
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenising import prepare
from lowprec_train.data.workers import in_order
from tests.data.indexed_files import write_indexed
from tests.data.prepared import Killed, files, job

ROOT = Path(__file__).parents[2]
KILLED = """
import sys, time
from pathlib import Path
from lowprec_train.data import finding, tokenising
from lowprec_train.data.tokenizer import load
root = Path(sys.argv[1])
tokenising._COMMIT_SECONDS = 0.0
job = tokenising.Job(inputs=finding.find([root / "text"]), tokenizer=load(root), workers=2, chunk=2000)
def report(counts):
    print(counts.documents, flush=True)
    if counts.documents > 200:
        time.sleep(600)  # to be killed here, with chunks in flight
tokenising.prepare(job, root / "killed" / "all", report)
"""


def test_each_document_and_its_end(root, tmp_path):
    """Against the plain way: text by text."""
    lines = [line for name in "ab" for line in (root / "text" / f"{name}.jsonl").read_text().splitlines()]
    texts = [text for line in lines if (text := json.loads(line)["text"])]
    tokenizer = job(root).tokenizer
    write_indexed(tmp_path / "plain", ([*tokenizer.encode([text])[0], tokenizer.eod] for text in texts), np.uint16)
    made = files(root / "once" / "all")
    assert made["all.bin"] == (tmp_path / "plain.bin").read_bytes()
    assert made["all.idx"] == (tmp_path / "plain.idx").read_bytes()
    assert sorted(made) == ["all.bin", "all.idx", "all.manifest.json", "tokenizer.model"]
    manifest = Manifest.read(root / "once" / "all")
    assert (manifest.documents, manifest.empty, manifest.bad) == (len(texts), len(lines) - len(texts), 0)
    assert manifest.text_bytes == sum(len(text.encode()) for text in texts)
    assert manifest.tokens == len(IndexedDataset(root / "once" / "all").data)
    for ending in ("bin", "idx"):
        path = root / "once" / f"all.{ending}"
        assert manifest.files[ending] == {"bytes": path.stat().st_size, "sha256": sha256(path)}
    assert [each["sha256"] for each in manifest.inputs] == [sha256(root / "text" / f"{n}.jsonl") for n in "ab"]


@pytest.mark.parametrize("chunk", [1, 777, 1 << 20])
def test_chunks_do_not_matter(root, place, chunk):
    prepare(job(root, chunk=chunk), place)
    assert files(place) == files(root / "once" / "all")


def test_killed_outright_with_two_workers(root):
    """SIGKILL in the middle: the workers end too, and two others finish with the same bytes."""
    command = [sys.executable, "-c", KILLED, str(root)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while int(process.stdout.readline()) <= 200:
        pass
    workers = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.kill()
    process.communicate(timeout=60)  # to the end of its output, which the workers hold open too: they have ended
    assert len(workers) >= 2
    prefix = root / "killed" / "all"
    state = json.loads((appending.unfinished(prefix) / "state.json").read_text())
    assert (
        0 < state["documents"] < Manifest.read(root / "once" / "all").documents
        and not prefix.with_suffix(".bin").exists()
    )
    first = []
    prepare(job(root, workers=2), prefix, lambda counts: first.append(counts.documents))
    assert first[0] == state["documents"]
    assert files(prefix) == files(root / "once" / "all")


def test_killed_again_and_again(root, place, monkeypatch):
    """Every launch dies five chunks on; a third of the chunks is committed, so work is lost and done again."""
    monkeypatch.setattr(tokenising, "time", SimpleNamespace(monotonic=itertools.count(step=0.4).__next__))
    launches = [0]

    def report(counts) -> None:
        launches.append(counts.documents)
        if len(launches) % 6 == 0:
            raise Killed

    while not Manifest.read(place):
        try:
            prepare(job(root), place, report)
        except Killed:
            with open(appending.unfinished(place) / "bin", "ab") as file:
                file.write(b"torn")  # as a writer that dies in the middle leaves it
    assert len(launches) > 20 and launches != sorted(launches)
    assert files(place) == files(root / "once" / "all")


def interrupt(root, place, monkeypatch):
    """Begin, commit some chunks, and die."""
    monkeypatch.setattr(tokenising, "time", SimpleNamespace(monotonic=itertools.count(step=0.4).__next__))
    calls = itertools.count()

    def report(_) -> None:
        if next(calls) == 8:
            raise Killed

    with pytest.raises(Killed):
        prepare(job(root), place, report)
    return appending.unfinished(place)


@pytest.mark.parametrize("name", ["bin", "lengths"])
def test_an_unfinished_file_that_lost_its_end_is_refused(root, place, monkeypatch, name):
    file = interrupt(root, place, monkeypatch) / name
    state = json.loads((file.parent / "state.json").read_text())
    size = state["documents"] * 4 if name == "lengths" else state["tokens"] * 2
    os.truncate(file, size // 2)
    with pytest.raises(
        ValueError, match=rf"{name} has {size // 2:,} of {size:,} bytes; remove .*all\.unfinished to start"
    ):
        prepare(job(root), place)
    shutil.rmtree(file.parent)
    prepare(job(root), place)
    assert files(place) == files(root / "once" / "all")


@pytest.mark.parametrize(
    ("content", "fault"),
    [("", "it is not JSON"), ("{", "it is not JSON"), ("{}", "it lacks identity"), ("[]", "it is .*, not an object")],
)
def test_a_damaged_state_is_one_error(root, place, monkeypatch, content, fault):
    state = interrupt(root, place, monkeypatch) / "state.json"
    state.write_text(content)
    with pytest.raises(ValueError, match=rf"state\.json: {fault}.*; remove .*all\.unfinished to start again"):
        prepare(job(root), place)


@pytest.mark.parametrize("renames", range(5))
def test_killed_while_files_get_their_names(root, place, monkeypatch, renames):
    real, left = os.replace, itertools.count()

    def replace(*paths) -> None:
        if next(left) == renames + 1:  # the first gives the tokenizer its name
            raise Killed
        real(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        patched.setattr(tokenising, "_COMMIT_SECONDS", 1e9)
        try:
            prepare(job(root), place)
            assert renames == 4  # whole state, .bin, .idx, manifest: there are no more
        except Killed:
            assert not Manifest.read(place)
    prepare(job(root), place)
    assert files(place) == files(root / "once" / "all")


def test_prepared_already(root, place, monkeypatch):
    shutil.copytree(root / "once", place.parent)
    appending.unfinished(place).mkdir()  # killed just before it was removed
    monkeypatch.setattr(tokenising, "_append_all", lambda *_: pytest.fail("prepared again"))
    assert prepare(job(root), place) == Manifest.read(place)
    assert files(place) == files(root / "once" / "all")
    with pytest.raises(ValueError, match=r"all: is prepared already, with other field: text, now body"):
        prepare(job(root, field="body"), place)
    with pytest.raises(ValueError, match=r"all: is prepared already, with other inputs: .*a\.jsonl"):
        prepare(job(root, inputs=finding.find([root / "text" / "b.jsonl"])), place)
    os.truncate(place.with_suffix(".bin"), 10)
    with pytest.raises(ValueError, match=r"all\.bin has 10 bytes, but its manifest says \d+"):
        prepare(job(root), place)
    place.with_suffix(".bin").unlink()
    with pytest.raises(ValueError, match=r"all\.manifest\.json names a missing file: .*all\.bin"):
        prepare(job(root), place)


def test_only_the_same_input_is_gone_on_with(root, place):
    def die(counts) -> None:
        if counts.documents:
            raise Killed

    tokenising_job = job(root)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(tokenising, "_COMMIT_SECONDS", 0)
        prepare(tokenising_job, place, lambda counts: counts.documents > 100 and die(counts))
    with pytest.raises(ValueError, match=r"all\.unfinished was started with other input: field text, now body; remove"):
        prepare(job(root, field="body"), place)
    os.utime(root / "text" / "b.jsonl")
    file = r"b\.jsonl \([\d,]+ bytes of \d{4}-\d\d-\d\d [\d:.]+\)"
    with pytest.raises(ValueError, match=f"started with other input: inputs {file}, now {file}; remove it to start"):
        prepare(job(root), place)


def test_of_many_files_a_few_are_named(root, place, tmp_path):
    """Of two lists, those that are in one of them."""
    lines = (root / "text" / "a.jsonl").read_text().splitlines(keepends=True)
    for number in range(30):
        (tmp_path / f"{number:02}.jsonl").write_text(lines[number])
    every = finding.find([tmp_path])
    prepare(job(root, inputs=every[:20]), place)
    size = every[20].size
    with pytest.raises(ValueError) as error:
        prepare(job(root, inputs=every), place)
    assert f"other inputs: none, now 20.jsonl ({size:,} bytes), 21.jsonl (" in (said := str(error.value))
    assert "24.jsonl (" in said and "25.jsonl" not in said and "19.jsonl" not in said and ", ...; choose" in said
    with pytest.raises(ValueError, match="other inputs: 20 in another order; choose"):
        prepare(job(root, inputs=every[19::-1]), place)


def test_the_manifest_is_of_the_text_that_was_read(root, tmp_path, place):
    path = Path(shutil.copy(root / "text" / "a.jsonl", tmp_path))
    source = finding.find([path])

    def edit(counts) -> None:
        if counts.documents > 100:
            path.write_text(path.read_text().replace("a", "o"))  # of the same length

    with pytest.raises(ValueError, match=r"^a\.jsonl changed while read; remove .*all\.unfinished and start again"):
        prepare(job(root, inputs=source), place, edit)
    assert not place.with_suffix(".bin").exists()
    shutil.rmtree(appending.unfinished(place))
    prepare(job(root, inputs=source), place)
    os.utime(path)
    prepare(job(root, inputs=source), place)  # the same text: done already
    shutil.copy(root / "text" / "a.jsonl", path)
    with pytest.raises(ValueError, match=r"all: is prepared already, from other contents of a\.jsonl; choose another"):
        prepare(job(root, inputs=source), place)


def test_another_tokenizer_in_the_same_place(root, place):
    """Of the same process: what an earlier job read from that path is not what lies there now."""
    prepare(job(root), place)
    shutil.rmtree(place.parent)
    other = SentencePieceTokenizer.train(["aeiounst " * 99], 270, "fewer pieces")
    prepare(job(root, tokenizer=other), place)
    assert max(int(ids.max()) for ids in IndexedDataset(place)) < 270


def test_one_at_a_time_and_nothing_foreign_is_overwritten(root, place):
    def second(counts) -> None:
        with pytest.raises(ValueError, match=r"all\.unfinished: another process is writing there"):
            prepare(job(root), place)

    prepare(job(root), place, second)
    (place.parent / "all.manifest.json").unlink()
    with pytest.raises(ValueError, match=r"all\.bin exists, without a manifest of this command"):
        prepare(job(root), place)


def test_a_full_disk(root, place):
    """A device that is always full stands in for .bin; with room again the work goes on."""
    appending.unfinished(place).mkdir(parents=True)
    (appending.unfinished(place) / "bin").symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "truncate", lambda path, size: None)
        patched.setattr(tokenising, "_COMMIT_SECONDS", 0)
        with pytest.raises(OSError, match=r"No space left on device: .*all\.unfinished"):
            prepare(job(root), place)
    (appending.unfinished(place) / "bin").unlink()
    prepare(job(root), place)
    assert files(place) == files(root / "once" / "all")


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("all.unfinished/state.json.partial", "all.unfinished/state.json"),
        ("all.unfinished/idx", "all.unfinished/idx"),
        ("all.manifest.json.partial", "all.manifest.json"),
    ],
)
def test_a_full_disk_at_the_end(root, place, written, named):
    appending.unfinished(place).mkdir(parents=True)
    (place.parent / written).symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{place.parent}/{named}'"):
        prepare(job(root), place)
    (place.parent / written).unlink(missing_ok=True)
    prepare(job(root), place)
    assert files(place) == files(root / "once" / "all")


def test_bad_records(root, tmp_path, place):
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"text": 5}\nno\n{"text": ""}\n{"text": "two"}\n')
    inputs = finding.find([tmp_path / "bad.jsonl"])
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: no text in field 'text'"):
        prepare(job(root, inputs=inputs), place)
    manifest = prepare(job(root, inputs=inputs, skip_bad=True), place)
    assert (manifest.documents, manifest.empty, manifest.bad) == (2, 1, 2)
    tokenizer = job(root).tokenizer
    assert [tokenizer.decode(ids.tolist()[:-1]) for ids in IndexedDataset(place)] == ["one", "two"]


def end(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_worker_that_dies(root):
    seen = []
    with pytest.raises(OSError, match="a worker process died"):
        seen += in_order(end, range(50), 1)
    assert list(in_order(end, iter([5, 4, 1]), 0)) == [5, 4, 1]
    with pytest.raises(ValueError, match="workers -1 must not be negative"):
        job(root, workers=-1)
