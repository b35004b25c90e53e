"""However text is stored, the same documents come out, from whichever place reading begins."""

import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from lowprec_train.data import columns, finding
from lowprec_train.data.documents import TextFiles
from lowprec_train.data.records import Bad, Damaged, Document

TEXTS = [f"text {i} é\n\u2028" + "x" * (i % 40) for i in range(300)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def zst(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def stored(root: Path, form: str) -> Path:
    """TEXTS under `root`; returns what a user would name."""
    if form == "parquet":
        path = root / "a.parquet"
        parquet.write_table(pyarrow.table({"text": TEXTS, "id": range(300)}), path, row_group_size=70)
        return path
    content = {"": LINES, ".gz": gzip.compress(LINES), ".xz": lzma.compress(LINES), ".zst": zst(LINES)}[
        form.removesuffix(".parts")
    ]
    path = root / f"a.jsonl{form.removesuffix('.parts')}"
    if not form.endswith(".parts"):
        path.write_bytes(content)
        return path
    cuts = [0, len(content) // 3, len(content) // 3 + 1, len(content)]
    for number in range(3):
        path.with_name(f"{path.name}.{number:02d}").write_bytes(content[cuts[number] : cuts[number + 1]])
    return path.with_name(f"{path.name}.01")


FORMS = ["", ".gz", ".xz", ".zst", ".parts", ".gz.parts", ".xz.parts", ".zst.parts", "parquet"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same(tmp_path, form):
    path = stored(tmp_path, form)
    assert [document.text for document in TextFiles(str(path))] == TEXTS
    assert [document.text for document in TextFiles([str(tmp_path)])] == TEXTS
    names = [document.name for document in TextFiles(str(path))]
    file = "a.parquet" if form == "parquet" else f"a.jsonl{form.removesuffix('.parts')}"
    assert names == [f"{file}:{i + 1}" for i in range(300)]


@pytest.mark.parametrize("form", FORMS)
def test_reading_begins_where_a_segment_ended(tmp_path, form):
    """From every place, the rest: documents, numbers, and at the end all stored bytes read."""
    (source,) = finding.find([stored(tmp_path, form)])
    whole = [(list(segment.documents("text")), place) for segment, place, _ in source.segments("text", size=900)]
    assert len(whole) > 3
    for number, (_, place) in enumerate(whole):
        rest = [*source.segments("text", place, 700)]
        found = [document for segment, _, _ in rest for document in segment.documents("text")]
        assert found == [document for documents, _ in whole[number + 1 :] for document in documents]
        assert not rest or rest[-1][2] == source.size
    assert [*source.segments("text", whole[-1][1])] == []


def test_txt_is_one_document_however_it_is_packed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three\n"))
    (tmp_path / "c.txt.zst").write_bytes(zst("é".encode()))
    (tmp_path / "d.md").write_text("# four\n")
    (tmp_path / "e.md.xz").write_bytes(lzma.compress(b"five") + lzma.compress(b" and six"))
    expected = [Document("a.txt", "one\r\ntwo\n"), Document("b.txt.gz", "three\n"), Document("c.txt.zst", "é")]
    expected += [Document("d.md", "# four\n"), Document("e.md.xz", "five and six")]
    assert list(TextFiles(str(tmp_path))) == expected
    (source,) = finding.find([tmp_path / "a.txt"])
    ((segment, place, read),) = source.segments("text", size=2)
    assert (segment.size, place.offset, read) == (9, 9, 9)
    assert [*source.segments("text", place)] == []


def test_last_line_without_an_end_and_blank_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "one"}\r\n  \n{"text": "two"}')
    assert list(TextFiles(str(tmp_path))) == [Document("a.jsonl:2", "one"), Document("a.jsonl:4", "two")]


def test_digest_is_of_the_whole_not_of_its_parts(tmp_path):
    for form in ("", ".parts"):
        (tmp_path / f"as{form}").mkdir()
    digests = {TextFiles(str(stored(tmp_path / f"as{form}", form))).digest() for form in ("", ".parts")}
    assert len(digests) == 1


def test_bad_rows(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["one", None], "n": [1, 2]}), tmp_path / "a.parquet")
    (source,) = finding.find([tmp_path])
    ((segment, _, _),) = source.segments("text")
    good, bad = segment.documents("text")
    assert good == Document("a.parquet:1", "one")
    assert isinstance(bad, Bad) and bad.reason.startswith(f"{tmp_path}/a.parquet:2: no text in field 'text'")
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'body'; the file holds \['text', 'n'\]"):
        TextFiles(str(tmp_path), "body")
    (tmp_path / "a.parquet").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"a\.parquet: not a \.parquet file"):
        TextFiles(str(tmp_path))


@pytest.mark.parametrize("form", [".gz", ".xz", ".zst", ".zst.parts"])
def test_streams_that_are_cut_off(tmp_path, form):
    path = stored(tmp_path, form)
    if form.endswith(".parts"):
        path.with_name("a.jsonl.zst.02").unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.\w+: cannot be read to its end: "):
        list(TextFiles(str(path)))


@pytest.mark.parametrize("form", ["", ".gz", ".xz", ".zst", "parquet"])
def test_what_comes_before_damage_is_kept(tmp_path, form, caplog):
    """The same records whatever the size of segments and wherever reading began; the damage counts once."""
    path = stored(tmp_path, form)
    content = bytearray(path.read_bytes())
    if form == "parquet":
        content[2500:4000] = b"\xff" * 1500
    if form == ".zst":  # a block is unpacked whole or not at all
        content = zst(LINES[:9000]) + zst(LINES[9000:])
    path.write_bytes(content[: len(content) * 9 // 10] if form not in ("", "parquet") else content)
    if form == "":  # a plain file is never too short: only its last line is no record
        path.write_bytes(content[:-9])
    files = TextFiles(str(path), skip_bad=True)
    kept = [document.text for document in files]
    assert kept == TEXTS[: len(kept)] and 0 < len(kept) < 300 and files.bad == 1
    assert (form == "") or f"the rest of this file is left out: {path}: cannot be read" in caplog.text
    (source,) = finding.find([path])
    for size in (1, 900, 1 << 20):
        found, places = [], []
        try:
            for segment, place, _ in source.segments("text", size=size):
                found += [each.text for each in segment.documents("text") if isinstance(each, Document)]
                places.append(place)
            assert form == ""
        except Damaged:
            assert form != ""
        assert found == kept
    with pytest.raises(ValueError, match="; --skip-bad leaves out what cannot be read"):
        list(TextFiles(str(path)))


def test_parts_that_are_missing(tmp_path):
    path = stored(tmp_path, ".parts")
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl: some of its parts are missing: there are \[0, 2\]"):
        finding.find([tmp_path])
    path.with_name("a.jsonl.00").unlink()
    with pytest.raises(ValueError, match=r"missing: there are \[2\]"):
        finding.find([tmp_path])


@pytest.mark.parametrize("fault", ["page", "arrow", "open"])
def test_parquet_that_is_damaged(tmp_path, monkeypatch, fault):
    """Errors of the library, which names neither file nor row: of a page, of a kind it cannot read, of the footer."""
    path = stored(tmp_path, "parquet")
    content, unknown = bytearray(path.read_bytes()), pyarrow.ArrowNotImplementedError("no such type")
    if fault == "arrow":
        monkeypatch.setattr(columns.Column, "_batches", lambda *_: (_ for _ in ()).throw(unknown))
    bad = {"page": slice(2500, 4000), "arrow": slice(0), "open": slice(len(content) - 600, len(content) - 8)}[fault]
    content[bad] = b"\xff" * len(content[bad])
    path.write_bytes(content)
    said = {"page": "cannot be read past row [1-9]", "arrow": "past row 0: no such type", "open": "not a .parquet file"}
    with pytest.raises(ValueError, match=rf"{path}: .*{said[fault]}"):
        list(finding.find([path])[0].segments("text", size=900))


def test_no_document_twice_and_none_dropped(tmp_path):
    for name in ("z.jsonl", "z.jsonl.00"):
        (tmp_path / name).write_bytes(LINES)
    whole, part = tmp_path / "z.jsonl", tmp_path / "z.jsonl.00"
    for named in ([tmp_path], [whole, part], [part, whole]):
        with pytest.raises(ValueError, match=r"z\.jsonl: exists whole and in parts; name one of the two"):
            finding.find(named)
    assert [finding.find([path])[0].paths for path in (whole, part)] == [(whole,), (part,)]
    whole.unlink()
    for name in ("y.txt.0", "y.txt.1", "y.txt.01"):
        (tmp_path / name).write_text(name)
    with pytest.raises(ValueError, match=r"y\.txt: part 1 exists twice: y\.txt\.01 and y\.txt\.1"):
        finding.find([tmp_path])


def test_parquet_is_not_read_in_parts(tmp_path):
    """Least of all from another file that has the name which the parts share."""
    whole = stored(tmp_path, "parquet")
    content = whole.read_bytes()
    for number, half in enumerate((content[:100], content[100:])):
        (tmp_path / f"a.parquet.{number}").write_bytes(half)
    for named in (tmp_path / "a.parquet.0", tmp_path):
        with pytest.raises(ValueError, match=r"a\.parquet\.0: \.parquet files are not read in parts"):
            finding.find([named])
    assert len(finding.find([whole])) == 1


def test_names(tmp_path):
    path = stored(tmp_path, ".parts")
    parts = [path.with_name(f"a.jsonl.{number:02d}") for number in range(3)]
    assert finding.find(parts) == finding.find(parts[1:2])
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=r"b\.txt: named twice"):
        finding.find([tmp_path / "b.txt", tmp_path])
    with pytest.raises(ValueError, match=r"b\.txt: named twice"):
        finding.find([tmp_path / "b.txt", tmp_path / ".." / tmp_path.name / "b.txt"])
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"b\.txt: named twice"):
        finding.find([tmp_path / "b.txt", tmp_path / "link" / "b.txt"])
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "b.txt").write_text("another")
    (tmp_path / "inside").symlink_to(tmp_path / "elsewhere" / "deep")
    assert len(finding.find([tmp_path / "b.txt", tmp_path / "inside" / ".." / "b.txt"])) == 2
