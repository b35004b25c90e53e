"""Pages of the site besides docs/: the README and similar files, notebooks, and the files that pages link to.

Pages link as on a code host, relative to their place in the repository. A link out of docs/ leads to a page of the site
that shows that file, so that every link works without a host. A folder in `nav` is replaced by its pages.
"""

import base64
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / "build" / "notebooks"  # of scripts/notebook.py; a notebook that is not there is shown without outputs
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def slug(heading: str, separator: str = "-") -> str:
    """The fragment of a heading as code hosts make it: lower case, spaces as dashes, signs dropped."""
    return re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", separator)


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    config.nav = [expanded(entry) for entry in config.nav]
    return config


def expanded(entry: dict[str, Any]) -> dict[str, Any]:
    """A section whose value is a folder, with its pages: the README first."""
    ((title, value),) = entry.items()
    if not (isinstance(value, str) and value.endswith("/")):
        return entry
    pages = sorted((ROOT / "docs" / value).glob("*.md"), key=lambda page: (page.stem != "README", page.stem))
    return {title: [{name(page): f"{value}{page.name}"} for page in pages]}


def name(page: Path) -> str:
    """Its first heading without markup, or the name of the file."""
    first = page.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ").replace("`", "") if first.startswith("# ") else page.stem.replace("_", " ")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    for source, uri in TOP.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        for uri, content in notebook_pages(notebook):
            files.append(File.generated(config, uri, content=content))
    for path in sorted(linked_files()):
        page = File.generated(config, shown(path), content=listing(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Convert links to those of the site; source listings do not change."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    origin = next((source for source, target in TOP.items() if target == uri), f"docs/{uri}")
    return mapped(markdown, lambda target: site_uri(origin, target), posixpath.dirname(uri))


def mapped(markdown: str, to_uri: Callable[[str], str | None], folder: str) -> str:
    """Markdown with the targets of its links, outside of fenced code, relative to the page's folder in the site."""

    def link(match: re.Match[str]) -> str:
        uri = to_uri(match[2])
        return match[0] if uri is None else f"{match[1]}{posixpath.relpath(uri, folder or '.')}{match[3] or ''}"

    parts = FENCED.split(markdown)
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def repository_path(origin: str, target: str) -> str | None:
    """Return the target of a page's link, from the root of the repository; None: it is outside."""
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return None if path.startswith("..") else path


def site_uri(origin: str, target: str) -> str | None:
    path = repository_path(origin, target)
    if path is None:
        return None
    if path in TOP:
        return TOP[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    return shown(path)


def shown(path: str) -> str:
    return f"source/{path}.md"


def linked_files() -> set[str]:
    """Files and folders outside of docs/ that a page links to."""
    origins = [*TOP, *(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))]
    found: set[str] = set()
    for origin in origins:
        text = FENCED.sub("", (ROOT / origin).read_text(encoding="utf-8"))
        paths = {repository_path(origin, match[2]) for match in LINK.finditer(text)}
        found |= {path for path in paths if path and path not in TOP and not path.startswith("docs/")}
    return {path for path in found if (ROOT / path).exists()}


def listing(path: str) -> str:
    """A page that shows a file, or the names in a folder."""
    place = ROOT / path
    if place.is_dir():
        content = "\n".join(sorted(each.name for each in place.iterdir() if not each.name.startswith((".", "__"))))
    else:
        content = place.read_text(encoding="utf-8")
    kind = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}.get(
        place.suffix, "text"
    )
    return f"# {path}\n\n````{kind}\n{content.rstrip()}\n````\n"


def notebook_pages(notebook: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook as a page of Markdown, and its pictures."""
    uri = notebook.relative_to(ROOT / "docs").with_suffix("").as_posix()
    run = EXECUTED / notebook.name
    cells = json.loads((run if run.exists() else notebook).read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{uri}_{number}.png"
                yield picture, base64.b64decode(data["image/png"])
                parts.append(f"![output of the cell above]({os.path.basename(picture)})")
            elif text := "".join(output.get("text", data.get("text/plain", []))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    yield f"{uri}.md", "\n\n".join(parts) + "\n"
