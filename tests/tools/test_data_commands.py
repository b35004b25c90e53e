"""`lowprec train-tokenizer`, `prepare-data` and `inspect-data` from the command line, and a run on what they made."""

import io
import json
import random
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lowprec_train import main
from lowprec_train.data import tokenising
from lowprec_train.data.manifest import sha256
from lowprec_train.data.tokenising import Counts
from lowprec_train.data.tokenizer import load
from lowprec_train.tools import cli, progress
from lowprec_train.train.compose import composed
from tests.data.indexed_files import write_indexed

SMALL = ("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2", "data.seq_len=64")
SMALL += ("micro_batch=2", "tokens_per_step=256", "steps=3", "eval_batches=1")


def lowprec(*arguments) -> int:
    return cli.main([*map(str, arguments)])


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """400 documents, document i beginning with its number; one is empty."""
    draw = random.Random(1)
    words = ["".join(draw.choices("aeiounst", k=draw.randint(1, 8))) for _ in range(100)]
    texts = [f"number {i}: " + " ".join(draw.choices(words, k=draw.randint(5, 60))) for i in range(400)] + [""]
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def prefix(text) -> Path:
    model = text.parent / "tokenizer.model"
    assert lowprec("train-tokenizer", text, "--vocab-size", 384, "--out", model) == 0
    made = text.parent / "data" / "all"
    assert lowprec("prepare-data", text, "--tokenizer", model, "--out", made, "--workers", 0) == 0
    return made


def test_a_run_on_prepared_data(prefix, tmp_path, monkeypatch, capfd):
    """Nothing but the prefix is said of the data; run.json says which tokenizer it has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["train.py", *SMALL, "model.vocab_size=384", "data=indexed", f"data.train={prefix}", "name=on"]
    )
    with pytest.raises(SystemExit) as end:
        main.main()
    assert not end.value.code, capfd.readouterr()
    facts = json.loads(Path("runs/on/run.json").read_text())
    assert facts["tokenizer"] == str(prefix.parent / "tokenizer.model")
    assert facts["tokenizer_sha256"] == sha256(prefix.parent / "tokenizer.model")
    assert len(Path("runs/on/metrics.jsonl").read_text().splitlines()) == 3


def test_what_is_said_of_it(prefix, capsys):
    assert lowprec("inspect-data", prefix, "--samples", 2, "--characters", 9) == 0
    out = capsys.readouterr().out
    assert f"{prefix}: 400 documents, 400 sequences, " in out and "left out: 1 empty, 0 bad" in out
    assert "tokenizer.model, 384 pieces, end of document 1" in out and "from: text.jsonl" in out
    assert "document 0, " in out and "tokens: 'number 0:' ..." in out and "tokens: 'number 20' ..." in out
    assert lowprec("inspect-data", prefix, "--document", 7, "--document", 399, "--characters", 12) == 0
    out = capsys.readouterr().out
    assert "tokens: 'number 7: " in out and "tokens: 'number 399: ' ..." in out and "document 0" not in out
    assert lowprec("inspect-data", prefix, "--document", 400) == 2
    assert "document 400: there are 400, counted from 0" in capsys.readouterr().err


def test_data_of_others(tmp_path, prefix, capsys):
    """Ids without a tokenizer, lengths over sequences of a document, and text with a tokenizer that is named."""
    write_indexed(tmp_path / "theirs", [[5, 6, 7], [8], [9, 1]], bounds=[0, 2, 3])
    assert lowprec("inspect-data", tmp_path / "theirs") == 0
    out = capsys.readouterr().out
    assert "2 documents, 3 sequences, 6 tokens as int32" in out and "document 0, 4 tokens: [5, 6, 7, 8]" in out
    assert "2 at least, 2 at 10 %, 3 at the median, 4 at 90 %, 4 at most, 3.0 on average" in out
    model = prefix.parent / "tokenizer.model"
    assert lowprec("inspect-data", tmp_path / "theirs", "--tokenizer", model, "--check") == 1
    assert "\n1 documents do not end with the end-of-document token 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dtype", "token", "found"),
    [
        (np.int32, 400, "token 400 is outside the vocabulary of 384"),
        (np.int64, 2**40, "token 1099511627776 is outside the vocabulary of 384"),
        (np.int16, -1, "token -1 is outside the vocabulary of 384"),
        (np.float64, np.nan, "theirs: holds float64 numbers, not token ids"),
    ],
)
def test_tokens_that_no_tokenizer_has(dtype, token, found, tmp_path, prefix, capsys):
    """They are shown as numbers, and found."""
    write_indexed(tmp_path / "theirs", [[5, token, 7, 1]], dtype)
    command = ("inspect-data", tmp_path / "theirs", "--tokenizer", prefix.parent / "tokenizer.model", "--check")
    status, (out, err) = lowprec(*command), capsys.readouterr()
    assert (status, found in out + err) == (2 if dtype is np.float64 else 1, True)
    assert ("some outside the vocabulary: [5, " in out) is (dtype is not np.float64)


def test_empty_paths_are_not_the_current_directory(text, prefix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(text.parent)
    assert lowprec("prepare-data", "", "--tokenizer", prefix.parent, "--out", tmp_path / "all") == 2
    assert "no file is named in ['']" in capsys.readouterr().err
    for command in ("prepare-data {text} --out {out}", "inspect-data {prefix}"):
        filled = command.format(text=text, out=tmp_path / "all", prefix=prefix).split()
        with pytest.raises(SystemExit) as end:
            lowprec(*filled, "--tokenizer", "")
        assert end.value.code == 2 and "--tokenizer: the path is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["a set, x=[1] é", "it's", '"a"', "a=b", "1e3", "123", "true", "null", "$HOME", "plain"]
)
def test_the_command_that_trains_can_be_pasted(name, text, prefix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert lowprec("prepare-data", text, "--tokenizer", prefix.parent, "--workers", 0, "--out", name) == 0
    shown = capsys.readouterr().out.partition("Train on it: ")[2]
    assert composed(*shlex.split(shown)).data["train"] == name


def test_check(prefix, tmp_path, capsys):
    assert lowprec("inspect-data", prefix, "--check") == 0
    assert "checked: " in capsys.readouterr().out
    for path in prefix.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / "all.bin").read_bytes())
    content[-2:] = (400).to_bytes(2, "little")
    (tmp_path / "all.bin").write_bytes(content)
    assert lowprec("inspect-data", tmp_path / "all", "--check") == 1
    out = capsys.readouterr().out
    assert (
        "/all.bin is not the file that the manifest describes\ntoken 400 is outside the vocabulary of 384\n1 doc" in out
    )


def test_check_names_what_it_read(prefix, tmp_path, capsys):
    """Data of others has no manifest to be compared with; without a tokenizer too there is nothing to check."""
    theirs, model = tmp_path / "theirs", prefix.parent / "tokenizer.model"
    for last, status in ((8, 0), (-5, 1)):
        write_indexed(theirs, [[5, last, 1]])
        assert lowprec("inspect-data", theirs, "--check") == 2
        captured = capsys.readouterr()
        assert "theirs has no manifest: --check needs --tokenizer FILE" in captured.err and not captured.out
        assert lowprec("inspect-data", theirs, "--tokenizer", model, "--check", "--samples", 0) == status
        out = capsys.readouterr().out
        assert ("checked: document ends and tokens are" in out) is (status == 0) and "files, " not in out
        assert ("token -5 is outside the vocabulary of 384" in out) is (status == 1)


def test_the_tokenizer_of_a_prepared_set_is_not_replaced(text, prefix, tmp_path, capsys):
    own, other = prefix.parent / "tokenizer.model", tmp_path / "other.model"
    assert lowprec("train-tokenizer", text, "--vocab-size", 380, "--out", other) == 0
    capsys.readouterr()
    assert lowprec("inspect-data", prefix, "--tokenizer", other) == 2
    captured = capsys.readouterr()
    assert not captured.out and len(captured.err.splitlines()) == 1
    for what in (f"--tokenizer {other} has SHA-256 {sha256(other)[:12]}, ", f"{own} of {sha256(own)[:12]}"):
        assert what in captured.err
    assert lowprec("inspect-data", prefix, "--tokenizer", own) == 0


def test_the_help_names_what_is_lost_and_what_a_limit_is(text, prefix, capsys):
    """SentencePiece's own mark of a space is a space when it is decoded; a line's limit is that of reads of 1 MiB."""
    tokenizer = load(prefix.parent / "tokenizer.model")
    assert tokenizer.decode(tokenizer.encode(["a\u2581b é\n"])[0]) == "a b é\n"
    for command, said in (("train-tokenizer", "U+2581"), ("prepare-data", "to within 1 MiB")):
        with pytest.raises(SystemExit):
            lowprec(command, "--help")
        assert said in " ".join(capsys.readouterr().out.split())


def test_again_and_interrupted(text, prefix, tmp_path, capsys, monkeypatch):
    command = ["prepare-data", text, "--tokenizer", prefix.parent, "--workers", 0, "--out"]
    before = {path.name: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}
    assert lowprec(*command, prefix) == 0
    assert {path.name: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} == before
    with monkeypatch.context() as patched:
        patched.setattr(tokenising, "_encode", lambda chunk, **settings: (_ for _ in ()).throw(KeyboardInterrupt))
        assert lowprec(*command, tmp_path / "new") == 130
    assert "interrupted; run the same command to resume" in capsys.readouterr().out
    assert lowprec(*command, tmp_path / "new") == 0
    for ending in ("bin", "idx"):
        assert (tmp_path / f"new.{ending}").read_bytes() == prefix.with_suffix(f".{ending}").read_bytes()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prepare-data {text} --tokenizer none --out {here}/all", "none: no such tokenizer"),
        ("prepare-data {text} --tokenizer {model} --out {here}", "is a directory; name the dataset in it, as"),
        ("prepare-data absent.txt --tokenizer {model} --out {here}/all", "absent.txt: no such file or directory"),
        (
            "prepare-data {text} --tokenizer {model} --field body --out {here}/all",
            "no text in field 'body'; the record",
        ),
        ("prepare-data {text} --tokenizer {model} --workers -2 --out {here}/all", "workers -2 must not be negative"),
        ("train-tokenizer {text} --vocab-size 384 --out {model}", "tokenizer.model exists; choose another name"),
        (
            "train-tokenizer {text} --vocab-size 99999 --out {here}/m",
            "no tokenizer of 99999 pieces can be trained on it",
        ),
        ("inspect-data {here}/none", "none.idx: no such file"),
        ("prepare-data {text} --tokenizer {model} --out {here}/all.bin", "name the dataset without its ending, as"),
        (
            "prepare-data {text} --tokenizer {model} --out /dev/null/x",
            "--out /dev/null/x: /dev/null is not a directory",
        ),
        ("train-tokenizer {text} --vocab-size 384 --out {text}/a/b", "text.jsonl/a/b: {text} is not a directory"),
    ],
)
def test_mistakes(text, prefix, tmp_path, capsys, command, message):
    filled = command.format(text=text, model=prefix.parent / "tokenizer.model", here=tmp_path)
    assert lowprec(*filled.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.replace("{text}", str(text)) in line


def test_a_tokenizer_leaves_out_what_has_no_text(text, tmp_path, capsys):
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(text.read_text() + '{"text": 7}\n{"body": "x"}\n')
    assert lowprec("train-tokenizer", mixed, "--vocab-size", 384, "--out", tmp_path / "a.model") == 2
    assert "mixed.jsonl:402: no text in field 'text', but int 7" in capsys.readouterr().err
    assert lowprec("train-tokenizer", mixed, "--vocab-size", 384, "--out", tmp_path / "a.model", "--skip-bad") == 0
    assert "left out 2 records without text in field 'text'" in capsys.readouterr().out
    assert lowprec("train-tokenizer", text, "--vocab-size", 384, "--out", tmp_path / "b.model") == 0
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_progress():
    """A bar on a terminal; else a line every ten seconds, with the rates of this call."""
    seconds = 0
    plain, bar = (Console(record=True, width=200, force_terminal=kind, file=io.StringIO()) for kind in (False, True))
    with progress.of_preparation(1000, plain, lambda: seconds) as report:
        for seconds in range(0, 30, 4):
            report(
                Counts(read=500, documents=100 + seconds, tokens=10**8 + seconds * 10**6, text_bytes=seconds * 10**7)
            )
    assert plain.export_text().splitlines() == [
        " 50 %  112 documents  112,000,000 tokens  10.0 MB/s  1.00 Mtok/s",
        " 50 %  124 documents  124,000,000 tokens  10.0 MB/s  1.00 Mtok/s",
    ]
    with progress.of_preparation(1000, bar, lambda: seconds) as report:
        report(Counts(read=500, documents=100))
    assert "tokenising" in (shown := bar.export_text()) and "0.5/1.0 kB" in shown and "100 documents" in shown
