"""Run a notebook from its first cell to its last: `python scripts/notebook.py NOTEBOOK OUT`.

It runs with this Python in a temporary directory. If a cell fails, this command fails. OUT is the notebook with its
outputs. The stored notebook has none, because they depend on the date.
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
