"""A stranger's tests: docs/adding_a_*.md, followed to the letter in an empty directory: a Python file and a YAML."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowprec_train.ops import kernels
from tests.launches import training

DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Workplace:
    """A directory with the two files of a document, and its shell blocks."""

    directory: Path
    scripts: list[str]

    def run(self, script: str) -> str:
        """A shell block, with the interpreter of this test as `python`; what it printed."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def losses(self, run: str) -> list[float]:
        """Of the steps of a run that is done."""
        assert (self.directory / "runs" / run / "DONE").exists()
        lines = (self.directory / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [each["train/loss"] for each in map(json.loads, lines) if "train/loss" in each]

    def gemms(self, run: str) -> dict[str, str]:
        """Of a layer in a block, in words."""
        recipe = json.loads((self.directory / "runs" / run / "recipe.json").read_text())
        return recipe["blocks.0.attention.qkv"]["gemms"]


def followed(name: str, directory: Path) -> Workplace:
    """The files that the headings of a document name, with the blocks below them; nothing else."""
    text = (DOCS / name).read_text()
    blocks = {
        language: re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        for language in ("python", "yaml", "bash")
    }
    for language, extension in (("python", "py"), ("yaml", "yaml")):
        (content,) = blocks[language]
        path = directory / re.search(rf"^## .*`([\w/]+\.{extension})`", text, flags=re.MULTILINE).group(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Workplace(directory, blocks["bash"])


def test_a_new_recipe_is_one_file_and_one_yaml(tmp_path):
    place = followed("adding_a_recipe.md", tmp_path)
    train, compare = place.scripts
    place.run(train)
    losses = place.losses("first")
    assert len(losses) == 3 and all(0 < loss < 20 for loss in losses)
    dgrad = place.gemms("first")["dgrad"]
    assert "E5M2" in dgrad and "SR" in dgrad and "RHT 64" in dgrad
    assert "E2M1" not in (tmp_path / "runs/first/recipe.json").read_text(), "the recipe is not the document's own"
    report = place.run(compare)
    assert "fp8_rotated" in report and "bf16" in report
    assert place.losses("baseline")[0] != losses[0], "the recipe changed nothing"


def test_a_new_format_and_rounding_are_one_file_and_one_yaml(tmp_path):
    place = followed("adding_a_format.md", tmp_path)
    said = [place.run(script) for script in place.scripts]
    assert place.gemms("first")["dgrad"] == "E3M2[1x*] FP32 stochastic_4 x E3M2[1x*] FP32"
    assert place.gemms("nearest")["dgrad"] == "E3M2[1x*] FP32 x E3M2[1x*] FP32"
    first, nearest = place.losses("first"), place.losses("nearest")
    assert all(0 < loss < 20 for loss in first + nearest)
    assert first[0] == nearest[0] and first[1:] != nearest[1:], "gradients are rounded alike"
    line = re.search(
        r"^    (warning: .* no compiled kernel .*)$", (DOCS / "adding_a_format.md").read_text(), re.MULTILINE
    )[1]
    served = "cpu" in kernels.present()  # without compiled kernels there is nothing that could not know a format
    assert [text.count("no compiled kernel") for text in said] == [served, served]
    assert (line in said[0]) == served


def test_a_new_model_variant_is_one_file_and_one_yaml(tmp_path):
    place = followed("adding_a_model.md", tmp_path)
    train, use = place.scripts
    assert "llama_qk_norm" in place.run(train)
    assert all(0 < loss < 20 for loss in place.losses("first"))
    place.run(use)
    plain = train.replace("model=llama_qk_norm", "model=llama_tiny").replace("name=first", "name=plain")
    place.run(plain)
    assert place.losses("plain") != place.losses("first"), "the variant changed nothing"
    exported = "! PYTHONPATH=. lowprec export-hf runs/first --out out"
    assert "attention=qk_norm.QKNorm" in place.run(exported)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.attention=nowhere.Attention", "nowhere"),
        ("model.attention=json.Attention", "Attention"),
        ("model.attention=window", "unknown attention 'window'; one of: causal"),
    ],
)
def test_a_class_that_is_not_there_is_one_error(setting, says, tmp_path):
    process = training(tmp_path / "output", "+recipe=bf16", setting, "steps=1")
    assert process.wait(60) == 1
    said = process.output.read_text()
    assert says in said and "Traceback" not in said
