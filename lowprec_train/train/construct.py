"""Build the object of a `_target_` node.

`data`, `comm`, `optim.schedule` and similar nodes have no schema in Hydra. Their arguments are checked against the
signature of the target before it is called.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from lowprec_train.train.command_line import offered

HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
_PLAIN: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}


def construct(node: Mapping[str, Any], key: str | None = None, **extra: Any) -> Any:
    """Return the object of a `_target_` node. `extra` arguments are added to the node's and passed unchanged.

    key: the node's key in the configuration, for messages; None: messages name the target instead.

    Raises ValueError if the target does not exist, or if it does not accept the arguments or their values.
    """
    target = checked(node, key, extra)
    try:
        return instantiate({**node, "_partial_": True, "_convert_": "all"})(**extra)
    except InstantiationException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    except TypeError as error:
        raise ValueError(f"{key or target}: {error}") from error


def checked(node: Mapping[str, Any], key: str | None = None, supplied: Collection[str] = ()) -> str:
    """Check a node's arguments against the signature of its target, which is not called. Returns the target's name.

    supplied: names of arguments that the caller adds. Raises ValueError as `construct` does, except for values that the
    target itself refuses.
    """
    if not isinstance(node, Mapping):
        raise ValueError(f"{key or 'a node'}={_shown(node)} must be a mapping with a _target_")
    name = node.get("_target_")
    if not isinstance(name, str):
        raise ValueError(f"{key or dict(node)} needs a _target_, the name of a class or function; it is {name}")
    setting = f"{key}._target_={name}" if key else f"_target_={name}"
    try:
        target = get_object(name)
    except Exception as error:
        raise ValueError(f"{setting} cannot be imported; give the name of a class or function") from error
    if not callable(target):
        raise ValueError(f"{setting} is neither a class nor a function")
    arguments = {each: value for each, value in node.items() if each not in HYDRA_KEYS}
    check_arguments(target, arguments, key or name, supplied)
    return name


def check_arguments(
    target: Callable[..., Any], given: Mapping[str, Any], where: str, supplied: Collection[str] = ()
) -> None:
    """Raise ValueError for an argument that `target` does not accept, that is missing, or that has the wrong type.

    where: the key of the node, for messages, e.g. `data`. supplied: names of arguments that the caller adds.
    """
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # a type implemented in C has no signature
        return
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    hints = _hints(target)
    names = [name for name in parameters if name not in supplied]
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"{where}.{name}={value}: there is no such key{offered(name, names, f'{where} has')}")
        hint = hints.get(name, Any)
        if not (_builds(value, hint) if inspect.isclass(hint) and is_dataclass(hint) else _fits(value, hint)):
            raise ValueError(f"{where}.{name}={_shown(value)} must be {_type_name(hints[name])}")
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in given:
            raise ValueError(f"{where}.{name} must be given: {where}.{name}=...")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a callable's parameters; for a class those of its constructor and fields."""
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)  # type: ignore[misc]
        return hints | (typing.get_type_hints(target) if inspect.isclass(target) else {})
    except (NameError, TypeError):
        return {}


def _builds(value: Any, made: type) -> bool:
    """Return whether a value is of a class, or a node that builds something."""
    return isinstance(value, made) or (isinstance(value, Mapping) and "_target_" in value)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value has this type; True for types that are not plain, which the target checks."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if hint in (None, type(None)):
        return value is None
    if hint in _PLAIN:
        return isinstance(value, _PLAIN[hint]) and (hint is bool or not isinstance(value, bool))
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value if inner)
    return True


def _type_name(hint: Any) -> str:
    """Return a type in words: `a whole number`, `text or null`, `a list of text`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type_name, inner))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if hint in (None, type(None)):
        return "null"
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return f"a list of {_type_name(inner[0]).removeprefix('a ').replace('number', 'numbers')}"
    if is_dataclass(hint):
        return f"a mapping with the _target_ of a {getattr(hint, '__name__', hint)}"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
