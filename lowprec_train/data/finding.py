"""Find text files: .txt, .md and .jsonl, also as .gz, .xz or .zst and split into parts, and .parquet.

A directory gives all such files below it, sorted by path, e.g. a data set from a hub with directories of
`train-00000-of-00012.parquet`. Warnings name the skipped files: files of other kinds, and the README.md of a data set,
which describes it. Hidden files and directories are ignored.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from lowprec_train.data.sources import Source

_log = logging.getLogger(__name__)
_TEXT = ("txt", "md", "jsonl")
_ENDINGS = ".txt, .md or .jsonl (also .gz, .xz or .zst of these) or .parquet"
_NAME = re.compile(
    rf"(?P<whole>.+\.(?P<kind>{'|'.join(_TEXT)}|parquet)(?P<packed>\.gz|\.xz|\.zst)?)(?:\.(?P<part>\d+))?", re.DOTALL
)
_SHARD = re.compile(r"(?P<set>.+)-(?P<number>\d{4,})-of-(?P<count>\d{4,})\..+", re.DOTALL)
_SHOWN = 5  # names of skipped files in a message


def find(paths: Sequence[str | Path]) -> list[Source]:
    """Return the sources of the paths, in their order: for a directory all below it, sorted; for a part the whole file.

    Raises:
        ValueError: a path is missing or of another kind, a directory has no text, a part is missing or exists twice, a
            file is named twice, or as a whole and as its parts.
    """
    if not all(map(str, paths)):
        raise ValueError(f"empty corpus: no file is named in {[*map(str, paths)]}")
    found = [source for path in paths for source in _find(Path(path).expanduser())]
    if not found:
        raise ValueError(f"empty corpus: no files in {[str(path) for path in paths]}")
    once: dict[str, Source] = {}
    for source in found:
        first, whole = source.paths[0], location(source.whole)
        if whole in once and [*map(location, once[whole].paths)] != [*map(location, source.paths)]:
            raise ValueError(f"{source.whole}: exists whole and in parts; name one of the two, or remove it")
        if whole in once and len(source.paths) == 1:
            raise ValueError(f"{first}: named twice")
        once[whole] = source
    _warn_about_shards(once.values())
    return list(once.values())


def location(path: str | Path) -> str:
    """Return where a file lies, in one spelling: its own name in the directory that links lead to."""
    directory, name = os.path.split(path)
    return os.path.join(os.path.realpath(directory), name)


def files_below(directory: Path) -> list[Path]:
    """Return all files below a directory, sorted. Links to directories are followed, each directory once."""
    found: list[Path] = []
    seen: set[str] = set()
    for at, folders, names in os.walk(directory, followlinks=True):
        if (real := os.path.realpath(at)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found += [each for name in names if (each := Path(at, name)).is_file()]
    return sorted(found)


def _find(path: Path) -> list[Source]:
    if path.is_dir():
        below = [each for each in files_below(path) if not _hidden(each.relative_to(path))]
        inside = [each for each in below if _NAME.fullmatch(each.name)]
        unknown = [each.relative_to(path) for each in below if not _NAME.fullmatch(each.name)]
        others = f"{len(unknown)} other{'s' if len(unknown) > 1 else ''} ({shown(unknown)})" if unknown else ""
        if not inside:
            found = f", only {others}" if others else ""
            raise ValueError(f"empty corpus: {path} holds no file that ends in {_ENDINGS}{found}")
        if others:
            _log.warning("warning: %s: skipped files that do not end in %s: %s", path, _ENDINGS, others)
        return [_source(each, path) for each in _without_cards(inside, path)]
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory of text")
    if not _NAME.fullmatch(path.name):
        raise ValueError(f"{path}: not a text file that can be read: it must end in {_ENDINGS}")
    return [_source(path, path.parent)]


def _without_cards(files: list[Path], directory: Path) -> list[Path]:
    """Remove README.md if there is .parquet or .jsonl: it describes these files, as hubs require."""
    if all(_NAME.fullmatch(file.name)["kind"] in ("txt", "md") for file in files):  # type: ignore[index]
        return files
    cards = [file for file in files if file.name.lower() == "readme.md"]
    if cards:
        names = shown([card.relative_to(directory) for card in cards])
        _log.warning(
            "warning: %s: skipped, because it describes the data: %s; name it to read it too", directory, names
        )
    return [file for file in files if file not in cards]


def _warn_about_shards(sources: Iterable[Source]) -> None:
    """Warn about missing shards NAME-00003-of-00012, and about several sets, such as train and test, at once."""
    shards: dict[tuple[Path, str, int], set[int]] = defaultdict(set)
    for source in sources:
        if match := _SHARD.fullmatch(source.whole.name):
            shards[source.whole.parent, match["set"], int(match["count"])].add(int(match["number"]))
    for (directory, name, count), numbers in shards.items():
        if missing := sorted({*range(count)} - numbers):
            _log.warning(
                "warning: %s: of %d shards of %s %d are missing: %s",
                *(directory, count, name, len(missing), shown(missing)),
            )
    names = sorted({name for _, name, _ in shards})
    if {"train"} < {*names} and not {"test", "validation", "valid", "dev"}.isdisjoint(names):
        _log.warning("warning: %s are read as one set; name the files of one to keep them apart", ", ".join(names))


def shown(names: Sequence[object]) -> str:
    """Return at most five names for a message."""
    return ", ".join(map(str, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _source(path: Path, root: Path) -> Source:
    """Return the source of a file or a part, named relative to `root`."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    whole = path.with_name(match["whole"])
    if match["kind"] == "parquet" and match["part"] is not None:
        raise ValueError(f"{path}: .parquet files are not read in parts; put these together as {whole}")
    paths = (path,) if match["part"] is None else _parts(whole)
    return Source(whole.relative_to(root).as_posix(), match["kind"], match["packed"] or "", paths)


def _parts(whole: Path) -> tuple[Path, ...]:
    numbered: dict[int, Path] = {}
    for path in sorted(whole.parent.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match["whole"] == whole.name and match["part"]:
            if (number := int(match["part"])) in numbered:
                raise ValueError(f"{whole}: part {number} exists twice: {numbered[number].name} and {path.name}")
            numbered[number] = path
    numbers = sorted(numbered)
    if numbers != [*range(numbers[0], numbers[0] + len(numbers))] or numbers[0] > 1:
        raise ValueError(f"{whole}: some of its parts are missing: there are {numbers}")
    return tuple(numbered[number] for number in numbers)
