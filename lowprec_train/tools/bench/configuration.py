"""The measured models, as overrides of `train.py`."""

from __future__ import annotations

from lowprec_train import config


def model_overrides(model: str) -> list[str]:
    """Return overrides for `llama_7b`, or for sizes such as `dim=4096,heads=32,ffn=11008,layers=8`: a LLaMA model,
    with a vocabulary of 32,000 by default.
    """
    if "=" not in model:
        if model not in config.choices("model"):
            raise ValueError(f"no model {model!r}; there are {', '.join(config.choices('model'))}")
        return [f"model={model}"]
    sizes = dict(item.split("=", 1) for item in model.split(","))
    sizes = {"vocab_size": "32000", "kv_heads": sizes.get("heads", "32"), "max_seq_len": "8192"} | sizes
    return [
        "model=llama_7b",
        f"model.name={model_name(model)}",
        *(f"model.{key}={value}" for key, value in sizes.items()),
    ]


def model_name(model: str) -> str:
    """Return a name without characters that are special in Hydra or a file system."""
    return model.replace("=", "").replace(",", "_")
