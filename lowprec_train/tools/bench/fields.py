"""The fields that tables and figures need of a stored result, so that one error names the first that is missing.

A form says what a value must be:

    Kind             a text, a number, ...
    dict             an object with these keys, and any others; of `key?` the value may be missing or null
    Listed, Named    a list, or an object with any keys, whose values have one form
    a function       returns the form of this value
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CATEGORIES = ("parameters", "optimizer states", "gradients", "activations", "transient")  # of `bench.memory`
SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True)
class Kind:
    """A value by itself. null: whether null will do."""

    name: str
    holds: Callable[[Any], bool]
    null: bool = False


@dataclass(frozen=True)
class Listed:
    """A list of at least `least` values of one form."""

    form: Form
    least: int = 0


@dataclass(frozen=True)
class Named:
    """An object of any keys, with values of one form."""

    form: Form


Form = Kind | Listed | Named | dict[str, Any] | Callable[[Any], Any]


def fault(result: Mapping[str, Any]) -> str:
    """Return what a result of a known benchmark lacks, with its place, e.g. `rows[1] lacks ms`; "" for nothing."""
    return _fault(result, {"environment": {"gpu": TEXT}, **FORMS[result["bench"]]}, "")


def _fault(value: Any, form: Form, place: str) -> str:
    if callable(form):
        return _fault(value, form(value), place)
    if isinstance(form, Kind):
        return "" if form.holds(value) or (form.null and value is None) else _wrong(value, form.name, place)
    if isinstance(form, Listed):
        if not isinstance(value, list):
            return _wrong(value, "a list", place)
        if len(value) < form.least:
            return _wrong(value, f"a list of at least {form.least}", place)
        return next(filter(None, (_fault(each, form.form, f"{place}[{at}]") for at, each in enumerate(value))), "")
    if not isinstance(value, dict):
        return _wrong(value, "an object", place)
    inside = f"{place}." if place else ""
    if isinstance(form, Named):
        return next(filter(None, (_fault(each, form.form, f"{inside}{name}") for name, each in value.items())), "")
    for key, each in form.items():
        name = key.removesuffix("?")
        if value.get(name) is None and key.endswith("?"):
            continue
        if name not in value:
            return f"{place or 'it'} lacks {name}"
        if found := _fault(value[name], each, f"{inside}{name}"):
            return found
    return ""


def _wrong(value: Any, expected: str, place: str) -> str:
    return f"{place} is {json.dumps(value)[:SHOWN]}, not {expected}"


def _measured(mark: str, **form: Form) -> Callable[[Any], Form]:
    """Return the form of rows with the key `mark` if they were measured, and with an error if not."""

    def of(row: Any) -> Form:
        failed = isinstance(row, dict) and mark not in row and "error" in row
        return {"name": TEXT, "error?": TEXT} if failed else {"name": TEXT, mark: POSITIVE, **form}

    return of


def _unless_error(about: dict[str, Any], measured: dict[str, Any]) -> Callable[[Any], Form]:
    """Return the form of rows that have either an error or measured values."""

    def of(row: Any) -> Form:
        failed = isinstance(row, dict) and "error" in row
        return {**about, "error": TEXT} if failed else {**about, **measured}

    return of


def _profile(profile: Any) -> Form:
    if isinstance(profile, dict) and profile.get("longest") == []:
        return {"timeline?": Named(TEXT)}
    longest = Listed({"kernel": TEXT, "class": TEXT, "ms": NUMBER})
    return {"longest": longest, "total_ms": POSITIVE, "ms": Named(NUMBER), "timeline?": Named(TEXT)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", _is_finite)
NUMBER_OR_NULL = Kind("a number or null", _is_finite, null=True)
POSITIVE = Kind("a positive number", lambda value: _is_finite(value) and value > 0)
LOSS = Kind("a number", _is_number)  # NaN where training diverged
WHOLE = Kind("a whole number", lambda value: _is_number(value) and isinstance(value, int))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
ANY = Kind("a value", lambda value: True, null=True)
SIZES, SHAPE = Named(ANY), Listed(WHOLE)

STEPS: dict[str, Form] = {"sizes": SIZES, "tokens_per_step": NUMBER, "profiles": Named(_profile)}
STEP: dict[str, Form] = {"group": ANY, "tokens_per_s": NUMBER, "of_group?": NUMBER, "peak_gib?": NUMBER}
STEP |= {"loss": Listed(LOSS, 1), "attention?": TEXT, "host_ms?": Listed(NUMBER, 1), "cpu_ms?": Listed(NUMBER, 1)}
COMMUNICATION = dict.fromkeys(("of_limit?", "exposed_ms?", "idle_ms?", "estimated_gib?", "sent_gb?"), NUMBER)
MEMORY: dict[str, Form] = {
    **dict.fromkeys(CATEGORIES[:-1], NUMBER),
    **dict.fromkeys(("of_baseline", "largest"), NUMBER_OR_NULL),
    **dict.fromkeys(("reserved?", "estimated?", "tokens_per_s?"), NUMBER),
    "marks?": Listed({"mark": TEXT, **dict.fromkeys(CATEGORIES, NUMBER)}),
}
KERNEL = {"op": TEXT, "case": TEXT, "shape": SHAPE, "kernel": TEXT}
EXACT = {"case": TEXT, "k": WHOLE}
REDUCTION = {"sent": NUMBER, "ms": NUMBER, "gbs": NUMBER, "of_library?": NUMBER, "sqnr_db": NUMBER_OR_NULL}
FORMS: dict[str, dict[str, Form]] = {
    "kernels": {
        "copy_gbs": NUMBER,
        "rows": Listed(_unless_error(KERNEL, dict.fromkeys(("ms", "gbs", "of_copy"), NUMBER))),
    },
    "gemm": {
        "rows": Listed({"shape": SHAPE, "tflops": Named(NUMBER), "errors": Named(TEXT)}),
        "exactness": Listed(_unless_error(EXACT, dict.fromkeys(("fast", "split", "output"), NUMBER))),
    },
    "linear": {
        "tokens": NUMBER,
        "rows": Listed({"shape": Listed(WHOLE, 2), "ms": Named(POSITIVE), "errors": Named(TEXT)}),
    },
    "step": {**STEPS, "rows": Listed(_measured("ms", **STEP, **{"of_fastest?": NUMBER}))},
    "comm": {
        **dict.fromkeys(("ranks", "elements", "rounds"), NUMBER),
        "backend": TEXT,
        "gradients?": TEXT,
        "cuda_graph?": FLAG,
        "rows": Listed(_unless_error({"kind": TEXT, "name": TEXT}, REDUCTION)),
    },
    "parallel": {**STEPS, "gpus": NUMBER, "rows": Listed(_measured("ms", **STEP, **COMMUNICATION, baseline=FLAG))},
    "memory": {
        "sizes": SIZES,
        "batches": Listed(NUMBER, 1),
        **dict.fromkeys(("seq_len", "limit"), NUMBER),
        "rows": Listed(_measured("peak", **MEMORY)),
    },
}
"""Of each benchmark."""
