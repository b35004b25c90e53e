"""A stranger's test: docs/adding_a_recipe.md, followed to the letter in an empty directory, trains a new recipe."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parent.parent / "docs" / "adding_a_recipe.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), flags=re.DOTALL | re.MULTILINE)


def file_named(extension: str) -> str:
    """The file that a heading of the document names."""
    return re.search(rf"^## .*`([\w/]+\.{extension})`", DOCUMENT.read_text(), flags=re.MULTILINE).group(1)


def run(script: str, directory: Path) -> str:
    """A shell block of the document, with the interpreter of this test as `python`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stranger")
    for language, extension in (("python", "py"), ("yaml", "yaml")):
        (text,) = blocks(language)
        path = directory / file_named(extension)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_a_new_recipe_is_one_file_and_one_yaml(workplace):
    train, compare = blocks("bash")
    run(train, workplace)
    lines = [json.loads(line) for line in (workplace / "runs/first/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 3 and all(0 < loss < 20 for loss in losses)
    assert (workplace / "runs/first/DONE").exists()

    effective = json.loads((workplace / "runs/first/recipe.json").read_text())
    gemms = effective["blocks.0.attention.qkv"]["gemms"]
    assert "E5M2" in gemms["dgrad"] and "SR" in gemms["dgrad"] and "RHT 64" in gemms["dgrad"]
    assert "E2M1" not in json.dumps(effective), "the recipe is the document's own, not a shipped one"

    report = run(compare, workplace)
    assert "fp8_rotated" in report and "bf16" in report
    baseline = (workplace / "runs/baseline/metrics.jsonl").read_text().splitlines()
    assert json.loads(baseline[0])["train/loss"] != losses[0], "the recipe changed nothing"
