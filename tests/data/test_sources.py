"""However text is stored, the same documents come out, from whichever place reading begins."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from lowprec_train.data import sources
from lowprec_train.data.documents import TextFiles
from lowprec_train.data.records import Bad, Document

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
    content = {"": LINES, ".gz": gzip.compress(LINES), ".zst": zst(LINES)}[form.removesuffix(".parts")]
    path = root / f"a.jsonl{form.removesuffix('.parts')}"
    if not form.endswith(".parts"):
        path.write_bytes(content)
        return path
    cuts = [0, len(content) // 3, len(content) // 3 + 1, len(content)]
    for number in range(3):
        path.with_name(f"{path.name}.{number:02d}").write_bytes(content[cuts[number] : cuts[number + 1]])
    return path.with_name(f"{path.name}.01")


FORMS = ["", ".gz", ".zst", ".parts", ".gz.parts", ".zst.parts", "parquet"]


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
    (source,) = sources.find([stored(tmp_path, form)])
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
    expected = [Document("a.txt", "one\r\ntwo\n"), Document("b.txt.gz", "three\n"), Document("c.txt.zst", "é")]
    assert list(TextFiles(str(tmp_path))) == expected
    (source,) = sources.find([tmp_path / "a.txt"])
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
    (source,) = sources.find([tmp_path])
    ((segment, _, _),) = source.segments("text")
    good, bad = segment.documents("text")
    assert good == Document("a.parquet:1", "one")
    assert isinstance(bad, Bad) and bad.reason.startswith(f"{tmp_path}/a.parquet:2: no text in field 'text'")
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'body'; the file holds \['text', 'n'\]"):
        TextFiles(str(tmp_path), "body")
    (tmp_path / "a.parquet").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"a\.parquet: not a \.parquet file"):
        TextFiles(str(tmp_path))


@pytest.mark.parametrize("form", [".gz", ".zst", ".zst.parts"])
def test_streams_that_are_cut_off(tmp_path, form):
    path = stored(tmp_path, form)
    if form.endswith(".parts"):
        path.with_name("a.jsonl.zst.02").unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.\w+: cannot be read to its end: "):
        list(TextFiles(str(path)))


def test_parts_that_are_missing(tmp_path):
    path = stored(tmp_path, ".parts")
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl: cut into parts, of which some are missing: there are \[0, 2\]"):
        sources.find([tmp_path])
    path.with_name("a.jsonl.00").unlink()
    with pytest.raises(ValueError, match=r"missing: there are \[2\]"):
        sources.find([tmp_path])


@pytest.mark.parametrize("fault", ["page", "arrow", "open"])
def test_parquet_that_is_damaged(tmp_path, monkeypatch, fault):
    """Errors of the library, which names neither file nor row: of a page, of a kind it cannot read, of the footer."""
    path = stored(tmp_path, "parquet")
    content, unknown = bytearray(path.read_bytes()), pyarrow.ArrowNotImplementedError("no such type")
    if fault == "arrow":
        monkeypatch.setattr(sources, "_batches", lambda *_: (_ for _ in ()).throw(unknown))
    bad = {"page": slice(2500, 4000), "arrow": slice(0), "open": slice(len(content) - 600, len(content) - 8)}[fault]
    content[bad] = b"\xff" * len(content[bad])
    path.write_bytes(content)
    said = {"page": "cannot be read past row [1-9]", "arrow": "past row 0: no such type", "open": "not a .parquet file"}
    with pytest.raises(ValueError, match=rf"{path}: .*{said[fault]}"):
        list(sources.find([path])[0].segments("text", size=900))


def test_no_document_twice_and_none_dropped(tmp_path):
    for name in ("z.jsonl", "z.jsonl.00"):
        (tmp_path / name).write_bytes(LINES)
    whole, part = tmp_path / "z.jsonl", tmp_path / "z.jsonl.00"
    for named in ([tmp_path], [whole, part], [part, whole]):
        with pytest.raises(ValueError, match=r"z\.jsonl: there whole and in parts; name one of the two"):
            sources.find(named)
    assert [sources.find([path])[0].paths for path in (whole, part)] == [(whole,), (part,)]
    whole.unlink()
    for name in ("y.txt.0", "y.txt.1", "y.txt.01"):
        (tmp_path / name).write_text(name)
    with pytest.raises(ValueError, match=r"y\.txt: part 1 is there twice: y\.txt\.01 and y\.txt\.1"):
        sources.find([tmp_path])


def test_parquet_is_not_read_in_parts(tmp_path):
    """Least of all from another file that has the name which the parts share."""
    whole = stored(tmp_path, "parquet")
    content = whole.read_bytes()
    for number, half in enumerate((content[:100], content[100:])):
        (tmp_path / f"a.parquet.{number}").write_bytes(half)
    for named in (tmp_path / "a.parquet.0", tmp_path):
        with pytest.raises(ValueError, match=r"a\.parquet\.0: \.parquet files are not read in parts"):
            sources.find([named])
    assert len(sources.find([whole])) == 1


def test_names(tmp_path):
    path = stored(tmp_path, ".parts")
    parts = [path.with_name(f"a.jsonl.{number:02d}") for number in range(3)]
    assert sources.find(parts) == sources.find(parts[1:2])
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=r"b\.txt: named twice"):
        sources.find([tmp_path / "b.txt", tmp_path])
