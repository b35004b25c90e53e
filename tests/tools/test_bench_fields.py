"""`lowprec bench report`: of a result that lacks a part, one error names the file and the part."""

import copy
import json
import math
from pathlib import Path

import pytest

from lowprec_train.tools import cli
from lowprec_train.tools.bench import fields, report, result

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NAMES = {
    "kernels": "kernels",
    "gemm": "gemm",
    "linear": "linear",
    "step": "step_llama_7b_8layers",
    "comm": "comm_4_h100",
    "parallel": "parallel_llama_7b_4_h100",
    "memory": "memory_llama_7b_8layers",
}
STRANGE = (None, True, "a text", 3, [], {}, [None], {"a": None}, [{}])


def stored(bench):
    """A short copy of a result of docs/results."""
    whole = json.loads((RESULTS / f"{NAMES[bench]}.json").read_text())
    whole["rows"] = [row | ({"marks": row["marks"][-3:]} if "marks" in row else {}) for row in whole["rows"][:2]]
    if profiles := whole.get("profiles"):
        name, profile = next(iter(profiles.items()))
        whole["profiles"] = {name: profile | {"longest": profile["longest"][:2]}}
    if "exactness" in whole:
        whole["exactness"] = whole["exactness"][:1]
    return whole | {"options": {}, "environment": {"gpu": "x", "torch": "2", "command": "lowprec bench"}}


def places(value, *path):
    """The path of every value inside."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from places(each, *path, key)


def changed(whole, path, change):
    """A copy in which `change(container, key)` has been called for one path."""
    made = copy.deepcopy(whole)
    at = made
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return made


def every_change(whole):
    for path in places(whole):
        if path != ("bench",):
            yield changed(whole, path, lambda at, key: at.pop(key))
            for strange in STRANGE:
                yield changed(whole, path, lambda at, key, value=strange: at.__setitem__(key, value))


@pytest.mark.parametrize("bench", NAMES)
def test_a_table_is_made_of_what_has_no_fault(bench):
    """Of each value that is absent, null or of another type."""
    whole, faults = stored(bench), 0
    assert fields.fault(whole) == "" and report.markdown(whole)
    for each in every_change(whole):
        if fields.fault(each):
            faults += 1
        else:
            assert report.markdown(each)
    assert faults > 40


def test_all_stored_results_are_whole():
    for file in RESULTS.glob("*.json"):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and content.get("bench") in report.TABLES:
            assert result.load(file) == content


@pytest.mark.parametrize(
    ("bench", "path", "change", "says"),
    [
        ("step", ("rows", 1, "tokens_per_s"), "absent", "rows[1] lacks tokens_per_s"),
        ("step", ("sizes",), "absent", "it lacks sizes"),
        ("step", ("profiles",), "absent", "it lacks profiles"),
        ("step", ("rows",), None, "rows is null, not a list"),
        ("step", ("rows", 0, "loss", 1), "low", 'rows[0].loss[1] is "low", not a number'),
        ("step", ("rows", 0), 7, "rows[0] is 7, not an object"),
        ("step", ("environment",), {}, "environment lacks gpu"),
        ("step", ("rows", 0, "loss"), [], "rows[0].loss is [], not a list of at least 1"),
        ("step", ("rows", 0, "ms"), 0, "rows[0].ms is 0, not a positive number"),
        ("kernels", ("rows", 1, "of_copy"), math.inf, "rows[1].of_copy is Infinity, not a finite number"),
        ("kernels", ("rows", 1, "ms"), None, "rows[1].ms is null, not a finite number"),
        ("linear", ("rows", 0, "ms", "fp8"), 0, "rows[0].ms.fp8 is 0, not a positive number"),
        ("memory", ("batches",), [], "batches is [], not a list of at least 1"),
        ("parallel", ("rows", 0, "baseline"), None, "rows[0].baseline is null, not true or false"),
    ],
)
def test_one_error_names_the_file_and_what_it_lacks(bench, path, change, says, tmp_path, capsys):
    def put(at, key):
        at.pop(key)
        if change != "absent":
            at[key] = change

    def insert(at, key):
        at[key] = change

    made = changed(stored(bench), path, insert if isinstance(path[-1], int) else put)
    file = tmp_path / "x.json"
    file.write_text(json.dumps(made))
    assert cli.main(["bench", "report", str(file)]) == 2
    said = f"lowprec bench: error: {file} is not a complete result of `lowprec bench {bench}`: {says}\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"9" * 5000, b"[" * 100_000, b"{"])
def test_a_file_that_is_not_json_is_named(content, tmp_path, capsys):
    (tmp_path / "x.json").write_bytes(content)
    assert cli.main(["bench", "report", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.startswith(f"lowprec bench: error: {tmp_path / 'x.json'} is not JSON: ")


def test_a_failed_row_needs_its_error_alone(capsys, tmp_path):
    whole = stored("memory")
    whole["rows"][1] = {"name": "fp8", "error": "out of memory"}
    (tmp_path / "x.json").write_text(json.dumps(whole))
    assert cli.main(["bench", "report", str(tmp_path / "x.json")]) == 0
    assert "| fp8 | out of memory |" in capsys.readouterr().out


def test_a_figure_needs_the_mark_of_the_loss(tmp_path, capsys):
    whole = stored("memory")
    for row in whole["rows"]:
        row["marks"] = row["marks"][-1:]
    (tmp_path / "x.json").write_text(json.dumps(whole))
    assert cli.main(["bench", "report", str(tmp_path / "x.json"), "--figure", str(tmp_path / "x.svg")]) == 2
    assert "do not have the loss" in capsys.readouterr().err
