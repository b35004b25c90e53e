"""The object that a `_target_` node names.

`data`, `comm`, `optim.schedule` and the like are open nodes: Hydra knows neither their keys nor their types. The
signature of the class or function does, and arguments are held against it before the call.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from lowprec_train.train.command_line import offered

OF_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
_PLAIN: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}


def construct(node: Mapping[str, Any], key: str | None = None, **extra: Any) -> Any:
    """The object that a `_target_` node names, its arguments completed by `extra`, which are passed as they are.

    key: where the node stands in the configuration, for messages; None: the target's name stands for it.

    Raises ValueError when there is no such target, when it does not take the arguments, or when it refuses their
    values.
    """
    target = checked(node, key, extra)
    try:
        return instantiate({**node, "_partial_": True, "_convert_": "all"})(**extra)
    except InstantiationException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    except TypeError as error:
        raise ValueError(f"{key or target}: {error}") from error


def checked(node: Mapping[str, Any], key: str | None = None, supplied: Collection[str] = ()) -> str:
    """The name of a node's target, after a look at its arguments; nothing is called. supplied: arguments to come.

    Raises ValueError as `construct` does, but for what the target itself refuses.
    """
    name = node.get("_target_")
    if not isinstance(name, str):
        raise ValueError(f"{key or dict(node)} names no class: {f'{key}.' if key else ''}_target_={name}")
    try:
        target = get_object(name)
    except Exception as error:
        raise ValueError(f"{key or 'a part'} names what is not there: _target_={name}") from error
    if not callable(target):
        raise ValueError(f"{key or 'a part'} names what is no class and no function: _target_={name}")
    arguments = {each: value for each, value in node.items() if each not in OF_HYDRA}
    _check(target, arguments, key or name, supplied)
    return name


def _check(target: Callable[..., Any], given: Mapping[str, Any], where: str, supplied: Collection[str] = ()) -> None:
    """Raises ValueError for an argument that `target` does not take, that is missing, or that is of another type.

    where: the key of the node, for messages, e.g. `data`. supplied: names of arguments that the program adds.
    """
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # of a type in C, which has none
        return
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    hints = _hints(target)
    names = [name for name in parameters if name not in supplied]
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"{where}.{name}={value}: there is no such key{offered(name, names, f'{where} has')}")
        if not _fits(value, hints.get(name, Any)):
            raise ValueError(f"{where}.{name}={_shown(value)} is no {_said(hints[name])}")
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in given:
            raise ValueError(f"{where}.{name} must be given: {where}.{name}=...")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Types of the parameters; of a class those of its constructor, or of its fields."""
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)  # type: ignore[misc]
        return hints | (typing.get_type_hints(target) if inspect.isclass(target) else {})
    except (NameError, TypeError):
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of this type; True for types that no plain value has: their part judges."""
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


def _said(hint: Any) -> str:
    """`int`, `str or None`, `list of str`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_said, inner))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if hint in (None, type(None)):
        return "null"
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return f"list of {_said(inner[0])}"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(hint, str(hint))


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)
