"""What the values of a JSON file must be, so that one error names the first that is missing or wrong.

A schema is one of

    Kind             a text, a number, ...
    dict             an object with these keys, and any others; of `key?` the value may be missing or null
    Listed, Named    a list, or an object with any keys, whose values have one schema
    a function       returns the schema of this value
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True)
class Kind:
    """A value by itself. null: whether null will do."""

    name: str
    holds: Callable[[Any], bool]
    null: bool = False


@dataclass(frozen=True)
class Listed:
    """A list of at least `least` values of one schema."""

    schema: Schema
    least: int = 0


@dataclass(frozen=True)
class Named:
    """An object of any keys, with values of one schema."""

    schema: Schema


Schema = Kind | Listed | Named | dict[str, Any] | Callable[[Any], Any]


def fault(value: Any, schema: Schema, place: str = "") -> str:
    """Return what is missing or wrong in a value, with its place, e.g. `rows[1] lacks ms`; "" for nothing."""
    if callable(schema):
        return fault(value, schema(value), place)
    if isinstance(schema, Kind):
        return "" if schema.holds(value) or (schema.null and value is None) else _wrong(value, schema.name, place)
    if isinstance(schema, Listed):
        if not isinstance(value, list):
            return _wrong(value, "a list", place)
        if len(value) < schema.least:
            return _wrong(value, f"a list of at least {schema.least}", place)
        return next(filter(None, (fault(each, schema.schema, f"{place}[{at}]") for at, each in enumerate(value))), "")
    if not isinstance(value, dict):
        return _wrong(value, "an object", place)
    inside = f"{place}." if place else ""
    if isinstance(schema, Named):
        return next(filter(None, (fault(each, schema.schema, f"{inside}{name}") for name, each in value.items())), "")
    for key, each in schema.items():
        name = key.removesuffix("?")
        if value.get(name) is None and key.endswith("?"):
            continue
        if name not in value:
            return f"{place or 'it'} lacks {name}"
        if found := fault(value[name], each, f"{inside}{name}"):
            return found
    return ""


def _wrong(value: Any, expected: str, place: str) -> str:
    return f"{place or 'it'} is {json.dumps(value)[:SHOWN]}, not {expected}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a number", _is_number)
FINITE = Kind("a finite number", _is_finite)
POSITIVE = Kind("a positive number", lambda value: _is_finite(value) and value > 0)
