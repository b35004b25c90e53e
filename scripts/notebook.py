"""Run a notebook from its first cell to its last: `python scripts/notebook.py NOTEBOOK OUT`.

It runs in a directory of its own that is thrown away, with this Python; an error in a cell is the error of this
command. OUT is the notebook with its outputs. The stored one has none: what it prints depends on the day.
"""

import os
import sys
import tempfile
import time
from pathlib import Path


def main(notebook: Path, out: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # `lowprec` of this Python
    read = nbformat.read(notebook, as_version=4)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        NotebookClient(read, timeout=300, kernel_name="python3", resources={"metadata": {"path": scratch}}).execute()
    for cell in read.cells:
        cell.metadata.pop("execution", None)  # times of day
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(read, out)
    print(f"{notebook}: {len(read.cells)} cells in {time.monotonic() - began:.0f} s; with outputs: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
