"""Parts of a study, trained on several machines, are reported as one study."""

import json
import shutil

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.study import stored_results
from tests.tools.study import synthetic

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
    assert "changed.json: fp8-s1: KeyError: 'steps'" in refused(capsys, file, tmp_path / "new", write(valid={}))
    changed.write_text(json.dumps(stored | {"study": "other"}))
    assert "not the results of study synthetic, but of 'other'" in refused(capsys, file, tmp_path / "new", changed)
    changed.write_text("{")
    assert "changed.json" in refused(capsys, file, tmp_path / "new", changed)


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
