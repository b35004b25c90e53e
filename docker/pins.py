"""The pins of constraints.txt that leave an image as it is: `python docker/pins.py [PINS-OF-THE-IMAGE ...] >pins.txt`.

An image brings torch, NumPy and a hundred more in versions of its own that were built for each other, and may have a
list of pins that pip obeys. Asking for other versions of these is refused or breaks them: our pins are for what is
neither installed nor in such a list.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def named(requirement: str) -> str:
    """The distribution that a line `name==version` is about, as package indexes compare names; '' for other lines."""
    name = re.match(r"[A-Za-z0-9][\w.-]*", requirement)
    return re.sub(r"[-_.]+", "-", name.group()).lower() if name else ""


def missing(lines: list[str], taken: set[str]) -> list[str]:
    """Those of the lines `name==version` whose distribution is not taken."""
    return [line for line in lines if "==" in line and named(line) and named(line) not in taken]


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    there = {named(each.metadata["Name"]) for each in metadata.distributions()}
    there |= {named(line) for file in sys.argv[1:] for line in lines(Path(file))}
    print("\n".join(missing(lines(CONSTRAINTS), there)))
