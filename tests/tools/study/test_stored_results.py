"""Parts of a study, trained on several machines, are reported as one study."""

import copy
import json
import operator
import shutil
from functools import reduce
from pathlib import Path

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.study import definition, measure, plan, results, stored_results
from lowprec_train.tools.study import report as texts
from tests.tools.study import synthetic

RESULTS = Path(__file__).parents[3] / "docs" / "results"
ARMS = ("bf16", "fp8", "fp4")


@pytest.fixture
def parts(tmp_path):
    """(file of the study, folder with all runs, results.json of seed 1 and of seeds 2 and 3). fp4 diverges on seed 3;
    fp8's seed 2 has no BF16 loss."""
    blocks = [{"purpose": "estimate", "seeds": [1, 2, 3]}]
    _, planned, file = synthetic.study(tmp_path, arms=dict.fromkeys(ARMS), blocks=blocks, contrasts=[["fp8", "bf16"]])
    for number, each in enumerate(planned):
        loss = 4 + 0.1 * each.seed + 0.02 * ARMS.index(each.arm) + 0.003 * (number * 7 % 5)
        weights = float("nan") if each.name == "fp8-s2" else loss - 0.001
        diverged = each.name == "fp4-s3"
        synthetic.run(tmp_path / "all", each, loss, weights, diverged=diverged, sharpness=0.5, rate=900.0 + number)
    found = []
    for name, seeds in (("first", (1,)), ("second", (2, 3))):
        for each in planned:
            if each.seed in seeds:
                shutil.copytree(tmp_path / "all" / each.name, tmp_path / name / each.name)
        assert cli.main(["study", "report", str(file), "--out", str(tmp_path / name)]) == 0
        found.append(tmp_path / name / "report" / "results.json")
    return file, tmp_path / "all", found


def report(file, out, *results):
    assert cli.main(["study", "report", str(file), "--out", str(out), *results]) == 0
    return json.loads((out / "report" / "report.json").read_text())


def test_parts_give_the_report_of_the_whole(parts, tmp_path):
    file, everything, (first, second) = parts
    whole = report(file, everything)
    assert whole["cells"][0]["freedom"] == 2 and whole["cells"][0]["arms"][2]["words"].startswith("unstable (1 of 3)")
    assert report(file, tmp_path / "second", "--results", str(first)) == whole
    assert report(file, tmp_path / "none", "--results", str(first), str(second)) == whole
    assert not (tmp_path / "none" / "report" / "report.html").exists()  # there are no curves
    again = tmp_path / "none" / "report" / "results.json"
    assert json.loads(again.read_text()) == json.loads((everything / "report" / "results.json").read_text())
    assert report(file, tmp_path / "new", "--results", str(again)) == whole


def refused(capsys, file, out, *results):
    assert cli.main(["study", "report", str(file), "--out", str(out), "--results", *map(str, results)]) == 2
    return capsys.readouterr().err


def test_what_does_not_belong_together_is_refused(parts, tmp_path, capsys):
    file, everything, (first, _) = parts
    stored = json.loads(first.read_text())
    changed = tmp_path / "changed.json"

    def write(**of_fp8):
        runs = stored["runs"] | {"fp8-s1": stored["runs"]["fp8-s1"] | of_fp8}
        changed.write_text(json.dumps(stored | {"runs": runs}))
        return changed

    facts = stored["runs"]["fp8-s1"]["facts"]
    before = write(facts={key: value for key, value in facts.items() if key != "held_out"})
    for files in ([first, before], [before, first]):  # one of before these tokens were stored
        words = ["study", "report", str(file), "--out", str(tmp_path / "both"), "--results", *map(str, files)]
        assert cli.main(words) == 0
        kept = json.loads((tmp_path / "both" / "report" / "results.json").read_text())["runs"]["fp8-s1"]["facts"]
        assert kept == facts and "held_out" in kept
    assert "no.json: no such file" in refused(capsys, file, tmp_path / "new", "no.json")
    assert "hold different results of fp8-s1" in refused(capsys, file, tmp_path / "new", first, write(loss=5.0))
    assert "the stored loss is 5.0, that of the folder is 4.1" in refused(capsys, file, everything, write(loss=5.0))
    error = refused(capsys, file, tmp_path / "new", write(configuration="0"))
    assert "fp8-s1 was trained with another configuration" in error
    facts = {"corpus_hash": "decaf"}
    assert "corpus hash decaf" in refused(capsys, file, tmp_path / "new", write(facts=facts))
    changed.write_text(json.dumps(stored | {"study": "other"}))
    assert "not the results of study synthetic, but of 'other'" in refused(capsys, file, tmp_path / "new", changed)
    changed.write_text("{")
    assert "changed.json" in refused(capsys, file, tmp_path / "new", changed)


def test_a_selection_keeps_the_other_stored_runs(parts, tmp_path, capsys):
    """Those of other machines too, selected or not, although their files are not named again."""
    file, _, (first, second) = parts
    out = tmp_path / "second"
    report(file, out, "--results", str(first))
    stored = json.loads(second.read_text())
    assert len(stored["runs"]) == 9
    capsys.readouterr()
    for options, missing in ((["--arms", "fp8"], True), (["--arms", "bf16", "fp4"], False)):
        assert {row["arm"] for row in report(file, out, *options)["cells"][0]["arms"]} == {*options[1:]}
        assert json.loads(second.read_text()) == stored
        line = "\n\nNo run of bf16 is here, so no arm has a gap to it.\n"
        assert (line in capsys.readouterr().out) is missing
    cell = report(file, out, "--seeds", "2")["cells"][0]
    assert {tuple(row["seeds"]) for row in cell["arms"]} == {(2,)} and json.loads(second.read_text()) == stored
    assert report(file, out, "--purpose", "estimate") and json.loads(second.read_text()) == stored
    assert report(file, out) and len(json.loads(second.read_text())["runs"]) == 6  # the report of the folder alone


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "results.json cannot be read"),
        ('{"study": "other", "runs": {}}', "results.json: not the results of study synthetic, but of 'other'"),
        ('{"study": "synthetic", "runs": 5}', "results.json: runs is 5, not an object"),
        ('{"study": "synthetic", "runs": {"bf16-s1": 5}}', "results.json: bf16-s1: it is 5, not an object"),
    ],
)
def test_a_selection_replaces_no_other_results(whole, tmp_path, capsys, content, says):
    stored = tmp_path / "report" / "results.json"
    stored.parent.mkdir()
    stored.write_text(content)
    assert cli.main(["study", "report", str(whole[0]), "--out", str(tmp_path), "--arms", "fp8"]) == 2
    assert says in capsys.readouterr().err and stored.read_text() == content


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(file of a study of two arms on two seeds, content of its results.json). fp8-s1 has every field."""
    folder = tmp_path_factory.mktemp("whole")
    blocks = [{"purpose": "estimate", "seeds": [1, 2]}]
    _, planned, file = synthetic.study(folder, arms=dict.fromkeys(ARMS[:2]), blocks=blocks)
    for each in planned:
        synthetic.run(folder / "runs", each, 4 + 0.1 * each.seed, sharpness=0.5, valid_unigram_entropy=7.0)
    report(file, folder / "runs")
    tree = json.loads((folder / "runs" / "report" / "results.json").read_text())
    tree["runs"]["fp8-s1"] |= {
        "rms_spikes": {"events": 2, "spikes": 1, "preceded": 1, "chance": 0.1},
        "start_state": {"trunk": "t", "step": 1, "checkpoint": "a"},
    }
    return file, tree


def changed(tree, path, value):
    """A copy of results.json with another value at this place of fp8-s1, or without one."""
    made = copy.deepcopy(tree)
    *above, last = ("runs", "fp8-s1", *path)
    at = reduce(operator.getitem, above, made)
    if value is ABSENT:
        del at[last]
    else:
        at[last] = value
    return json.dumps(made)


ABSENT = object()
STRANGE = (ABSENT, None, True, "a text", -5, 0, 10**400, 1e400, [], {}, [None], {"a": None})
START = "not {} or an object with a text `trunk`, a whole number `step` and a text `checkpoint`"


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ((), 5, "it is 5, not an object"),
        (("loss",), "abc", 'loss is "abc", not a number'),
        (("loss",), None, "loss is null, not a number"),
        (("loss",), [1], "loss is [1], not a number"),
        (("loss",), ABSENT, "it lacks loss"),
        (("sharpness",), True, "sharpness is true, not a number or null"),
        (("unstable",), None, "unstable is null, not a text"),
        (("tokens",), "x", 'tokens is "x", not a whole number above 0'),
        (("tokens",), -5, "tokens is -5, not a whole number above 0"),
        (("steps",), 0, "steps is 0, not a whole number above 0"),
        (("parameters",), 10**20, f"parameters is {10**20}, not a whole number above 0"),
        (("rms_spikes",), {"events": 1}, "rms_spikes lacks spikes"),
        (("valid",), {}, "valid lacks steps"),
        (("valid",), {"steps": [1, 2], "values": [4.0]}, "valid.steps has length 2, and valid.values 1"),
        (("valid",), {"steps": [1, 1], "values": [4, 4]}, "valid.steps[1] is 1, not above 1"),
        (("valid", "steps"), "x", 'valid.steps is "x", not a list'),
        (("valid", "values", 2), "x", 'valid.values[2] is "x", not a number'),
        (("facts",), [], "facts is [], not an object"),
        (("facts", "corpus_hash"), ABSENT, "facts lacks corpus_hash"),
        (("facts", "held_out"), 3, "facts.held_out is 3, not two whole numbers, or null for one that is not known"),
        (("facts", "valid_unigram_entropy"), "x", 'facts.valid_unigram_entropy is "x", not a finite number'),
        (("start_state",), [1], f"start_state is [1], {START}"),
        (("start_state",), {"a": 1}, f'start_state is {{"a": 1}}, {START}'),
    ],
)
def test_one_error_names_the_file_the_run_and_the_field(whole, tmp_path, capsys, place, value, says):
    file, tree = whole
    damaged = tmp_path / "damaged.json"
    damaged.write_text(changed(tree, place, value))
    error = refused(capsys, file, tmp_path / "new", damaged)
    assert error == f"lowprec study: error: {damaged}: fp8-s1: {says}\n"


def places(value, *path):
    """The path of every value inside."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, *path, key)


def test_a_report_is_made_of_what_has_no_fault(whole, tmp_path):
    """Of each value of a run that is absent or another."""
    file, tree = whole
    study, damaged, faults = definition.load(file), tmp_path / "damaged.json", 0
    planned = plan.runs(study)
    for place in places(tree["runs"]["fp8-s1"]):
        for value in STRANGE[: 1 if place[-1] == "configuration" else None]:
            damaged.write_text(changed(tree, place, value))
            try:
                stored = stored_results.read([damaged], planned, study.name)
            except ValueError:
                faults += 1
                continue
            try:
                found, left = results.read(planned, tmp_path, stored)
            except ValueError as error:
                assert place[-1] == "corpus_hash", error
                continue
            measured = measure.measure(study, found, left)
            assert texts.to_json(measured) and texts.to_markdown(measured, study, figure="x.svg")
    assert faults > 200
    for place in (("sharpness",), ("rate",), ("facts", "device"), ("rms_spikes",)):
        damaged.write_text(changed(tree, place, None))
        assert stored_results.read([damaged], planned, study.name)


def test_published_results_have_no_fault():
    files = list(RESULTS.glob("study_*_runs.json"))
    runs = [run for file in files for run in json.loads(file.read_text())["runs"].values()]
    assert len(files) >= 3 and [each for each in map(stored_results.fault, runs) if each] == []


def test_forks_of_another_state_are_refused(parts, tmp_path, capsys):
    file, _, (first, _) = parts
    stored = json.loads(first.read_text())
    for name, checkpoint in (("bf16-s1", "a"), ("fp8-s1", "b")):
        stored["runs"][name]["start_state"] = {"trunk": "t", "step": 1, "checkpoint": checkpoint}
    first.write_text(json.dumps(stored))
    assert "did not begin with the same state of t" in refused(capsys, file, tmp_path / "new", first)


def test_the_digest_leaves_out_places(tmp_path):
    """The same text in another place is the same configuration; another learning rate is not."""
    blocks = [{"purpose": "estimate", "seeds": [1]}]

    def digest(*overrides):
        _, planned, _ = synthetic.study(
            tmp_path, arms={"bf16": None}, blocks=blocks, overrides=["steps=400", "data=indexed", *overrides]
        )
        return stored_results.configuration_digest(planned[0])

    here = digest("data.train=/a/train", "data.valid=/a/val", "data.split=null")
    assert here == digest("data.train=/b/x", "data.valid=/b/y", "data.split=null")
    assert here != digest("data.train=/a/train", "data.valid=/a/val", "data.split=null", "optim.lr=2e-3")
