"""Every model of configs/model builds on meta with the published number of parameters."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Transformer

FOLDER = Path(__file__).parents[2] / "configs" / "model"

PARAMETERS = {  # published, or of the sizes that the file states; 1 % is the rounding of such figures
    "llama_tiny": 1.902e6,
    "llama_20m": 52.04e6,  # 19.3e6 without embedding and head
    "llama_130m": 134.1e6,  # GaLore, arXiv 2403.03507
    "llama_350m": 373.9e6,  # with ffn 2816; GaLore's 2736 makes 368.0e6
    "llama_1b3": 1.345e9,
    "llama_7b_8layers": 1.881e9,  # its first 8 layers: what one GPU measures a step on
    "llama_7b": 6.738e9,  # arXiv 2302.13971, arXiv 2307.09288
    "llama_13b": 13.02e9,
    "llama_30b": 32.53e9,
    "llama3_8b": 8.030e9,  # arXiv 2407.21783
    "llama3_1_8b": 8.030e9,
    "llama3_2_1b": 1.236e9,
    "mistral_7b": 7.248e9,  # v0.3, arXiv 2310.06825
    "qwen2_5_0b5": 494.0e6,  # arXiv 2412.15115
    "qwen3_0b6": 596.0e6,  # arXiv 2505.09388
    "olmo2_1b": 1.485e9,  # arXiv 2501.00656
    "gpt_tiny": 1.449e6,
    "gpt_125m": 125e6,  # arXiv 2005.14165
    "gpt_345m": 355e6,  # what Megatron-LM's "345M" has
    "gpt_1b3": 1.316e9,  # of these sizes, as OPT counts them (arXiv 2205.01068)
    "gpt_6b7": 6.66e9,
    "gpt_13b": 12.85e9,  # of width 5120; the table's 5140 is not a multiple of its heads
    "gpt_175b": 174.6e9,
}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def test_every_file_is_counted() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_builds_with_the_published_parameter_count(name: str) -> None:
    config = read(name)
    assert config.pop("name") == name
    asked = {"recompute_layers", "full_recompute_layers", "offload", "loss_chunk"}  # for by a run
    wanted = {each.name for each in fields(Architecture)} - asked
    assert set(config) == wanted
    with torch.device("meta"):
        model = Transformer(Architecture(**config))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "llama_1b3"])
def test_dimensions_take_tiles_and_eight_shards(name: str) -> None:
    """A tile of 32 divides an eighth of every width, but for the small sizes and llama_1b3 (ffn 5504 = 8 * 688)."""
    config = read(name)
    parts = 1 if config["dim"] < 1024 else 8
    assert config["dim"] % (32 * parts) == 0 and config["ffn"] % (32 * parts) == 0
