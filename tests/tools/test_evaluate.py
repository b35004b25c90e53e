"""lowprec evaluate: every token once, the numbers of an independent script, and what the recipes' difference is."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from lowprec_train.data.manifest import Manifest
from lowprec_train.data.sentencepiece_model import SentencePieceTokenizer
from lowprec_train.data.tokenizer import store
from lowprec_train.tools.cli import main
from lowprec_train.tools.evaluate.perplexity import Cutting, Measured, difference, measure, score
from lowprec_train.tools.evaluate.texts import Encoded, open_text
from lowprec_train.tools.evaluate.windows import Window, cut, of_equal_length
from lowprec_train.tools.progress import of_evaluation
from lowprec_train.train.trained import Trained
from scripts.perplexity import documents_of, perplexity
from tests.data.indexed_files import write_indexed
from tests.tools.evaluated import TEXTS, documents_of_bin, subject

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return subject(tmp_path_factory.mktemp("evaluated"))


@pytest.fixture(scope="module")
def exported(made):
    out = made.run.parent / "exported"
    assert main(["export-hf", str(made.run), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def exact(made):
    """The model, nothing rounded."""
    return Trained(made.run).model("bf16", device=CPU, dtype=torch.float32)


@pytest.fixture
def evaluate(made, tmp_path, capsys):
    """evaluate(options) -> (the JSON, what was printed)."""

    def call(*options, model=made.run):
        out = tmp_path / "out.json"
        assert main(["evaluate", str(model), "--device", "cpu", "--out", str(out), *map(str, options)]) == 0
        return json.loads(out.read_text()), capsys.readouterr().out

    return call


@pytest.fixture
def refused(made, capsys):
    """refused(options) -> the one line of the error."""

    def call(*options, model=made.run):
        assert main(["evaluate", str(model), "--device", "cpu", *map(str, options)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return call


# --- windows ---


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(("seq_len", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (64, 64)])
def test_windows_predict_every_token_but_the_first_once(length, seq_len, stride):
    predicted = []
    for window in cut(np.arange(length), seq_len, stride):
        assert 1 <= window.inputs <= seq_len and 1 <= window.scored <= window.inputs
        counted = window.tokens[-window.scored :].tolist()
        predicted += counted
        context = counted[0] - window.tokens[0]
        assert context >= min(counted[0], max(1, seq_len - stride))
    assert predicted == list(range(1, length))


def test_what_is_computed_together_has_equal_lengths_and_nothing_is_lost():
    words = ["a", "bb", "c", "dd", "ee", "f", "g", "hhh"]
    groups = list(of_equal_length(words, 2, len))
    assert groups == [["a", "c"], ["bb", "dd"], ["f", "g"], ["ee"], ["hhh"]]


# --- against transformers ---


@pytest.mark.parametrize(("seq_len", "stride"), [(32, 32), (64, 20)])
def test_perplexity_is_that_of_an_independent_script(made, exported, evaluate, seq_len, stride):
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    raw = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    prepared = [ids[:-1] for ids in documents_of_bin(made.prefix, made.tokenizer.eod)]
    assert raw == prepared  # by way of two tokenizers
    documents = [[tokenizer.eos_token_id, *ids] for ids in raw]
    assert documents_of(exported, made.raw) == documents
    expected, tokens = perplexity(exported, documents, seq_len, stride)
    for data in (made.raw, made.prefix):
        how = ("--seq-len", seq_len, "--stride", stride, "--recipe", "fp32")
        text = evaluate("--data", data, *how)[0]["text"]
        assert text["tokens"] == tokens == sum(map(len, raw))
        assert text["results"]["fp32"]["perplexity"] == pytest.approx(expected, abs=1e-3)


def test_without_a_start_the_first_token_is_context_only(made, exported, evaluate):
    documents = [ids[:-1] for ids in documents_of_bin(made.prefix, made.tokenizer.eod)]
    expected, tokens = perplexity(exported, documents, 32, 32)
    found, out = evaluate("--data", made.prefix, "--recipe", "fp32", "--start", "none")
    assert found["text"]["tokens"] == tokens == sum(max(0, len(ids) - 1) for ids in documents)
    assert found["text"]["results"]["fp32"]["perplexity"] == pytest.approx(expected, abs=1e-3)
    assert "the first token of each document is context only" in out and found["start"] is None


# --- what is counted and told ---


def test_recipes_are_compared_on_the_same_text(made, evaluate):
    raw, out = evaluate("--data", made.raw, "--recipe", "run", "bf16", "fp4")
    text = raw["text"]
    assert text["documents"] == sum(map(bool, TEXTS)) and text["bytes"] == sum(len(each.encode()) for each in TEXTS)
    losses = {name: each["loss"] for name, each in text["results"].items()}
    assert losses["run"] == losses["fp4"] != losses["bf16"]
    for each in text["results"].values():
        assert each["perplexity"] == pytest.approx(math.exp(each["loss"]))
        assert each["bits_per_byte"] == pytest.approx(each["loss"] * text["tokens"] / math.log(2) / text["bytes"])
    assert text["differences"]["to"] == "fp4" and text["differences"]["of"]["run"]["nats"] == 0
    assert text["differences"]["of"]["bf16"]["nats"] == pytest.approx(losses["bf16"] - losses["fp4"])
    assert "run (fp4) - fp4: +0.00000" in out and "fp4 has the same forward pass as run (fp4)" in out
    assert (raw["step"], raw["seq_len"], raw["start"]) == (4, 32, made.tokenizer.eod)

    prepared = evaluate("--data", f"{made.prefix}.bin", "--recipe", "run", "bf16", "fp4")[0]["text"]
    assert prepared.pop("data") == str(made.prefix)
    assert {name: each["loss"] for name, each in prepared["results"].items()} == losses
    assert prepared["bytes"] == text["bytes"] and prepared["windows"] == text["windows"]


def test_the_batch_does_not_count(made, exact):
    source = open_text(made.raw, field="text", tokenizer=made.tokenizer)
    one, many = (measure(exact, source, Cutting(seq_len=32, stride=16, batch=n, start=1)) for n in (1, 16))
    assert (one.documents, one.bytes, one.tokens) == (many.documents, many.bytes, many.tokens)
    np.testing.assert_allclose(one.nll, many.nll, rtol=1e-5)
    few = measure(exact, source, Cutting(seq_len=32, stride=16, batch=4, start=1, documents=3))
    assert few.documents == 3
    np.testing.assert_allclose(few.nll, one.nll[: len(few.nll)], rtol=1e-5)


def test_a_limit_counts_the_documents_that_a_prepared_set_has(made, evaluate, tmp_path):
    """Empty ones are not in it."""
    raw, model = tmp_path / "gaps.jsonl", tmp_path / "tokenizer.model"
    raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", TEXTS[0], "", TEXTS[1], TEXTS[2])))
    model.write_bytes(made.tokenizer.content)
    prefix = tmp_path / "set" / "gaps"
    assert main(["prepare-data", str(raw), "--tokenizer", str(model), "--out", str(prefix), "--workers", "0"]) == 0
    of_raw, of_set = (evaluate("--data", each, "--recipe", "fp32", "--limit", 2)[0]["text"] for each in (raw, prefix))
    assert of_raw["documents"] == of_set["documents"] == 2
    assert (of_raw["tokens"], of_raw["bytes"]) == (of_set["tokens"], of_set["bytes"])


def test_the_likeliest_continuation_is_called_greedy(exact):
    prompt = [1, 7, 30]
    best = int(exact.logits(torch.tensor([prompt]))[0, -1].argmax())
    windows = [Window(np.array([*prompt, each]), 1) for each in (best, (best + 1) % 384)]
    right, wrong = score(exact, windows)
    assert right.greedy and not wrong.greedy and right.nll < wrong.nll


def test_differences_of_the_same_windows_are_known_better_than_either():
    about = {"documents": 1, "bytes": None, "tokens": 40, "seconds": 1.0}
    hard = np.array([10.0, 90.0, 40.0, 200.0])
    a, b = (Measured(nll=nll, **about) for nll in (hard + [1.0, 3.0, 1.0, 3.0], hard))
    found = difference(a, b)
    assert found.nats == pytest.approx(8 / 40)
    assert found.standard_error == pytest.approx(math.sqrt(4) * np.std([1, 3, 1, 3], ddof=1) / 40)
    single = Measured(nll=np.array([3.0]), **about)
    assert difference(single, single).standard_error is None and a.bits_per_byte is None


def test_an_imported_model_is_evaluated_as_the_run_it_comes_from(made, exported, evaluate):
    out = exported.with_name("imported")
    assert main(["import-hf", str(exported), "--out", str(out)]) == 0
    found, told = evaluate("--data", made.raw, "--recipe", "run", "fp32", "--seq-len", 32, model=out)
    run, _ = evaluate("--data", made.raw, "--recipe", "bf16", "fp32", "--seq-len", 32)
    ours, theirs = (list(each["text"]["results"].values()) for each in (run, found))
    assert [each["loss"] for each in ours] == [each["loss"] for each in theirs]
    assert found["recipes"] == {"run": "bf16", "fp32": "fp32"} and found["step"] is None and "run (bf16)" in told


def test_progress_is_for_terminals(exact, made):
    source = open_text(made.raw, field="text", tokenizer=made.tokenizer)
    screen, file = io.StringIO(), io.StringIO()
    for console in (Console(file=screen, force_terminal=True, width=80), Console(file=file)):
        with of_evaluation("bf16", console) as told:
            tokens = measure(exact, source, Cutting(seq_len=64, stride=64, batch=4, start=1), told).tokens
    assert f"bf16: {tokens:,} tokens" in screen.getvalue() and file.getvalue() == ""


def test_a_set_of_unknown_tokenizer_has_a_perplexity_and_no_bytes(made, evaluate):
    how = ("--tokenizer", "none", "--start", "none", "--recipe", "fp32", "--limit", 5)
    found, out = evaluate("--data", made.prefix, *how)
    about = found["text"]
    assert about["bytes"] is None and about["results"]["fp32"]["bits_per_byte"] is None and " - " in out
    stored = documents_of_bin(made.prefix, made.tokenizer.eod)[:5]
    assert about["tokens"] == sum(len(ids) - 1 for ids in stored)  # closing tokens cannot be told from others


# --- refusals ---


def test_tokenizers_must_fit(made, evaluate, refused, tmp_path):
    other, large = (SentencePieceTokenizer.train(TEXTS, size, "other") for size in (380, 390))
    (tmp_path / "large").mkdir()
    path = store(large, tmp_path / "large")
    assert "vocab_size 384 is smaller than the 390 pieces" in refused("--data", made.raw, "--tokenizer", path)
    for name in ("texts.bin", "texts.idx"):
        (tmp_path / name).write_bytes(made.prefix.with_name(name).read_bytes())
    store(other, tmp_path)
    about = {"file": other.file_name, "sha256": other.digest, "vocab_size": 380, "eod": other.eod}
    counts = dict.fromkeys(("documents", "tokens", "text_bytes", "empty", "bad"), 0)
    files = {end: {"bytes": (tmp_path / f"texts.{end}").stat().st_size, "sha256": "a"} for end in ("bin", "idx")}
    lists = {"dtype": "uint16", "field": "text", "inputs": [], "files": files, "versions": {}}
    Manifest(**counts, **lists, tokenizer=about).write(tmp_path / "texts")
    assert f"was prepared with a tokenizer of SHA-256 {other.digest[:12]}" in refused("--data", tmp_path / "texts")
    found, _ = evaluate("--data", tmp_path / "texts", "--tokenizer", "none", "--recipe", "fp32", "--limit", 2)
    assert found["start"] == other.eod and found["text"]["bytes"]  # the set brings its own


def test_a_file_that_cannot_be_written_is_reported_before_anything_is_computed(made, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(Trained, "model", lambda *_, **__: pytest.fail("a model was made"))
    assert f"directory {tmp_path / 'missing'} does not exist" in refused(
        "--data", made.raw, "--out", tmp_path / "missing" / "x.json"
    )
    assert "is a directory" in refused("--data", made.raw, "--out", tmp_path)


def test_refusals(made, refused, tmp_path):
    assert "nothing to evaluate: " in refused()
    assert "recipe 'fp3' is not one of run, averis, bf16" in refused("--data", made.raw, "--recipe", "fp3")
    assert "--seq-len 65 must lie between 1 and the model's max_seq_len 64" in refused(
        "--data", made.raw, "--seq-len", 65
    )
    assert "--seq-len 0 must lie between 1" in refused("--data", made.raw, "--seq-len", 0)
    assert "--stride 40 must lie between 1 and" in refused("--data", made.raw, "--stride", 40)
    assert "--batch 0 must be at least 1" in refused("--data", made.raw, "--batch", 0)
    assert "--limit 0" in refused("--data", made.raw, "--limit", 0)
    assert "--start 384 must be eod, none or a token id below 384" in refused("--data", made.raw, "--start", 384)
    assert "give one with --tokenizer" in refused("--data", made.raw, "--tokenizer", "none")
    for start in ((), ("--start", "eod")):
        assert "--start eod: without a tokenizer" in refused("--data", made.prefix, "--tokenizer", "none", *start)
    assert "no such file" in refused("--data", tmp_path / "absent.txt")
    assert "step-9" in refused("--data", made.raw, "--step", 9)
    assert "neither a run" in refused("--data", made.raw, model=tmp_path)
    for name, dtype, token, says in (
        ("beyond", np.int32, 600, "document 1 has token id 600, but the tokenizer has 384 tokens"),
        ("below", np.int16, -1, "document 1 has token id -1, but the tokenizer has 384 tokens"),
        ("floats", np.float32, 5, "floats: holds float32 numbers, not token ids"),
    ):
        write_indexed(tmp_path / name, [[5, 6], [token, 7]], dtype)
        assert says in refused("--data", tmp_path / name)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    assert "no text, so there is no token to predict" in refused("--data", tmp_path / "empty.jsonl")
    write_indexed(tmp_path / "short", [[5], [6]], np.int32)
    said = refused("--data", tmp_path / "short", "--start", "none")
    assert "have a single token, which --start none only reads" in said


@pytest.mark.parametrize("wrong", [9, -1])
def test_ids_beyond_the_model_are_refused(wrong):
    documents = [Encoded(np.array([1, 2]), None), Encoded(np.array([5, wrong]), None)]

    class Source(list):
        name, tokenizer = "a set", None

    how = Cutting(seq_len=8, stride=8, batch=1, start=None)
    with pytest.raises(ValueError, match=f"a set: document 1 has token id {wrong}, but the model's vocabulary has 8"):
        list(how.taken(Source(documents), 8))
