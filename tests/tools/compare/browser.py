"""Chromium without a window: what a page is once its scripts have run, as its elements or as a picture.

A machine without one skips what needs it and says so; under CI that is a failure. The network is out of reach: every
host name is unknown to it.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # root, in a container, has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--virtual-time-budget=4000",
)


def executable() -> str:
    """The browser's path; skips the test where there is none, fails it under CI."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        reason = f"needs a browser: none of {', '.join(NAMES)} is installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return found


def elements(page: Path, size: tuple[int, int]) -> str:
    """The page's HTML as it stands after its scripts, in a window of (width, height)."""
    return browse("--dump-dom", page, size)


def picture(page: Path, size: tuple[int, int], target: Path, *options: str) -> Path:
    """A PNG file of the page's top left corner."""
    browse(f"--screenshot={target}", page, size, *options)
    return target


def browse(action: str, page: Path, size: tuple[int, int], *options: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        window = f"--window-size={size[0]},{size[1]}"
        command = [executable(), *OPTIONS, *options, f"--user-data-dir={profile}", window, action, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
