"""Every table of docs/results has the command that makes it, and each command is one of today's."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lowprec_train.tools import cli
from tests.test_docs import ROOT, anchors, composed

RULE = re.compile(r"^\|[ :|-]+\|$", re.MULTILINE)  # the line below a table's head
RESULTS = [page for page in sorted((ROOT / "docs" / "results").glob("*.md")) if RULE.search(page.read_text())]
TABLES = (ROOT / "docs" / "examples" / "tables.md").read_text()
SECTIONS = dict(
    re.findall(r"^## (\w+)\n\nOf \[\1\]\(\.\./results/\1\.md\)\. (.*?)(?=^## |\Z)", TABLES, re.DOTALL | re.MULTILINE)
)
TORCHRUN = re.compile(r"torchrun (?:--nproc-per-node \d+ )?(-m lowprec_train\.tools\.cli|train\.py) ")


def commands(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    return [" ".join(line.split()) for line in re.findall(r"^    (\S.*)$", joined, re.MULTILINE)]


def tables(page: Path) -> int:
    return len(RULE.findall(page.read_text()))


def told(section: str) -> set[int]:
    """The numbers of `Table 1`, `Tables 2 and 3` and `tables 2 to 21`."""
    found: set[int] = set()
    for first, word, last in re.findall(r"\b[Tt]ables? (\d+)(?: (and|to) (\d+))?", section):
        found |= {*range(int(first), int(last or first) + 1)} if word == "to" else {int(first), int(last or first)}
    return found


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.stem)
def test_every_table_has_its_command(page):
    section = SECTIONS[page.stem]
    assert commands(section) and told(section) == {*range(1, tables(page) + 1)}


@pytest.mark.parametrize("command", [each for section in SECTIONS.values() for each in commands(section)])
def test_commands_are_of_today(command):
    """Tools parse; runs compose; scripts are there."""
    if command.startswith("python "):
        assert (ROOT / command.split()[1]).is_file()
        return
    launched = TORCHRUN.match(command)
    words = shlex.split(command[launched.end() :] if launched else command.removeprefix("lowprec "))
    if launched and launched[1] == "train.py":
        OmegaConf.to_object(composed(words))
    else:
        assert callable(cli.parse(words).run)


def test_pages_and_their_commands_agree():
    """A page that quotes its command quotes the one of its section, but for quotes that its program left out."""
    for page in RESULTS:
        quoted = [each for each in commands(page.read_text()) if each.startswith(("lowprec bench", "torchrun"))]
        given = {each.replace("'", "") for each in commands(SECTIONS[page.stem])}
        assert {each.replace("'", "") for each in quoted} <= given, page.name
    assert set(SECTIONS) == {page.stem for page in RESULTS}


def test_the_notebook_is_stored_without_outputs():
    """Its text is small, its links lead somewhere, and its recipe is the one of the page that it names."""
    path = ROOT / "docs" / "notebooks" / "roundings.ipynb"
    cells = json.loads(path.read_text())["cells"]
    assert path.stat().st_size < 20_000 and not any(cell.get("outputs") for cell in cells)
    sources = ["".join(cell["source"]) for cell in cells]
    for target in re.findall(r"\]\(([^)#]+)", "\n".join(sources)):
        assert (path.parent / target).exists(), target
    page = (ROOT / "docs" / "adding_a_recipe.md").read_text()
    (recipe,) = [each for each in sources if each.startswith("%%writefile fp8_rotated.py")]
    assert recipe.partition("def recipe")[2] in page


def test_links_of_the_site():
    """Pages link as in the repository; the site maps them, files outside of docs/ to pages that show them."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "site" / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    uris = {
        ("README.md", "docs/data.md"): "data.md",
        ("docs/data.md", "../README.md"): "index.md",
        ("docs/recipes/fp4.md", "../../lowprec_train/recipes/fp4.py"): "source/lowprec_train/recipes/fp4.py.md",
        ("docs/examples/README.md", "../notebooks/roundings.ipynb"): "notebooks/roundings.md",
        ("docs/data.md", "https://hydra.cc"): None,
    }
    assert {(origin, target): pages.site_uri(origin, target) for origin, target in uris} == uris
    written = "[a](../../x.py#L3) and\n```\n[b](../../x.py)\n```\n"
    assert pages.mapped(written, lambda target: pages.site_uri("docs/a/b.md", target), "a") == (
        "[a](../source/x.py.md#L3) and\n```\n[b](../../x.py)\n```\n"
    )
    headings = "# One `two`: (three)\n## E4M3 x 2^e\n"
    assert {pages.slug("One two: (three)"), pages.slug("E4M3 x 2^e")} == anchors(headings)
    shown = pages.listing("scripts/site")
    assert "pages.py" in shown and pages.listing("LICENSE").startswith("# LICENSE\n\n````text\n")
