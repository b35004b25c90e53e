"""Long documents and damaged files in a prepared set: as if they were short, or as if the damage were the end."""

import itertools
import json
import lzma
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowprec_train.data import appending, cuts, finding, sources, tokenising
from lowprec_train.data.indexed import IndexedDataset
from lowprec_train.data.manifest import Manifest
from lowprec_train.data.tokenising import prepare
from tests.data.prepared import Killed, job


@pytest.fixture
def long_text(root, tmp_path, monkeypatch) -> Path:
    """One document of 30 pieces between two short ones, each a file."""
    monkeypatch.setattr(cuts, "PIECE", 1000)
    monkeypatch.setattr(sources, "PIECE", 1000)
    lines = [json.loads(line)["text"] for line in (root / "text" / "a.jsonl").read_text().splitlines()]
    (tmp_path / "long").mkdir()
    for name, text in (("a.txt", lines[1]), ("b.md", "\n".join(lines) + "é"), ("c.txt", lines[2])):
        (tmp_path / "long" / name).write_text(text)
    return tmp_path / "long"


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_document(root, long_text, place, packed):
    """Read and tokenised in pieces, in chunks of any size, it is what it is as a whole."""
    texts = [path.read_text() for path in sorted(long_text.iterdir())]
    if packed:
        (long_text / "b.md.xz").write_bytes(lzma.compress((long_text / "b.md").read_bytes()))
        (long_text / "b.md").unlink()
    inputs = finding.find([long_text])
    tokenizer = job(root).tokenizer
    expected = [[*ids, tokenizer.eod] for ids in tokenizer.encode(texts)]
    for chunk in (1, 2500, 1 << 20):
        prefix = place.parent / f"{chunk}"
        manifest = prepare(job(root, inputs=inputs, chunk=chunk), prefix)
        assert [ids.tolist() for ids in IndexedDataset(prefix)] == expected
        assert (manifest.documents, manifest.inexact_cuts) == (3, 0)
        assert manifest.text_bytes == sum(len(text.encode()) for text in texts)
    assert len(texts[1]) > 20_000


def test_killed_inside_of_a_long_document(root, long_text, place, monkeypatch):
    """After every chunk; what was appended and not committed is done again."""
    monkeypatch.setattr(tokenising, "time", SimpleNamespace(monotonic=itertools.count(step=0.4).__next__))
    inputs, launches = finding.find([long_text]), [0]

    def report(counts) -> None:
        launches.append(counts.tokens)
        if len(launches) % 5 == 0:
            raise Killed

    prepare(job(root, inputs=inputs), place.parent / "straight")
    while not Manifest.read(place):
        try:
            prepare(job(root, inputs=inputs), place, report)
        except Killed:
            with open(appending.unfinished(place) / "bin", "ab") as file:
                file.write(b"torn")
    assert len(launches) > 15 and launches != sorted(launches)
    for ending in ("bin", "idx", "manifest.json"):
        assert Path(f"{place}.{ending}").read_bytes() == (place.parent / f"straight.{ending}").read_bytes()


@pytest.mark.parametrize("fault", ["bytes", "end", "stream"])
def test_a_long_document_that_is_damaged(root, long_text, place, fault):
    """No piece of it gets into the set: it is looked at to its end first."""
    path = long_text / "b.md"
    content = path.read_bytes()
    if fault == "stream":
        path.unlink()
        path = long_text / "b.md.xz"
        path.write_bytes(lzma.compress(content)[:-30])
    else:
        path.write_bytes(content[:-1] if fault == "end" else content[:5000] + b"\xff" + content[5000:])
    said = {
        "bytes": r"not UTF-8: .* in position 5000",
        "end": r"ends inside of a character",
        "stream": "cannot be read",
    }
    inputs = finding.find([long_text])
    with pytest.raises(ValueError, match=rf"{path.name}: .*{said[fault]}.*; --skip-bad leaves out"):
        prepare(job(root, inputs=inputs), place)
    manifest = prepare(job(root, inputs=inputs, skip_bad=True), place)
    assert (manifest.documents, manifest.bad) == (2, 1)


def test_long_lines_too(root, long_text, place):
    """A line of .jsonl is read whole, and tokenised in pieces."""
    text = (long_text / "b.md").read_text()
    (long_text / "d.jsonl").write_text(json.dumps({"text": text}) + "\n")
    prepare(job(root, inputs=finding.find([long_text / "d.jsonl"])), place)
    tokenizer = job(root).tokenizer
    assert IndexedDataset(place).data.tolist() == [*tokenizer.encode([text])[0], tokenizer.eod]


def test_a_byte_order_mark_before_a_long_document(root, long_text, place):
    text = (long_text / "b.md").read_text()
    (long_text / "b.md").write_text(text, encoding="utf-8-sig")
    prepare(job(root, inputs=finding.find([long_text / "b.md"]), chunk=2500), place)
    tokenizer = job(root).tokenizer
    assert IndexedDataset(place).data.tolist() == [*tokenizer.encode([text])[0], tokenizer.eod]


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_over_the_limit(root, tmp_path, place, packed):
    """Is an error with its number, before it is read, also under --skip-bad, for it is whole."""
    lines = [json.dumps({"text": "a word " * count}).encode() + b"\n" for count in (3, 5, 900, 2)]
    content, path = b"".join(lines), tmp_path / ("in.jsonl.xz" if packed else "in.jsonl")
    path.write_bytes(lzma.compress(content) if packed else content)
    inputs, longest = finding.find([path]), len(lines[2])
    for skip_bad in (False, True):
        short = job(root, inputs=inputs, chunk=8, longest_line=longest - 100, skip_bad=skip_bad, workers=0)
        said = rf"in.jsonl(.xz)?:3: a line of more than {longest - 100:,} bytes.*raise the limit with --max-line-mib"
        with pytest.raises(ValueError, match=said):
            prepare(short, place)
    assert prepare(job(root, inputs=inputs, chunk=8, longest_line=longest), place.parent / "long").documents == 4


def test_files_that_are_damaged_or_empty(root, tmp_path, place, caplog):
    """With skip_bad each counts once, is named, and an interruption changes nothing."""
    lines = (root / "text" / "a.jsonl").read_bytes()
    (tmp_path / "in").mkdir()
    for name, content in {
        "a.jsonl.xz": lzma.compress(lines)[:-3000],
        "b.parquet": b"PAR1 none",
        "c.txt": b"caf\xe9",
        "d.txt": b"",
        "e.jsonl": b"",
        "f.jsonl.gz": b"",
        "g.jsonl": lines[:500].rpartition(b"\n")[0] + b"\n{broken\n",
    }.items():
        (tmp_path / "in" / name).write_bytes(content)
    inputs = finding.find([tmp_path / "in"])
    for source in inputs:
        if source.name[0] not in "de":
            with pytest.raises(ValueError, match=rf"{source.name}.*; --skip-bad leaves out what cannot be read"):
                prepare(job(root, inputs=[source]), place.parent / source.name[0])
    manifest = prepare(job(root, inputs=inputs, skip_bad=True), place)
    assert manifest.bad == 5 and manifest.documents > 100
    for name in ("a.jsonl.xz", "b.parquet", "f.jsonl.gz"):
        assert f"the rest of this file is left out: {tmp_path}/in/{name}: " in caplog.text

    def report(counts) -> None:
        if counts.documents and counts.documents not in seen:
            seen.add(counts.documents)
            raise Killed

    seen: set[int] = set()
    again = place.parent / "again"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenising, "_COMMIT_SECONDS", 0)
        while not Manifest.read(again):
            with suppress(Killed):
                prepare(job(root, inputs=inputs, skip_bad=True), again, report)
    assert Manifest.read(again) == manifest and len(seen) > 5
