"""Documentation that stays true: links resolve, commands compose, keys exist, recipes and releases are listed."""

import re
import shlex
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lowprec_train import config
from lowprec_train.precision import gemm
from lowprec_train.precision.gemm_path import Path as GemmPath
from lowprec_train.tools import cli
from lowprec_train.train import build

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TRAIN = r"(?:torchrun|python)(?: --\S+)* (?:train\.py|-m lowprec_train\.main)"
TRAIN += r"|lowprec train(?: --(?:gpus|nproc) \S+)?"
LAUNCHES = re.compile(rf"^ *(?:{TRAIN}|sbatch .*?/train\.sbatch) (.*)$", flags=re.MULTILINE)
TOOLS = re.compile(r"^ *(?:torchrun .*-m lowprec_train\.tools\.cli|lowprec) (.*)$", flags=re.MULTILINE)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def composed(overrides: list[str]) -> DictConfig:
    config.register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", overrides=overrides)


def commands(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(document, arguments) of every such command in the documentation, continued lines joined."""
    texts = ((relative(path), path.read_text().replace("\\\n", " ")) for path in DOCUMENTS)
    return [(name, line) for name, text in texts for line in pattern.findall(text)]


def anchors(text: str) -> set[str]:
    """The fragments that a Markdown file offers: its headings, lower case, spaces as dashes, signs dropped."""
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_resolve(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{relative(document)} links to {target}, which does not exist"
        if fragment:
            assert fragment in anchors(path.read_text()), f"{relative(document)}: no heading for {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_lines_have_120_columns(document):
    """Tables, and lines without a space to break at, may be longer; pages of results quote what programs wrote."""
    if "results" in document.parts:
        return
    lines = enumerate(document.read_text().splitlines(), start=1)
    long = {number: line for number, line in lines if len(line) > 120 and not line.startswith("|")}
    assert not {number for number, line in long.items() if " " in line.strip()}


def test_changelog_has_this_version():
    assert re.search(rf"^## \[?{re.escape(VERSION)}\b", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)


def test_recipes_are_documented():
    """Each recipe has its precision file, its bundle, and a row in the README and in docs/recipes.md."""
    bundles, files = (
        {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")} for group in ("recipe", "precision")
    )
    assert bundles and bundles == files
    for document in (ROOT / "README.md", ROOT / "docs" / "recipes.md"):
        rows = set(re.findall(r"^\| *`?(\w+)`? *\|", document.read_text(), flags=re.MULTILINE))
        assert bundles <= rows, f"{relative(document)} has no row for {sorted(bundles - rows)}"


@pytest.mark.parametrize("recipe", config.choices("recipe"))
def test_every_recipe_has_its_page(recipe, monkeypatch):
    """Source, command, and for each GEMM the path that a GPU with FP8 tensor cores really takes."""
    text = (ROOT / "docs" / "recipes" / f"{recipe}.md").read_text()
    assert text.startswith(f"# `{recipe}`\n") and re.search(r"arXiv \[\d{4}\.\d{5}\]\(https://arxiv\.org/abs/", text)
    assert f"\n    torchrun train.py +recipe={recipe}\n" in text
    assert {"gemms", "errors", "options", "published-results"} <= anchors(text)
    monkeypatch.setattr(gemm, "capability_of", lambda device: (9, 0) if device.type == "cuda" else None)
    model = OmegaConf.to_object(composed([f"+recipe={recipe}", "model=llama_7b", "model.layers=2"]))
    laid_out = build.layout(model)
    plans = laid_out.plans(torch.device("cuda", 0))[0]
    told = dict(re.findall(r"^\| (fprop|dgrad|wgrad) \| .* \| `(\w+)` \|$", text, flags=re.MULTILINE))
    assert told == plans["blocks.0.mlp.down"].paths()


def test_the_policy_of_the_page_works(tmp_path):
    """The precision file of docs/recipes.md, from a directory of its own."""
    (written,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), flags=re.DOTALL)
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "fp8_edges.yaml").write_text(written)
    run = composed([f"hydra.searchpath=[file://{tmp_path}]", "precision=fp8_edges", "model.layers=10"])
    laid_out = build.layout(OmegaConf.to_object(run))
    first, last = (phase.recipes for phase in laid_out.phases)
    plain = [name for name, recipe in first.items() if recipe.is_identity]
    assert plain == [name for name in first if name.startswith(("blocks.0.", "blocks.9.", "head"))]
    assert (
        first["blocks.1.mlp.down"].fprop.a.tile == (1, -1)
        and first["blocks.8.attention.qkv"].dgrad.a.format.name == "E4M3"
    )
    assert last["blocks.1.attention.qkv"].fprop.codes_only and laid_out.phases[1].first_step == 246


def test_the_linter_is_documented():
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (error|warning)(, GPU)? \|", text, flags=re.MULTILINE)
    assert [(name, severity) for name, severity, _ in rows] == [(r.name, r.severity.value) for r in build.LINT_RULES]


def test_decisions_say_what_they_prevent():
    records = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert len(records) >= 10
    for record in records:
        assert {"decision", "failure-it-prevents"} <= anchors(record.read_text()), relative(record)


@pytest.mark.parametrize(
    ("document", "line"), [each for each in commands(LAUNCHES) if "hydra.searchpath" not in each[1]]
)
def test_commands_compose(document, line):
    """Every training command of the documentation is one that Hydra accepts, sweeps by their first value."""
    overrides = [word for word in shlex.split(line, comments=True) if not word.startswith("--")]
    assert overrides or "--help" in line, document
    of_no_file = "model=from_checkpoint"
    overrides = ["model=llama_tiny" if word == of_no_file else word for word in overrides]
    sweeps = "--multirun" in line
    OmegaConf.to_object(composed([word.split(",")[0] if sweeps else word for word in overrides]))


@pytest.mark.parametrize(("document", "line"), commands(TOOLS))
def test_tools_take_their_commands(document, line):
    """Every `lowprec` command of the documentation parses; pages of results quote what a program wrote."""
    words = shlex.split(re.sub(r"\[--[^]]*\]", "", line), comments=True)  # without what a synopsis has in brackets
    if not document.startswith("docs/results/"):
        assert callable(cli.parse(words).run)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_files_that_are_named_are_there(document):
    """Tests and scripts that a page names, in commands or to be looked at."""
    places = r"(?<![\w/.])(?:tests|scripts|docker)/[\w/]+\.(?:py|sh|sbatch)\b"
    missing = [place for place in re.findall(places, document.read_text()) if not (ROOT / place).exists()]
    assert not missing


def flat(tree: dict, prefix: str = "") -> set[str]:
    """Dotted names of a configuration, groups included."""
    inner = [flat(value, f"{prefix}{key}.") for key, value in tree.items() if isinstance(value, dict)]
    return {f"{prefix}{key}" for key in tree}.union(*inner)


def test_keys_of_the_migration_table_exist():
    """Keys in the third column, `model.dim` or `compile=auto`, are in the composed configuration of their group."""
    variants = [["data=stdlib"], ["data=indexed"], ["data=text"], ["optim/schedule=wsd", "logger=wandb"]]
    known = set().union(*(flat(OmegaConf.to_container(composed(each), resolve=False)) for each in variants))
    rows = [line.split("|") for line in (ROOT / "docs/migrating.md").read_text().splitlines() if line.startswith("| ")]
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row[3])]
    named = {key for code in codes for key in re.findall(r"(?:^|[ '])([a-z][\w.]*)=", code)}
    named |= {code for code in codes if re.fullmatch(r"[a-z]\w*(\.\w+)+", code)} - {"metrics.jsonl"}
    named = {key for key in named if not key.startswith("precision.override.")}
    assert len(named) > 35
    assert named <= known, f"docs/migrating.md names keys that do not exist: {sorted(named - known)}"


def test_the_picture_of_the_architecture_is_of_this_tree():
    """docs/architecture.svg draws every package on its floor, every configuration group and every path of a GEMM."""
    drawn = ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot()
    named = {part.get("id"): part for part in drawn.iter() if part.get("id")}
    texts = [each for each in named["floors"] if each.tag.endswith("text")]
    heights = sorted({int(each.get("y")) for each in texts})
    floors = [{each.text for each in texts if int(each.get("y")) == height} for height in heights]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert floors == [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]]
    modules = {path.stem for path in (ROOT / "lowprec_train").iterdir() if re.fullmatch(r"[a-z]\w*(\.py)?", path.name)}
    assert set().union(*floors) == modules - {"configs"}
    groups = {each.text for each in named["groups"] if each.tag.endswith("text")}
    assert groups == {path.name for path in (ROOT / "configs").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert set(named["paths"].text.split("  |  ")) == {path.value for path in GemmPath}
    assert "not built" not in (ROOT / "docs" / "architecture.svg").read_text()
