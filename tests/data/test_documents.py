"""What counts as text, in which order, and what is said when it cannot be read."""

import sys
import sysconfig
from pathlib import Path

import pytest

from lowprec_train.data.documents import Document, PythonSources, TextFiles


def put(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def test_python_sources(tmp_path):
    kept = {"b.py": "b\n", "a/z.py": "z\r\n", "a/b.py": "é\n", "a.py": "", "lib2to3/main.py": "m"}
    dropped = {
        "test/a.py": "t",
        "a/tests/a.py": "t",
        "site-packages/numpy.py": "n",
        "idlelib/idle_test/a.py": "t",
        "__pycache__/a.py": "c",
        "config-3.11-x86_64-linux-gnu/python-config.py": "c",
        "_sysconfigdata__linux_.py": "s",
        "data.txt": "d",
        "latin.py": "# é".encode("latin-1"),
    }
    root = put(tmp_path, kept | dropped)
    expected = [Document(name, kept[name]) for name in ("a/b.py", "a/z.py", "a.py", "b.py", "lib2to3/main.py")]
    assert list(PythonSources(root)) == expected


def test_standard_library():
    names = [document.name for document in PythonSources()]
    assert len(names) > 500 and "argparse.py" in names and "asyncio/base_events.py" in names
    assert not [name for name in names if "test" in Path(name).parts or "site-packages" in name]
    assert [*PythonSources()] == [*PythonSources(sysconfig.get_path("stdlib"))]


def test_no_python_sources(tmp_path):
    with pytest.raises(ValueError, match=r"absent: no such directory"):
        PythonSources(tmp_path / "absent")
    put(tmp_path, {"tests/a.py": "t", "a.txt": "t"})
    with pytest.raises(ValueError, match=rf"empty corpus: {tmp_path} holds no \.py files"):
        PythonSources(tmp_path)


def test_text_files(tmp_path):
    root = put(
        tmp_path,
        {
            "b/two.txt": "second\r\nfile",
            "a.jsonl": '{"text": "one\\n", "id": 1}\n\n{"text": "two\u2028still", "body": "b"}\n',
            "ignored.csv": "x",
        },
    )
    expected = [
        Document("a.jsonl:1", "one\n"),
        Document("a.jsonl:3", "two\u2028still"),
        Document("b/two.txt", "second\r\nfile"),
    ]
    assert list(TextFiles(str(root))) == expected
    listed = TextFiles([str(root / "b" / "two.txt"), str(root / "a.jsonl")])
    assert [document.text for document in listed] == ["second\r\nfile", "one\n", "two\u2028still"]
    assert [d.text for d in TextFiles(str(put(tmp_path / "other", {"c.jsonl": '{"body": "b"}'})), "body")] == ["b"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    put(tmp_path, {"a.txt": mark + b"one", "b.jsonl": mark + b'{"text": "two"}\n{"text": "\\ufeffthree"}\n'})
    assert [document.text for document in TextFiles(str(tmp_path))] == ["one", "two", "\ufeffthree"]


def test_a_number_that_is_too_long_for_an_integer(tmp_path):
    put(tmp_path, {"a.jsonl": '{"text": "one", "n": %s}\n' % ("7" * 5000)})
    assert [document.text for document in TextFiles(str(tmp_path))] == ["one"]


def test_digest_names_content_not_place(tmp_path):
    first = put(tmp_path / "one", {"a.txt": "ab", "b.txt": "c"})
    same = put(tmp_path / "two", {"a.txt": "ab", "b.txt": "c"})
    moved = put(tmp_path / "three", {"a.txt": "a", "b.txt": "bc"})
    renamed = put(tmp_path / "four", {"a.txt": "ab", "c.txt": "c"})
    digests = [TextFiles(str(root)).digest() for root in (first, same, moved, renamed)]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert TextFiles(str(first), "body").digest() != digests[0]
    put(first, {"m.py": "1"}), put(same, {"m.py": "1"}), put(moved, {"m.py": "2"})
    sources = [PythonSources(root).digest() for root in (first, same, moved)]
    assert sources[0] == sources[1] != sources[2]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"empty corpus: .* holds no file that ends in \.txt, \.md or \.jsonl"),
        ({"a.csv": "x"}, r"empty corpus: .* holds no file"),
        ({"a.jsonl": '{"text": "x"}\n{"text"\n'}, r"a\.jsonl:2: not JSON"),
        (
            {"a.jsonl": '{"body": "x", "id": 1}\n'},
            r"a\.jsonl:1: no text in field 'text'; the record holds \['body', 'id'\]",
        ),
        ({"a.jsonl": '{"text": 5}\n'}, r"a\.jsonl:1: no text in field 'text'"),
        ({"a.jsonl": "[1]\n"}, r"a\.jsonl:1: no text in field 'text'; the record holds list"),
        ({"a.jsonl": '{"text": "x \\ud800"}\n'}, r"a\.jsonl:1: not Unicode text"),
        ({"a.txt": b"\xff\xfe"}, r"a\.txt: not UTF-8"),
    ],
)
def test_text_that_cannot_be_read(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        list(TextFiles(str(put(tmp_path, files))))


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"absent: no such file or directory of text"):
        TextFiles(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"a\.csv: not a text file that can be read: it must end in \.txt, \.md"):
        TextFiles(str(put(tmp_path, {"a.csv": "x"}) / "a.csv"))
    with pytest.raises(ValueError, match=r"empty corpus: no files in \[\]"):
        TextFiles([])


def test_zst_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"reading .*a\.jsonl\.zst needs the package 'pyarrow': pip install 'lowprec_train\[data\]'"
    ):
        list(TextFiles(str(put(tmp_path, {"a.jsonl.zst": b"x"}))))


def test_zst(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for name, content in (("a.jsonl.zst", b'{"text": "one"}\n'), ("b.txt.zst", "é".encode())):
        with pyarrow.output_stream(str(tmp_path / name), compression="zstd") as file:
            file.write(content)
    assert list(TextFiles(str(tmp_path))) == [Document("a.jsonl.zst:1", "one"), Document("b.txt.zst", "é")]


def test_skipped_files_are_named(tmp_path, caplog):
    for name in ("a.txt", "notes.rst", "more/b.csv", ".hidden/c.csv", *(f"x{n}.bin" for n in range(5))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text")
    assert len(list(TextFiles(str(tmp_path)))) == 1
    (told,) = caplog.messages
    assert f"{tmp_path}: skipped" in told and "7 others (more/b.csv, notes.rst, x0.bin, x1.bin, x2.bin, ...)" in told
    assert "hidden" not in told


def test_sources_that_are_not_utf8_are_named_once(tmp_path, caplog):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_bytes(b"# caf\xe9\n")
    sources = PythonSources(tmp_path)
    assert [document.name for _ in range(2) for document in sources] == ["a.py", "a.py"]
    assert caplog.messages == [f"warning: {tmp_path / 'b.py'}: skipped: it is not UTF-8"]
