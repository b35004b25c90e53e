"""Run directories: files that are not what a run wrote, other configurations, places that cannot be written."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from tests.bad_inputs.case import case


def garbled(name: str, content: str | bytes = "}{ no such thing"):
    """The unfinished run `good` with this file spoiled."""

    def make(place: Path) -> None:
        unfinished(place)
        file = place / "runs" / "good" / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def unfinished(place: Path) -> None:
    """The run `good` as if it were to go on after step 1."""
    run = place / "runs" / "good"
    (run / "DONE").unlink()
    (run / "checkpoints" / "latest").write_text("step-1\n")


def shard(place: Path, step: int = 1) -> Path:
    return sorted((place / "runs" / "good" / "checkpoints" / f"step-{step}").glob("*.distcp"))[0]


def cut(place: Path) -> None:
    unfinished(place)
    for step in (1, 2):
        file = shard(place, step)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def inverted(place: Path) -> None:
    unfinished(place)
    for step in (1, 2):
        file = shard(place, step)
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
        file.write_bytes(content)


def absent(name: str):
    def make(place: Path) -> None:
        unfinished(place)
        for step in (1, 2):
            for file in (place / "runs" / "good" / "checkpoints" / f"step-{step}").glob(name):
                file.unlink()

    return make


def both_metadata(content: bytes):
    def make(place: Path) -> None:
        unfinished(place)
        for step in (1, 2):
            (place / "runs" / "good" / "checkpoints" / f"step-{step}" / ".metadata").write_bytes(content)

    return make


def a_file_named(name: str):
    def make(place: Path) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("a file\n")

    return make


def locked(place: Path) -> None:
    """In use: by this process, whose lock a forked command does not share."""
    unfinished(place)
    file = (place / "runs" / "good" / ".lock").open("w")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    LOCKS.append(file)


LOCKS: list = []


def other_hash(place: Path) -> None:
    unfinished(place)
    about = place / "runs" / "good" / "run.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"corpus_hash": "0123abcd"}))


def earlier_version(place: Path) -> None:
    unfinished(place)
    saved = place / "runs" / "good" / "config.yaml"
    saved.write_text(saved.read_text().replace("max_grad_norm:", "clip_norm:"))


GO_ON = "train name=good"
CASES = (
    case("another-lr-under-the-same-name", "train name=good optim.lr=0.5", "optim.lr", "0.5", "good", make=unfinished),
    case(
        "many-other-keys-under-the-same-name",
        "train name=good optim.lr=0.5 seed=7 max_grad_norm=2 optim.beta1=0.8 optim.beta2=0.9 optim.weight_decay=0.3",
        "seed: saved 1234, now 7",
        "and 5 more",
        "good",
        make=unfinished,
    ),
    case("another-recipe-under-the-same-name", "train name=good +recipe=fp4", "precision", "good", make=unfinished),
    case("another-lr-of-a-finished-run", "train name=good optim.lr=0.5", "optim.lr", "0.5", "good"),
    case("another-corpus-under-the-same-name", GO_ON, "0123abcd", "good", make=other_hash),
    case("config-garbled", GO_ON, "runs/good/config.yaml", make=garbled("config.yaml")),
    case("config-empty", GO_ON, "runs/good/config.yaml", make=garbled("config.yaml", "")),
    case("config-a-list", GO_ON, "runs/good/config.yaml", make=garbled("config.yaml", "[1, 2]\n")),
    case("config-binary", GO_ON, "runs/good/config.yaml", make=garbled("config.yaml", b"\x00\xff\xfe\x80")),
    case("config-of-an-earlier-version", GO_ON, "clip_norm=1.0 is now max_grad_norm=1.0", make=earlier_version),
    case("run-json-garbled", GO_ON, "runs/good/run.json", make=garbled("run.json")),
    case("run-json-empty", GO_ON, "runs/good/run.json", make=garbled("run.json", "")),
    case("run-json-a-list", GO_ON, "runs/good/run.json", make=garbled("run.json", "[1]")),
    case("metrics-garbled", GO_ON, "runs/good/metrics.jsonl", make=garbled("metrics.jsonl", "}{ no such thing\n")),
    case("metrics-numbers", GO_ON, "runs/good/metrics.jsonl", make=garbled("metrics.jsonl", "3\n4\n")),
    case("metrics-binary", GO_ON, "runs/good/metrics.jsonl", make=garbled("metrics.jsonl", b"\x00\xff\xfe\x80\n")),
    case("done-garbled", GO_ON, "runs/good/DONE", make=garbled("DONE")),
    case("done-empty", GO_ON, "runs/good/DONE", make=garbled("DONE", "")),
    case("metadata-garbled", GO_ON, ".metadata", make=both_metadata(b"no such thing")),
    case("metadata-empty", GO_ON, ".metadata", make=both_metadata(b"")),
    case("metadata-absent", GO_ON, "step-1", make=absent(".metadata")),
    case("shard-cut", GO_ON, ".distcp", make=cut),
    case("shard-inverted", GO_ON, ".distcp", make=inverted),
    case("shard-absent", GO_ON, ".distcp", make=absent("*.distcp")),
    case("resume-of-an-absent-step", "train name=good resume=step-7", "step-7", make=unfinished),
    case("resume-of-a-step-in-words", "train name=good resume=step-last", "step-last", make=unfinished),
    case("resume-of-a-new-run", "train name=new resume=step-7", "step-7"),
    case("run-in-use", GO_ON, "good", "in use", make=locked),
    case("run-root-a-file", "train run_root=lines.jsonl name=a", "lines.jsonl"),
    case("run-root-below-a-file", "train run_root=lines.jsonl/x name=a", "lines.jsonl/x"),
    case("run-a-file", "train name=a", "runs/a", make=a_file_named("runs/a")),
    case("run-root-unwritable", "train run_root=/proc/runs name=a", "/proc/runs"),
    case("checkpoints-a-file", "train name=a", "run 'a'", make=a_file_named("runs/a/checkpoints")),
    case("weights-absent", "train weights=nowhere", "nowhere"),
    case("weights-empty-directory", "train weights=empty", "empty", make=lambda p: (p / "empty").mkdir()),
    case("weights-a-file", "train weights=lines.jsonl", "lines.jsonl"),
    case("weights-of-text", "train weights=corpus", "corpus"),
    case("weights-of-another-size", "train weights=runs/good model.dim=64", "dim", "64", "32"),
    case("weights-of-an-absent-step", "train weights=runs/good/checkpoints/step-9", "step-9"),
    case("weights-of-a-spoiled-checkpoint", "train weights=runs/good", "runs/good", make=cut),
    case("weights-empty", "train 'weights=\"\"'", "weights"),
    case("from-weights-without-weights", "train-as-given model=from_checkpoint data.cache=cache", "weights"),
    case(
        "from-weights-absent",
        "train-as-given model=from_checkpoint weights=nowhere data.cache=cache",
        "error: nowhere is neither a run",
    ),
    case("cache-a-file", "train data.cache=lines.jsonl", "lines.jsonl"),
    case("cache-unwritable", "train data.cache=/proc/cache", "/proc/cache"),
    case(
        "cache-garbled",
        "train",
        "corpus.json",
        make=lambda p: [file.write_text("}{") for file in (p / "cache").rglob("corpus.json")],
    ),
    case(
        "cache-tokens-cut",
        "train",
        ".bin",
        make=lambda p: [file.write_bytes(b"\x00" * 10) for file in (p / "cache").rglob("*.bin")],
    ),
)
