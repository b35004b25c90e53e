"""The images: what hadolint would say of the Dockerfiles, and the smoke script, composed by day and run by night.

No test builds an image: that takes a daemon and a base of 20 GB.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tests.test_docs import composed

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
SMOKE = DOCKER / "smoke.sh"
FILES = sorted(DOCKER.glob("Dockerfile*"))
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "WORKDIR", "ENV", "COPY", "RUN", "CMD"}
PINNED = re.compile(r"(python:3\.1[12]-slim|nvcr\.io/nvidia/pytorch:2\d\.\d\d-py3)")
TINY = (
    *("model.layers=1", "model.dim=64", "model.ffn=64", "model.heads=2", "model.kv_heads=2"),
    *("model.vocab_size=512", "data.vocab_size=512", "data.seq_len=32", "micro_batch=4", "tokens_per_step=128"),
    *("eval_batches=1", "optim.lr=1e-2", "optim.schedule.warmup_fraction=0", "steps=6"),
)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, comments dropped and continued lines joined."""
    kept = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in kept.replace("\\\n", " ").splitlines() if line.strip()]


def ignored() -> list[str]:
    return [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_dockerfiles_lint(file):
    lines = instructions(file)
    words = [word for word, _ in lines]
    assert set(words) <= INSTRUCTIONS and words[-1] == "CMD" and words.count("FROM") == 1
    bases = [rest for word, rest in lines[: words.index("FROM") + 1]]
    assert PINNED.fullmatch(bases[0].removeprefix("BASE=")), f"{file.name}: the base {bases} is not pinned"
    for word, rest in lines:
        if word == "ARG":
            name = rest.partition("=")[0]
            readers = (file.read_text() + (ROOT / "Makefile").read_text()).count(name)
            assert readers > 1, f"{file.name}: ARG {name} is not used"
        if word == "WORKDIR":
            assert rest.startswith("/")
        for command in re.split(r"&&|\|\|", rest) if word == "RUN" else ():
            if "apt-get install" in command:
                assert "-y --no-install-recommends" in command and "rm -rf /var/lib/apt/lists/*" in rest
            if command.strip().startswith("pip install"):
                assert "--no-cache-dir" in command and " -c " in command, command
            assert not re.search(r"\b(sudo|curl|wget)\b", command), command
            subprocess.run(["bash", "-n", "-c", command.strip()], check=True)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_what_an_image_needs_is_there(file):
    """COPY takes files that exist and are not ignored; what RUN calls has been copied before; CMD can be run."""
    copied: set[Path] = set()
    for word, rest in instructions(file):
        if word == "COPY":
            sources = rest.split()[:-1]
            for source in sources:
                assert (ROOT / source).exists(), f"{file.name} copies {source}, which does not exist"
                assert source not in ignored(), f"{file.name} copies {source}, which .dockerignore leaves out"
            copied |= {Path(source) for source in sources}
        if word == "RUN":
            for named in re.findall(r"\b(?:scripts|docker)/[\w.]+", rest):
                assert {Path(named), *Path(named).parents} & copied, f"{file.name} runs {named} before it is copied"
            for extras in re.findall(r"'\.\[([\w,]+)\]'", rest):
                known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert set(extras.split(",")) <= set(known)
        if word == "CMD":
            command = json.loads(rest)
            assert command[0] == "make" or os.access(ROOT / command[0], os.X_OK)


def test_pins_leave_what_is_installed_alone():
    spec = importlib.util.spec_from_file_location("pins", DOCKER / "pins.py")
    pins = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pins)
    lines = ["torch==2.13.0", "# torch", "", "PyYAML==6.0.3", "scikit_build_core==1.1.2", "hydra-core==1.3.8"]
    taken = {pins.named(each) for each in ("torch", "pyyaml>=5", "scikit-build_core==1.0 ; python_version>'3'", "")}
    assert pins.missing(lines, taken) == ["hydra-core==1.3.8"]


def smoke(*arguments, path):
    variables = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    variables |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run([SMOKE, *arguments], env=variables, capture_output=True, text=True, input="")


@pytest.fixture
def recorder(tmp_path):
    """A `python` and a `torchrun` that write down what they are given."""
    for name in ("python", "torchrun"):
        script = tmp_path / name
        script.write_text(f'#!/usr/bin/env bash\n{{ printf "%s\\0" {name} "$@"; cat; }} >>"{tmp_path}/record-$$"\n')
        script.chmod(0o755)
    return tmp_path


def test_the_smoke_script_composes(recorder):
    """Its programs parse, and Hydra takes the command of each run."""
    done = smoke("steps=5", "model=gpt_tiny", path=recorder)
    assert done.returncode == 0 and "=== apex" in done.stdout and "this machine trains" in done.stdout, done
    records = [file.read_text().split("\0") for file in recorder.glob("record-*")]
    programs = [record[-1] for record in records if record[0] == "python"]
    assert len(programs) == 6 and all(ast.parse(program).body for program in programs)
    runs = [record[1:-1] for record in records if record[0] == "torchrun"]
    assert sorted(run[3] for run in runs) == ["+recipe=fp4", "+recipe=fp8"]
    for run in runs:
        assert run[:3] == ["--standalone", "--nproc-per-node=1", "train.py"] and "device=cuda" in run
        options = OmegaConf.to_object(composed(run[3:]))
        assert options.steps == 5 and options.model.name == "gpt_tiny"


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [(["--cpu"], {"imports", "kernels"}), (["--without", "te"], {"imports", "kernels", "apex"})],
)
def test_the_smoke_script_leaves_out(recorder, arguments, stages):
    done = smoke(*arguments, path=recorder)
    told = set(re.findall(r"^=== (\w+) \(", done.stdout, flags=re.MULTILINE))
    assert done.returncode == 0 and told - {"fp8", "fp4"} == stages


def test_the_smoke_script_refuses_what_it_does_not_know(recorder):
    assert smoke("--gpu", path=recorder).returncode == 2


@pytest.mark.nightly
def test_the_smoke_script_on_a_cpu():
    done = smoke("--cpu", *TINY, path=Path(sys.executable).parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"loss [\d.]+ -> [\d.]+ in 6 steps; GEMMs by path:", done.stdout)) == 2


def test_commands_of_the_images_name_files():
    """`docker build -f FILE` in comments and documents."""
    texts = [*(file.read_text() for file in FILES), *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    named = [words[words.index("-f") + 1] for text in texts for words in map(shlex.split, builds(text))]
    assert {"docker/Dockerfile", "docker/Dockerfile.cpu"} <= set(named)
    assert all((ROOT / name).is_file() for name in named)


def test_the_workflow_builds_every_image():
    """And runs in the one that needs no GPU; its filters name what is there."""
    text = (ROOT / ".github" / "workflows" / "images.yml").read_text()
    workflow = yaml.load(text, Loader=yaml.BaseLoader)  # `on` stays a string
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    texts = [step["run"] for step in steps if "run" in step]
    built = {words.split()[-1] for text in texts for words in builds(text)}
    assert built == {f"docker/{file.name}" for file in FILES}
    assert any("docker/smoke.sh --cpu" in text for text in texts)
    for path in workflow["on"]["push"]["paths"]:
        assert (ROOT / path.removesuffix("/**")).exists(), path


def builds(text: str) -> list[str]:
    return re.findall(r"docker build -f \S+", text)
