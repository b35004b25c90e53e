"""Models that come from transformers or go there: files that are absent or garbled, tensors that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.bad_inputs.case import case
from tests.bad_inputs.runs import both_metadata, cut

IMPORT = "lowprec import-hf exported --out new"


def config(**changes: Any):
    def make(place: Path) -> None:
        file = place / "exported" / "config.json"
        values = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))

    return make


def tensors(change: Callable[[dict[str, torch.Tensor]], object]):
    def make(place: Path) -> None:
        (file,) = (place / "exported").glob("*.safetensors")
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return make


NORM, INDEX = "model.norm.weight", "model.safetensors.index.json"


def file(name: str, content: str | bytes | None):
    def make(place: Path) -> None:
        path = place / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def no_weights(place: Path) -> None:
    for path in (place / "exported").glob("*.safetensors"):
        path.unlink()


def cut_weights(place: Path) -> None:
    (path,) = (place / "exported").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])


def spoil_weights(place: Path) -> None:
    (path,) = (place / "exported").glob("*.safetensors")
    path.write_bytes(b"\x00\x01 no tensors" * 9)


def nan_imported(place: Path) -> None:
    (path,) = (place / "imported").glob("*.safetensors")
    found = load_file(path)
    found[sorted(found)[0]].fill_(float("nan"))
    save_file(found, path)


CASES = (
    case("import-of-nothing", "lowprec import-hf nowhere --out new", "nowhere"),
    case("import-of-a-file", "lowprec import-hf lines.jsonl --out new", "lines.jsonl"),
    case("import-of-a-run", "lowprec import-hf runs/good --out new", "runs/good"),
    case("import-over-a-directory", "lowprec import-hf exported --out imported", "imported"),
    case("import-over-a-run", "lowprec import-hf exported --out runs/good", "runs/good"),
    case("import-over-a-file", "lowprec import-hf exported --out lines.jsonl", "lines.jsonl"),
    case("import-into-itself", "lowprec import-hf exported --out exported", "exported"),
    case("import-to-an-unwritable-place", "lowprec import-hf exported --out /proc/new", "/proc/new"),
    case("import-without-out", "lowprec import-hf exported", "--out"),
    case("import-without-config", IMPORT, "config.json", make=file("exported/config.json", None)),
    case("import-config-garbled", IMPORT, "config.json", make=file("exported/config.json", "}{")),
    case("import-config-empty", IMPORT, "config.json", make=file("exported/config.json", "")),
    case("import-config-a-list", IMPORT, "config.json", make=file("exported/config.json", "[1]")),
    case("import-config-of-bert", IMPORT, "'bert'", make=config(architectures=["BertModel"], model_type="bert")),
    case(
        "import-config-without-an-architecture",
        IMPORT,
        "config.json",
        make=config(architectures="absent", model_type="absent"),
    ),
    case("import-config-without-a-size", IMPORT, "hidden_size", make=config(hidden_size="absent")),
    case("import-config-size-in-words", IMPORT, "hidden_size", "wide", make=config(hidden_size="wide")),
    case("import-config-size-negative", IMPORT, "hidden_size", "-32", make=config(hidden_size=-32)),
    case("import-config-heads-that-do-not-divide", IMPORT, "3", make=config(num_attention_heads=3)),
    case("import-config-of-another-activation", IMPORT, "gelu", make=config(hidden_act="gelu")),
    case(
        "import-config-scaled-rotary",
        IMPORT,
        "yarn",
        make=config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}),
    ),
    case("import-config-quantised", IMPORT, "quant", make=config(quantization_config={"quant_method": "gptq"})),
    case("import-config-of-another-vocabulary", IMPORT, "999", make=config(vocab_size=999)),
    case("import-config-more-layers", IMPORT, "layers.1", make=config(num_hidden_layers=2)),
    case("import-without-weights", IMPORT, "exported", "safetensors", make=no_weights),
    case("import-weights-cut", IMPORT, ".safetensors", make=cut_weights),
    case("import-weights-garbled", IMPORT, ".safetensors", make=spoil_weights),
    *(
        case(f"import-index-{name}", IMPORT, "model.safetensors.index.json", says, make=file(f"exported/{INDEX}", text))
        for name, says, text in (
            ("of-a-number", "3", '{"weight_map": 3}'),
            ("a-list", "[1]", "[1]"),
            ("empty", "{}", "{}"),
            ("of-numbers", "7", f'{{"weight_map": {{"{NORM}": 7}}}}'),
            ("elsewhere", "../x/model.safetensors", f'{{"weight_map": {{"{NORM}": "../x/model.safetensors"}}}}'),
        )
    ),
    case("import-tensor-absent", IMPORT, NORM, make=tensors(lambda t: t.pop(NORM))),
    case(
        "import-tensor-too-many",
        IMPORT,
        "model.extra",
        make=tensors(lambda t: t.update({"model.extra": torch.ones(3)})),
    ),
    case("import-tensor-of-another-shape", IMPORT, NORM, "7", make=tensors(lambda t: t.update({NORM: torch.ones(7)}))),
    case(
        "import-tensor-of-integers",
        IMPORT,
        NORM,
        "int",
        make=tensors(lambda t: t.update({NORM: torch.ones(32, dtype=torch.int32)})),
    ),
    case(
        "import-tensor-nan",
        IMPORT,
        NORM,
        "NaN",
        make=tensors(lambda t: t.update({NORM: torch.full((32,), float("nan"))})),
    ),
    case(
        "import-tensor-infinite",
        IMPORT,
        NORM,
        "NaN",
        make=tensors(lambda t: t.update({NORM: torch.full((32,), float("inf"))})),
    ),
    case("import-tokenizer-garbled", IMPORT, "tokenizer.json", make=file("exported/tokenizer.json", "}{")),
    case("import-shard-size-in-words", f"{IMPORT} --max-shard-size big", "big"),
    case("import-shard-size-zero", f"{IMPORT} --max-shard-size 0", "0"),
    case("import-shard-size-negative", f"{IMPORT} --max-shard-size=-2GB", "-2GB"),
    case("import-name-with-a-slash", f"{IMPORT} --name a/b", "a/b"),
    case("export-of-nothing", "lowprec export-hf nowhere --out new", "nowhere"),
    case("export-of-a-file", "lowprec export-hf lines.jsonl --out new", "lines.jsonl"),
    case("export-of-text", "lowprec export-hf corpus --out new", "corpus"),
    case("export-over-a-directory", "lowprec export-hf runs/good --out imported", "imported"),
    case("export-over-the-run", "lowprec export-hf runs/good --out runs/good", "runs/good"),
    case("export-over-a-file", "lowprec export-hf runs/good --out lines.jsonl", "lines.jsonl"),
    case("export-to-an-unwritable-place", "lowprec export-hf runs/good --out /proc/new", "/proc/new"),
    case("export-of-an-absent-step", "lowprec export-hf runs/good --out new --step 9", "step-9"),
    case("export-of-a-step-in-words", "lowprec export-hf runs/good --out new --step last", "last"),
    case("export-of-a-negative-step", "lowprec export-hf runs/good --out new --step=-1", "-1"),
    case("export-in-another-dtype", "lowprec export-hf runs/good --out new --dtype fp8", "fp8", "bf16"),
    case("export-shard-size-in-words", "lowprec export-hf runs/good --out new --max-shard-size big", "big"),
    case("export-tokenizer-absent", "lowprec export-hf runs/good --out new --tokenizer nowhere.model", "nowhere.model"),
    case("export-of-a-spoiled-checkpoint", "lowprec export-hf runs/good --out new", "runs/good", make=cut),
    case(
        "export-of-garbled-metadata",
        "lowprec export-hf runs/good --out new",
        ".metadata",
        make=both_metadata(b"no such thing"),
    ),
    case(
        "export-of-a-garbled-run-json",
        "lowprec export-hf runs/good --out new",
        "run.json",
        make=file("runs/good/run.json", "}{"),
    ),
    case(
        "export-of-a-garbled-config",
        "lowprec export-hf runs/good --out new",
        "config.yaml",
        make=file("runs/good/config.yaml", "}{"),
    ),
    case(
        "export-of-an-empty-config",
        "lowprec export-hf runs/good --out new",
        "config.yaml",
        make=file("runs/good/config.yaml", ""),
    ),
    case(
        "export-of-garbled-latest",
        "lowprec export-hf runs/good --out new",
        "latest",
        make=file("runs/good/checkpoints/latest", "}{"),
    ),
    case("export-of-nan", "lowprec export-hf imported --out new", "NaN", make=nan_imported),
    case("train-from-nan", "train weights=imported", "imported", "NaN", make=nan_imported),
    case("evaluate-of-nan", "lowprec evaluate imported --data valid.jsonl --device cpu", "NaN", make=nan_imported),
    case("generate-of-nan", "lowprec generate imported --device cpu", "NaN", make=nan_imported),
    case(
        "imported-model-yaml-garbled",
        "lowprec generate imported --device cpu",
        "model.yaml",
        make=file("imported/model.yaml", "}{"),
    ),
    case(
        "imported-model-yaml-empty",
        "lowprec generate imported --device cpu",
        "model.yaml",
        make=file("imported/model.yaml", ""),
    ),
    case(
        "imported-model-yaml-of-other-keys",
        "lowprec generate imported --device cpu",
        "model.yaml",
        make=file("imported/model.yaml", "banana: 3\n"),
    ),
)
