"""Configuration keys and values that were renamed before the first release, and the error that names the new ones.

An old name is refused, not translated: a run would otherwise be saved under keys that its user did not write. It is
refused on the command line, in YAML files, and in the config.yaml of a run directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

KEYS: dict[str, str] = {
    "clip_norm": "max_grad_norm",
    "max_skipped": "max_nonfinite_steps",
    "keep": "checkpoint_keep",
    "parallel.sync": "parallel.grad_reduce",
    "parallel.gather": "parallel.param_all_gather",
    "comm.plain": "comm.exclude",
    "precision.keep": "precision.saved_activations",
    "precision.schedule.*.keep": "precision.schedule.*.saved_activations",
    "precision.override.keep": "precision.override.saved_input",
    "precision.schedule.*.override.keep": "precision.schedule.*.override.saved_input",
}
"""Old key -> new key, for the key itself and all keys below it. `*` matches any name."""

VALUES: dict[str, dict[str, str]] = {
    "parallel.grad_reduce": {"last": "last_microbatch", "each": "every_microbatch"},
    "parallel.param_all_gather": {"master": "fp32", "codes": "quantized"},
    "model": {"from/weights": "from_checkpoint"},
}
"""New key -> {old value: new value}. `*` as above."""

for _change, _gemm, _side in product(
    ("precision.override", "precision.schedule.*.override"), ("fprop", "dgrad", "wgrad"), "ab"
):
    _operand = f"{_change}.{_gemm}.{_side}"
    KEYS |= {f"{_operand}.stochastic": f"{_operand}.rounding", f"{_operand}.span": f"{_operand}.exponent_span"}
    VALUES[f"{_operand}.rounding"] = {"false": "nearest", "true": "stochastic"}
    VALUES[f"{_operand}.rounding"] |= {"False": "nearest", "True": "stochastic"}


def new_key(key: str) -> str | None:
    """Return the new name of an old key, or of a key below one; None for any other key. Handles `precision/keep` and
    `precision/keep@precision.keep` too.
    """
    parts = [(part, _new_name(part)) for part in key.split("@")]
    return "@".join(new or part for part, new in parts) if any(new for _, new in parts) else None


def renaming(key: str, value: str | None = None) -> str | None:
    """Return `keep=3 is now checkpoint_keep=3`; None if neither was renamed. value: None for a key alone."""
    now = new_key(key) or key
    given = value.strip("'\"") if value is not None else None
    new_value = _new_values(now).get(given, value) if given is not None else None
    if (now, new_value) == (key, value):
        return None
    return f"{_shown(key, value)} is now {_shown(now, new_value)}"


def refusal(renamings: Iterable[str | None]) -> str | None:
    """Return one sentence for all renamings; None if there are none."""
    found = [each for each in renamings if each]
    return f"renamed configuration keys: {', '.join(found)}" if found else None


def in_tree(tree: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    """Yield the renamings of a configuration's keys and values."""
    for key, value in tree.items():
        name = f"{above}{key}"
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if change := renaming(name, None if isinstance(value, Mapping) else text):
            yield change
        elif isinstance(value, Mapping):
            yield from in_tree(value, f"{name}.")


def refuse(tree: Mapping[Any, Any], source: str = "", advice: str = "") -> None:
    """Raise ValueError for a configuration with renamed keys or values. source: its file; advice: what to do."""
    if message := refusal(in_tree(tree)):
        raise ValueError(f"{source} was written by an earlier version: {message}; {advice}" if source else message)


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"(?P<any>[^./]+)").replace(r"\.", "[./]")


_NEW_NAMES = [(re.compile(rf"{_pattern(old)}(?P<below>[./].*)?"), new) for old, new in KEYS.items()]
_NEW_VALUES = [(re.compile(_pattern(key)), values) for key, values in VALUES.items()]


def _new_name(key: str) -> str | None:
    for old, new in _NEW_NAMES:
        if found := old.fullmatch(key):
            renamed = new.replace("*", found.groupdict().get("any") or "") + (found["below"] or "")
            return renamed.replace(".", "/") if "/" in key else renamed
    return None


def _new_values(key: str) -> Mapping[str, str]:
    return next((values for pattern, values in _NEW_VALUES if pattern.fullmatch(key)), {})


def _shown(key: str, value: str | None) -> str:
    return key if value is None else f"{key}={value}"
