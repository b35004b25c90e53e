"""Text and tokens that cannot be trained on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.bad_inputs.case import case


def a(name: str, content: str | bytes):
    def make(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def lines(*records: object, good: int = 3):
    """x.jsonl: good documents, then these records."""
    whole = [*({"text": f"def loss_{n}(x): return x * {n}"} for n in range(good)), *records]
    return a("x.jsonl", "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in whole))


def zst(cut: int):
    def make(place: Path) -> None:
        import pyarrow

        packed = pyarrow.compress((place / "lines.jsonl").read_bytes(), codec="zstd", asbytes=True)
        (place / "x.jsonl.zst").write_bytes(packed[: len(packed) - cut])

    return make


def gz(place: Path) -> None:
    packed = gzip.compress((place / "lines.jsonl").read_bytes())
    (place / "x.jsonl.gz").write_bytes(packed[: len(packed) // 2])


def parquet(place: Path) -> None:
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"body": ["a text", "another"]}), place / "x.parquet")


def numbers(place: Path) -> None:
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"text": [1, 2]}), place / "x.parquet")


def spoiled(name: str, content: bytes):
    def make(place: Path) -> None:
        (place / name).write_bytes(content)

    return make


def without(*names: str):
    def make(place: Path) -> None:
        for name in names:
            (place / name).unlink()

    return make


def no_manifest(place: Path) -> None:
    (place / "sets" / "lines.manifest.json").unlink()


def cut_bin(place: Path) -> None:
    no_manifest(place)
    file = place / "sets" / "lines.bin"
    file.write_bytes(file.read_bytes()[:100])


def cut_idx(place: Path) -> None:
    no_manifest(place)
    file = place / "sets" / "lines.idx"
    file.write_bytes(file.read_bytes()[:40])


def wrong_dtype(place: Path) -> None:
    """Byte 17 of an index is the code of the tokens' type."""
    no_manifest(place)
    file = place / "sets" / "lines.idx"
    content = bytearray(file.read_bytes())
    content[17] = 99
    file.write_bytes(content)


def large_token(place: Path) -> None:
    no_manifest(place)
    file = place / "sets" / "lines.bin"
    file.write_bytes(b"\xff\xff" * (file.stat().st_size // 2))


def manifest(**changes: object):
    def make(place: Path) -> None:
        file = place / "sets" / "lines.manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return make


ON_X = "train-text data.train=x.jsonl data.valid_fraction=0.3"
ON_LINES = "train-set data.train=sets/lines data.split=[8,2,0]"

CASES = (
    case("text-not-given", "train-text", "data.train"),
    case("text-absent", "train-text data.train=nowhere.jsonl", "nowhere.jsonl"),
    case("text-absent-under-defaults", "train-as-given data=text data.train=nowhere.txt", "nowhere.txt"),
    case("text-null", "train-text data.train=null", "data.train"),
    case("text-a-number", "train-text data.train=7", "data.train", "7"),
    case("text-an-empty-list", "train-text data.train=[]", "[]"),
    case("text-empty-name", "train-text 'data.train=\"\"'", "named in ''"),
    case("text-of-another-kind", "train-text data.train=x.csv", "x.csv", ".jsonl", make=a("x.csv", "a,b\n")),
    case("text-empty", ON_X, "x.jsonl", "empty", make=a("x.jsonl", "")),
    case("text-empty-txt", "train-text data.train=x.txt", "x.txt", "empty", make=a("x.txt", "")),
    case("text-whitespace-only", ON_X, "x.jsonl", make=a("x.jsonl", " \n\n \t\n")),
    case("text-whitespace-only-txt", "train-text data.train=x.txt", "x.txt", make=a("x.txt", " \n\n \t\n")),
    case("text-whitespace-records", ON_X, "x.jsonl", make=lines(*[{"text": "  "}] * 9, good=0)),
    case("text-empty-records", ON_X, "x.jsonl", make=lines(*[{"text": ""}] * 9, good=0)),
    case(
        "text-one-document",
        "train-text data.train=x.txt",
        "x.txt",
        "valid",
        make=a("x.txt", "def loss(x): return x\n" * 400),
    ),
    case(
        "text-valid-empty", "train-text data.train=lines.jsonl data.valid_fraction=0.0001", "valid_fraction", "0.0001"
    ),
    case(
        "text-train-empty", "train-text data.train=lines.jsonl data.valid_fraction=0.9999", "valid_fraction", "0.9999"
    ),
    case("text-valid-absent", "train-text data.train=lines.jsonl data.valid=nowhere.jsonl", "nowhere.jsonl"),
    case(
        "text-valid-empty-file",
        "train-text data.train=lines.jsonl data.valid=x.jsonl",
        "x.jsonl",
        make=a("x.jsonl", ""),
    ),
    case(
        "text-valid-too-short",
        "train-text data.train=lines.jsonl data.valid=x.txt",
        "x.txt",
        "valid",
        make=a("x.txt", "ab"),
    ),
    case(
        "text-train-too-short",
        "train-text data.train=x.txt data.valid=valid.jsonl data.tokenizer=tokenizer.model",
        "x.txt",
        make=a("x.txt", "ab"),
    ),
    case(
        "text-not-utf8",
        "train-text data.train=x.txt data.valid=valid.jsonl",
        "x.txt",
        "UTF-8",
        make=a("x.txt", b"abc\xff\xfe def"),
    ),
    case(
        "text-utf16",
        "train-text data.train=x.txt data.valid=valid.jsonl",
        "x.txt",
        "UTF-8",
        make=a("x.txt", "some text".encode("utf-16")),
    ),
    case(
        "text-null-bytes", "train-text data.train=x.txt data.valid=valid.jsonl", "x.txt", make=a("x.txt", b"\x00" * 99)
    ),
    case("text-bad-json", ON_X, "x.jsonl:4", "JSON", make=lines('{"text": "open')),
    case("text-json-of-many-lines", ON_X, "x.jsonl:1", "JSON", make=a("x.jsonl", '{\n "text": "a"\n}\n')),
    case("text-a-json-array", ON_X, "x.jsonl:4", "list", make=lines([1, 2])),
    case("text-a-json-string", ON_X, "x.jsonl:4", "str", make=lines('"just text"')),
    case("text-deep-json", ON_X, "x.jsonl:4", make=lines("[" * 100000)),
    case("text-field-absent", ON_X, "x.jsonl:4", "'text'", "body", make=lines({"body": "x"})),
    case("text-field-of-another-name", f"{ON_X} data.field=body", "x.jsonl:1", "'body'", "text", make=lines()),
    case("text-field-null", ON_X, "x.jsonl:4", "null", make=lines({"text": None})),
    case("text-field-a-number", ON_X, "x.jsonl:4", "7", make=lines({"text": 7})),
    case("text-field-a-list", ON_X, "x.jsonl:4", "list", make=lines({"text": ["a", "b"]})),
    case("text-half-a-surrogate", ON_X, "x.jsonl:4", "Unicode", make=lines('{"text": "\\ud800"}')),
    case("text-field-not-a-name", f"{ON_X} data.field=3", "data.field", "3", make=lines()),
    case("text-zst-cut", "train-text data.train=x.jsonl.zst", "x.jsonl.zst", make=zst(9)),
    case("text-zst-garbled", "train-text data.train=x.jsonl.zst", "x.jsonl.zst", make=a("x.jsonl.zst", b"not packed")),
    case("text-zst-empty", "train-text data.train=x.jsonl.zst", "x.jsonl.zst", make=a("x.jsonl.zst", b"")),
    case("text-gz-cut", "train-text data.train=x.jsonl.gz", "x.jsonl.gz", make=gz),
    case("text-gz-garbled", "train-text data.train=x.jsonl.gz", "x.jsonl.gz", make=a("x.jsonl.gz", b"not packed")),
    case("text-parquet-garbled", "train-text data.train=x.parquet", "x.parquet", make=a("x.parquet", b"PAR1 no")),
    case("text-parquet-without-the-column", "train-text data.train=x.parquet", "x.parquet", "body", make=parquet),
    case("text-parquet-of-numbers", "train-text data.train=x.parquet", "x.parquet", "1", make=numbers),
    case("text-directory-empty", "train-text data.train=empty", "empty", make=lambda p: (p / "empty").mkdir()),
    case("text-directory-of-other-kinds", "train-text data.train=d", "d", "x.csv", make=a("d/x.csv", "a,b")),
    case("text-named-twice", "train-text data.train=[lines.jsonl,lines.jsonl]", "lines.jsonl", "twice"),
    case(
        "text-part-missing",
        "train-text data.train=x.jsonl.00",
        "x.jsonl",
        make=lambda p: [a(f"x.jsonl.{n}", "{}\n")(p) for n in ("00", "02")],
    ),
    case("text-too-little-for-the-vocabulary", ON_X, "384", "x.jsonl", make=lines({"text": "ab"}, good=9)),
    case("tokenizer-absent", "train-text data.train=lines.jsonl data.tokenizer=nowhere.model", "nowhere.model"),
    case(
        "tokenizer-empty", "train-text data.train=lines.jsonl data.tokenizer=t.model", "t.model", make=a("t.model", b"")
    ),
    case(
        "tokenizer-garbled",
        "train-text data.train=lines.jsonl data.tokenizer=t.model",
        "t.model",
        make=a("t.model", b"\x01\x02\x03 nothing"),
    ),
    case(
        "tokenizer-cut",
        "train-text data.train=lines.jsonl data.tokenizer=t.model",
        "t.model",
        make=lambda p: (p / "t.model").write_bytes((p / "tokenizer.model").read_bytes()[:500]),
    ),
    case(
        "tokenizer-json-garbled",
        "train-text data.train=lines.jsonl data.tokenizer=t.json",
        "t.json",
        make=a("t.json", "{ nothing"),
    ),
    case(
        "tokenizer-json-of-something-else",
        "train-text data.train=lines.jsonl data.tokenizer=t.json",
        "t.json",
        make=a("t.json", '{"a": 1}'),
    ),
    case(
        "tokenizer-an-empty-directory",
        "train-text data.train=lines.jsonl data.tokenizer=empty",
        "empty",
        make=lambda p: (p / "empty").mkdir(),
    ),
    case("tokenizer-a-number", "train-text data.train=lines.jsonl data.tokenizer=7", "data.tokenizer", "7"),
    case(
        "tokenizer-larger-than-the-model",
        "train-text data.train=lines.jsonl data.tokenizer=tokenizer.model model.vocab_size=300",
        "300",
        "384",
    ),
    case("sources-absent", "train data.root=nowhere", "nowhere"),
    case("sources-without-python", "train data.root=empty", "empty", make=lambda p: (p / "empty").mkdir()),
    case("sources-a-file", "train data.root=lines.jsonl", "lines.jsonl"),
    case("set-not-given", "train-set", "data.train"),
    case("set-absent", "train-set data.train=sets/nowhere", "sets/nowhere"),
    case("set-absent-under-defaults", "train-as-given data=indexed data.train=sets/nowhere", "sets/nowhere"),
    case("set-named-with-its-ending", "train-set data.train=sets/lines.bin", "sets/lines.bin", "sets/lines"),
    case("set-a-directory", "train-set data.train=sets", "sets"),
    case("set-without-bin", ON_LINES, "lines.bin", make=without("sets/lines.bin")),
    case("set-without-idx", ON_LINES, "lines.idx", make=without("sets/lines.idx")),
    case("set-bin-cut", ON_LINES, "lines.bin", make=cut_bin),
    case("set-bin-cut-under-a-manifest", ON_LINES, "lines.bin", make=spoiled("sets/lines.bin", b"\x00" * 10)),
    case("set-bin-empty", ON_LINES, "lines.bin", make=lambda p: (no_manifest(p), spoiled("sets/lines.bin", b"")(p))),
    case("set-idx-cut", ON_LINES, "lines.idx", make=cut_idx),
    case(
        "set-idx-garbled",
        ON_LINES,
        "lines.idx",
        make=lambda p: (no_manifest(p), spoiled("sets/lines.idx", b"not an index, this" * 9)(p)),
    ),
    case("set-idx-empty", ON_LINES, "lines.idx", make=lambda p: (no_manifest(p), spoiled("sets/lines.idx", b"")(p))),
    case("set-of-an-unknown-dtype", f"{ON_LINES} data.vocab_size=384", "lines.idx", "99", make=wrong_dtype),
    case("set-token-beyond-the-vocabulary", f"{ON_LINES} data.vocab_size=384", "65535", "384", make=large_token),
    case("set-without-a-vocabulary", ON_LINES, "data.vocab_size", make=no_manifest),
    case("set-manifest-garbled", ON_LINES, "lines.manifest.json", make=spoiled("sets/lines.manifest.json", b"}{")),
    case("set-manifest-of-other-keys", ON_LINES, "lines.manifest.json", make=manifest(banana=1)),
    case("set-manifest-of-another-layout", ON_LINES, "lines.manifest.json", "99", make=manifest(layout=99)),
    case("set-manifest-with-files-null", ON_LINES, "lines.manifest.json", make=manifest(files=None)),
    case("set-larger-than-the-model", f"{ON_LINES} model.vocab_size=300", "300", "384"),
    case("set-vocabulary-against-its-manifest", f"{ON_LINES} data.vocab_size=300", "300", "384"),
    case("set-split-of-zeros", "train-set data.train=sets/lines data.split=[0,0,0]", "split", "[0"),
    case("set-split-negative", "train-set data.train=sets/lines data.split=[9,-1,0]", "split", "-1"),
    case("set-split-of-one", "train-set data.train=sets/lines data.split=[9]", "split", "[9"),
    case("set-split-of-four", "train-set data.train=sets/lines data.split=[9,1,1,1]", "split", "[9"),
    case("set-split-in-words", "train-set data.train=sets/lines data.split=half", "split", "half"),
    case("set-split-without-validation", "train-set data.train=sets/lines data.split=[1,0,0]", "[1, 0, 0]", "above 0"),
    case("set-split-nan", "train-set data.train=sets/lines data.split=[nan,1,0]", "split", "nan"),
    case("set-split-and-valid", f"{ON_LINES} data.valid=sets/lines", "split"),
    case("set-neither-split-nor-valid", "train-set data.train=sets/lines data.split=null", "split"),
    case("set-validation-too-short", "train-set data.train=sets/lines data.split=[9999,1,0]", "split", "9999"),
    case("blend-of-an-absent-set", "train-set data.train=[0.5,sets/lines,0.5,sets/nowhere]", "sets/nowhere"),
    case("blend-odd", "train-set data.train=[0.5,sets/lines,0.5]", "data.train"),
    case("blend-of-negative-weight", "train-set data.train=[-0.5,sets/lines,0.5,sets/lines]", "-0.5"),
    case("blend-of-nan", "train-set data.train=[nan,sets/lines,0.5,sets/lines]", "nan"),
    case("blend-without-weights", "train-set data.train=[sets/lines,sets/lines]", "sets/lines"),
    case("blend-of-zeros", "train-set data.train=[0,sets/lines,0,sets/lines]", "0"),
)
