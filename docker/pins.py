"""The pins of constraints.txt for what this environment does not have yet: `python docker/pins.py >pins.txt`.

An image brings torch, NumPy and a hundred more in versions of its own that were built for each other; asking for other
versions of these is refused or breaks them. Only what is still to be installed follows our pins.
"""

import re
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(lines: list[str], installed: set[str]) -> list[str]:
    """Those of the lines `name==version` whose distribution is not installed."""
    return [line for line in lines if "==" in line and normalised(line.partition("==")[0]) not in installed]


if __name__ == "__main__":
    there = {normalised(each.metadata["Name"]) for each in metadata.distributions()}
    pins = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    print("\n".join(missing(pins, there)))
