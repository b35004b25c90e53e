"""The results of an evaluation as printed text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowprec_train.tools.markdown import aligned


def text(found: Mapping[str, Any]) -> str:
    """Model and text, the tables of results, and a line for each recipe with the same forward pass as another."""
    step = "" if found["step"] is None else f", step {found['step']}"
    parts = [f"{found['model']}{step}: {found['name']} on {found['device']}"]
    parts += [_perplexity(found)] if "text" in found else []
    parts += [_tasks(found)] if "tasks" in found else []
    parts += [
        f"{_label(found, recipe)} has the same forward pass as {_label(found, computed)}: computed once"
        for recipe, computed in found["computed_as"].items()
        if recipe != computed
    ]
    return "\n\n".join(parts)


def _perplexity(found: Mapping[str, Any]) -> str:
    about = found["text"]
    size = "" if about["bytes"] is None else f", {about['bytes']:,} bytes"
    lead = (
        "the first token of each document is context only"
        if found["start"] is None
        else f"each document after token {found['start']}"
    )
    head = [
        f"{about['data']}: {about['documents']:,} documents{size}",
        f"{about['tokens']:,} tokens predicted in {about['windows']:,} windows of at most {found['seq_len']}, "
        f"stride {found['stride']}; {lead}",
    ]
    rows = [["recipe", "nats/token", "perplexity", "bits/byte", "tokens/s"]]
    for recipe, each in about["results"].items():
        bits = "-" if each["bits_per_byte"] is None else f"{each['bits_per_byte']:.5f}"
        speed = f"{each['tokens_per_second']:,.0f}"
        rows.append([_label(found, recipe), f"{each['loss']:.5f}", f"{each['perplexity']:.4f}", bits, speed])
    to = about["differences"]["to"]
    lines = [
        f"{_label(found, recipe)} - {_label(found, to)}: {each['nats']:+.5f}{_error(each['standard_error'])} nats/token"
        for recipe, each in about["differences"]["of"].items()
    ]
    return "\n".join([*head, "", _table(rows), *([""] if lines else []), *lines])


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f" ± {standard_error:.5f}"


def _tasks(found: Mapping[str, Any]) -> str:
    rows = [["task", "metric", *(_label(found, recipe) for recipe in found["tasks"])]]
    every = list(found["tasks"].values())
    for task, values in every[0].items():
        for key in (key for key in values if "," in key and "_stderr," not in key):
            error = key.replace(",", "_stderr,", 1)
            cells = [_value(each[task][key], each[task].get(error)) for each in every]
            rows.append([task, key.removesuffix(",none"), *cells])
    return _table(rows)


def _value(value: Any, error: Any) -> str:
    shown = f"{value:.4f}" if isinstance(value, float) else str(value)
    return f"{shown} ± {error:.4f}" if isinstance(error, float) else shown


def _label(found: Mapping[str, Any], recipe: str) -> str:
    """Label of a recipe, such as `run (fp4)` or `bf16`."""
    name = found["recipes"][recipe]
    return recipe if name == recipe else f"{recipe} ({name})"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("  ".join(cells) for cells in aligned(rows))
