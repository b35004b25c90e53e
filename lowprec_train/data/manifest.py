"""The manifest of a prepared dataset: `<prefix>.manifest.json` beside `<prefix>.bin` and `<prefix>.idx`.

It is written last, so a dataset with a manifest is complete. Equal input gives byte-identical manifests. The file
of the tokenizer lies in the same directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowprec_train import json_schema
from lowprec_train.data.appending import write_whole
from lowprec_train.json_schema import TEXT, WHOLE, Listed, Named

LAYOUT = 1
FILE = {"bytes": WHOLE, "sha256": TEXT}
SCHEMA = {
    **dict.fromkeys(("documents", "tokens", "text_bytes", "empty", "bad", "inexact_cuts", "layout"), WHOLE),
    **dict.fromkeys(("dtype", "field"), TEXT),
    "tokenizer": {"file": TEXT, "sha256": TEXT, "vocab_size": WHOLE, "eod?": WHOLE},
    "inputs": Listed({"name": TEXT, **FILE}),
    "files": {"bin": FILE, "idx": FILE},
    "versions": Named(TEXT),
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Counts, hashes and the tokenizer of a prepared dataset.

    documents, tokens: stored ones; end-of-document tokens count.
    text_bytes: of the stored documents, in UTF-8. empty, bad: number of skipped records without text, and unreadable.
    inexact_cuts: places in long documents where tokens may differ from those of the whole document (`cuts`).
    field: of .jsonl lines and .parquet rows. tokenizer: `file`, `sha256`, `vocab_size`, `eod`.
    inputs: `name`, `bytes`, `sha256` of each file read, in order. files: `bytes` and `sha256` of `bin` and `idx`.
    """

    documents: int
    tokens: int
    text_bytes: int
    empty: int
    bad: int
    dtype: str
    field: str
    tokenizer: dict[str, Any]
    inputs: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]
    versions: dict[str, str]
    inexact_cuts: int = 0
    layout: int = LAYOUT

    @classmethod
    def read(cls, prefix: str | Path) -> Manifest | None:
        """Return the manifest of a dataset; None if there is none.

        Raises:
            ValueError: the file is not a manifest of this layout, or .bin or .idx is missing or has another size.
        """
        path = manifest_path(prefix)
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**values)
            found._check_types()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not a manifest of `lowprec prepare-data`: {error}") from error
        if found.layout != LAYOUT:
            raise ValueError(f"{path}: a manifest of layout {found.layout}, can read {LAYOUT}")
        found._check_sizes(prefix)
        return found

    def write(self, prefix: Path) -> None:
        """Write the manifest atomically and sync it to disk."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_whole(manifest_path(prefix), text.encode())

    def _check_types(self) -> None:
        if wrong := json_schema.fault(dataclasses.asdict(self), SCHEMA):
            raise ValueError(wrong)

    def _check_sizes(self, prefix: str | Path) -> None:
        for ending, entry in self.files.items():
            file = Path(f"{prefix}.{ending}")
            if not file.is_file():
                raise ValueError(f"{manifest_path(prefix)} names a missing file: {file}")
            if (size := file.stat().st_size) != entry["bytes"]:
                raise ValueError(f"{file} has {size} bytes, but its manifest says {entry['bytes']}")

    def tokenizer_path(self, prefix: str | Path) -> Path:
        """Return the path of the tokenizer of the dataset with this prefix."""
        return Path(prefix).parent / str(self.tokenizer["file"])


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.manifest.json")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(prefix: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of a dataset's two files, by their endings."""
    paths = {ending: Path(f"{prefix}.{ending}") for ending in ("bin", "idx")}
    return {ending: {"bytes": path.stat().st_size, "sha256": sha256(path)} for ending, path in paths.items()}
