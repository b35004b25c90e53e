"""Tasks of lm-evaluation-harness on local files, answered as `transformers` would answer them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers

from lowprec_train.tools.cli import main
from lowprec_train.tools.evaluate import evaluation
from lowprec_train.train import packages
from lowprec_train.train.trained import Trained
from tests.tools.evaluated import subject

CPU = torch.device("cpu")
QUESTIONS = [
    {"question": "loss scale", "choices": ["tile", "block codes"], "answer": 0},
    {"question": "draws", "choices": ["layer model train", "x", "valid"], "answer": 2},
    {"question": "tile " * 90, "choices": ["tile", "epoch"], "answer": 1},  # longer than the model's 64 tokens
]
DATA = "dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITING = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "tile"
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return subject(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def files(made):
    """The task files of choices, of a text's likelihood, and of writing."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is the extra 'eval'")
    root = made.run.parent
    (root / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    paths = []
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("writing", WRITING)):
        paths.append(root / f"{name}.yaml")
        paths[-1].write_text(f"task: {name}\n" + DATA.format(data=root / "questions.jsonl") + text)
    return paths


@pytest.fixture(scope="module")
def answering(made, files):
    from lowprec_train.tools.evaluate.harness import Answering

    model = Trained(made.run).model("bf16", device=CPU, dtype=torch.float32)
    return Answering(model, made.tokenizer, batch=2)


@pytest.fixture(scope="module")
def theirs(made, files):
    """log p of the ids after the first `given`, by transformers alone."""
    out = made.run.parent / "exported"
    assert main(["export-hf", str(made.run), "--out", str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()

    @torch.no_grad()
    def likelihood(ids, given):
        ids = torch.tensor([ids])
        each = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        return float(each[given - 1 :].sum())

    return likelihood


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_likelihoods_of_continuations(made, answering, theirs):
    pairs = [(each["question"], f" {choice}") for each in QUESTIONS for choice in each["choices"]]
    pairs += [("", "tile block"), ("draws ", "tile")]  # no context; a space that belongs to the continuation
    found = answering.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (likelihood, _) in zip(pairs, found, strict=True):
        whole, before = (made.tokenizer.encode([text])[0] for text in (context + continuation, context.rstrip()))
        ids = whole if context else [made.tokenizer.eod, *whole]
        after = len(ids) - (len(before) or 1)
        ids = ids[-65:]
        assert likelihood == pytest.approx(theirs(ids, len(ids) - after), abs=1e-3)


def test_likelihoods_of_texts(made, answering, theirs):
    texts = [("tile loss",), (QUESTIONS[2]["question"],)]
    short, long = answering.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    ids = [[made.tokenizer.eod, *each] for each in made.tokenizer.encode([text for (text,) in texts])]
    assert short == pytest.approx(theirs(ids[0], 1), abs=1e-3)
    rest = len(ids[1]) - 65  # in a last window that is full
    assert 0 < rest < 64
    assert long == pytest.approx(theirs(ids[1][:65], 1) + theirs(ids[1][-65:], 65 - rest), abs=2e-3)


def test_writing_stops_where_it_is_reported(made, answering):
    def written(**asked):
        (text,) = answering.generate_until(requests("generate_until", ("loss scale", asked)), disable_tqdm=True)
        return text

    free, few = written(max_gen_toks=10), written(max_gen_toks=3)
    ids, prompt = made.tokenizer.encode(["loss scale"])[0], []
    for _ in range(10):  # the likeliest, each read anew
        prompt.append(int(answering.model.logits(torch.tensor([ids + prompt]))[0, -1].argmax()))
    assert made.tokenizer.eod not in prompt
    assert (free, few) == (made.tokenizer.decode(prompt), made.tokenizer.decode(prompt[:3])) and few
    stop = free[len(free) // 2]
    assert written(until=[stop], max_gen_toks=10) == free[: free.index(stop)] == written(until=stop, max_gen_toks=10)


def test_an_empty_stop_stops_nothing(answering):
    def written(**asked):
        (text,) = answering.generate_until(requests("generate_until", ("loss scale", asked)), disable_tqdm=True)
        return text

    free = written(max_gen_toks=10)
    assert written(until="", max_gen_toks=10) == written(until=["", "\0"], max_gen_toks=10) == free
    assert len(free) > len(written(max_gen_toks=1))


def test_answers_leave_room_for_the_prompt(made, answering, caplog):
    def write(question, **asked):
        return answering.generate_until(requests("generate_until", (question, asked)), disable_tqdm=True)

    for asked, said in (
        ({"max_gen_toks": 64}, "64 must"),
        ({}, r"256 \(the default\)"),
        ({"max_gen_toks": 0}, "0 must"),
    ):
        with pytest.raises(ValueError, match=f"max_gen_toks {said} .* below the model's max_seq_len 64"):
            write("loss scale", **asked)
    ids = made.tokenizer.encode(["loss scale"])[0]
    write("loss scale", max_gen_toks=64 - len(ids))
    assert not caplog.records
    write("loss scale", max_gen_toks=65 - len(ids))
    said = f"1 of 1 prompts lose their beginning: max_gen_toks leaves {len(ids) - 1} of 64 positions to a prompt"
    assert said in caplog.text


def test_answers_without_room_are_refused_before_anything_is_computed(made, files, tmp_path, capsys, no_model):
    for asked, said in (
        ("max_gen_toks: 64", "max_gen_toks 64 must"),
        ("do_sample: false", "max_gen_toks 256 (the def"),
    ):
        (tmp_path / "long.yaml").write_text(files[2].read_text().replace("max_gen_toks: 4", asked))
        assert main(["evaluate", str(made.run), "--device", "cpu", "--tasks", str(tmp_path / "long.yaml")]) == 2
        (line,) = (each for each in capsys.readouterr().err.splitlines() if "error:" in each)
        assert f"long.yaml: task writing: {said}" in line and "below the model's max_seq_len 64" in line


def test_from_the_command_line(made, files, tmp_path, capsys):
    out = tmp_path / "tasks.json"
    status = main(["evaluate", str(made.run), "--device", "cpu", "--tasks", *map(str, files), "--out", str(out)])
    assert status == 0
    found, printed = json.loads(out.read_text())["tasks"], capsys.readouterr().out
    assert set(found) == {"run", "bf16"}
    for each in found.values():
        assert set(each) == {"choice", "rolling", "writing"} and 0 <= each["choice"]["acc,none"] <= 1
    assert found["run"]["rolling"]["bits_per_byte,none"] != found["bf16"]["rolling"]["bits_per_byte,none"]
    assert "run (fp4)" in printed and "word_perplexity" in printed and "±" in printed


def test_refusals(made, files, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("output_type: multiple_choice\n")
    for file, said in (
        (tmp_path / "absent.yaml", "no such task file"),
        (tmp_path / "bad.yaml", "is not a valid task file"),
    ):
        assert main(["evaluate", str(made.run), "--device", "cpu", "--tasks", str(file)]) == 2
        assert said in capsys.readouterr().err


@pytest.fixture
def no_model(monkeypatch):
    """Fails where something is computed: what is wrong is told before."""
    monkeypatch.setattr(Trained, "model", lambda *_, **__: pytest.fail("a model was made"))


def test_bad_task_files_are_reported_before_anything_is_computed(made, files, tmp_path, capsys, no_model):
    (tmp_path / "bad.yaml").write_text("output_type: multiple_choice\n")
    tasks = [str(files[0]), str(tmp_path / "bad.yaml")]
    assert main(["evaluate", str(made.run), "--device", "cpu", "--data", str(made.raw), "--tasks", *tasks]) == 2
    assert "bad.yaml is not a valid task file" in capsys.readouterr().err


def test_nothing_is_downloaded(made, files, tmp_path, capsys, no_model):
    """A data set's name is an error at once, not a download, nor a minute of attempts where there is no network."""
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: hellaswag\ntest_split: test\n" + CHOICE)
    assert main(["evaluate", str(made.run), "--device", "cpu", "--tasks", str(tmp_path / "far.yaml")]) == 2
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "error:" in each)
    assert "far.yaml is not a valid task file" in line and "'hellaswag'" in line and "OfflineModeIsEnabled" in line
    from lowprec_train.tools.evaluate import harness

    assert all(getattr(sys.modules[module], switch) for module, switch in harness.OFFLINE.items())


def test_a_task_that_does_not_fit_its_data_is_reported_before_text_is_read(made, files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "measure", lambda *_: pytest.fail("text was read"))
    for name, change in (("{{question}}", "{{ question.no.such }}"), ("{{choices}}", "{{absent}}")):
        (tmp_path / "odd.yaml").write_text(files[0].read_text().replace(name, change))
        tasks = ["--tasks", str(tmp_path / "odd.yaml")]
        assert main(["evaluate", str(made.run), "--device", "cpu", "--data", str(made.raw), *tasks]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "odd.yaml" in line and ("is not a valid task file" in line or "does not fit its data" in line)


def test_without_the_package_it_says_what_to_install(made, tmp_path, capsys, monkeypatch):
    (tmp_path / "choice.yaml").write_text(f"task: choice\n{CHOICE}")
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert main(["evaluate", str(made.run), "--device", "cpu", "--tasks", str(tmp_path / "choice.yaml")]) == 2
    assert "--tasks needs the package 'lm_eval': pip install 'lowprec_train[eval]'" in capsys.readouterr().err
