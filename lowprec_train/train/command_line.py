"""One-line errors for the command line: the argument, the reason, and the probable intention.

Hydra's own messages have up to 25 lines and end with a hint at an environment variable. This module parses its
exceptions and suggests the closest known name. It also refuses keys that a plus sign adds to typed parts of the
configuration, because nothing reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from lowprec_train import config
from lowprec_train.config import RunConfig
from lowprec_train.train import renamed_keys

_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p", "--cfg", "-c")
ADDED = ("experiment", "recipe")  # groups that are not in the defaults list: chosen with a plus sign
_ALIKE = 0.7
_OF_RESOLVER = "ValueError raised while resolving interpolation: "  # OmegaConf's words before our own message


def explained(error: BaseException, arguments: Sequence[str]) -> str:
    """Return one line that explains an exception which Hydra raised while it composed these arguments."""
    given = settings(arguments)
    alone = not {"-m", "--multirun"} & set(arguments)
    if message := renamed_keys.refusal(setting.renaming() for setting in given):
        return message
    for setting in given:
        if fault := setting.unreadable() or setting.misplaced():
            return fault
        if setting.parsed().is_sweep_override():
            if alone:
                return _sweep(setting, setting.key, error)
        elif fault := setting.no_choice():
            return fault
    if message := renamed_keys.refusal([_renaming_in_file(error)]):
        return message
    if isinstance(error, MissingConfigException):
        return _missing(error, given)
    for pattern, describe in _FAULTS:
        if match := re.search(pattern, str(error)):
            what = match["what"]
            typed = next((each for each in reversed(given) if what in (each.key, each.group)), Setting.of(what))
            return describe(typed, what, error)
    return one_line(error, arguments)


def refusal(end: SystemExit, arguments: Sequence[str], written: str) -> str:
    """Return the explanation of the exit with which Hydra rejected these arguments. written: what it printed before."""
    if end.code == 2:  # from argparse
        message = (written.strip().splitlines() or ["?"])[-1].partition("error: ")[2]
        option = message.removeprefix("unrecognized arguments: ")
        if option == message:
            return message
        return f"there is no option {option}; a setting has no dashes: {option.lstrip('-').replace(' ', '=')}"
    return explained(end.__context__ or end, arguments)


def one_line(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """Return one line of a Hydra or OmegaConf error, without lists of paths and types. arguments: possible causes."""
    if isinstance(error, MissingMandatoryValue):
        missing = error.full_key or str(error).splitlines()[0].rpartition(" ")[2]
        return f"{missing} must be given: {missing}=..."
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        return f"{_first(error)} {_first(error.__cause__)}"
    if isinstance(error, InterpolationResolutionError) and (own := _first(error).partition(_OF_RESOLVER)[2]):
        return own
    key = getattr(error, "full_key", None) if isinstance(error, OmegaConfBaseException) else None
    about = key or ", ".join(each for each in arguments if "${" in each)
    return f"{about}: {_first(error)}" if about else _first(error)


def refuse_unknown(run: DictConfig) -> None:
    """Raise ValueError for a renamed key, and for a key that a plus sign added to a typed part."""
    tree = OmegaConf.to_container(run, resolve=False)
    assert isinstance(tree, dict)
    renamed_keys.refuse(tree)
    for key in _unknown(tree, RunConfig):
        raise ValueError(f"Could not add {key!r}: there is no such key{_meant(key, '', _keys(run))}")


def refuse_flags(overrides: Iterable[str]) -> None:
    """Raise ValueError if a boolean key gets a number other than 0 and 1, which OmegaConf would read as true."""
    for override in overrides:
        setting = Setting.of(override)
        value = setting.parsed().value()
        if _type(setting.key) in (bool, bool | None) and type(value) in (int, float) and value not in (0, 1):
            raise ValueError(f"{override}: {setting.value} is neither true nor false")


def meant(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is most similar to `name`; None if none is similar."""
    plain = {each.lower().replace("-", "_"): each for each in names}
    close = get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=_ALIKE)
    return plain[close[0]] if close else None


def offered(name: str, names: Sequence[str], what: str) -> str:
    """Return `; did you mean X? WHAT: X, Y, Z`; the question is left out if no name is similar."""
    guess = meant(name, names)
    return f"; did you mean {guess}? {what}: {', '.join(names)}" if guess else f"; {what}: {', '.join(names)}"


def groups() -> list[str]:
    """Return the groups of the shipped configuration, e.g. `optim/schedule`."""
    root = config.directory()
    return sorted({path.parent.relative_to(root).as_posix() for path in root.glob("*/**/*.yaml")})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One argument of the command line: `key=value`, with or without a sign before it."""

    argument: str
    sign: str
    key: str
    value: str

    @classmethod
    def of(cls, argument: str) -> Setting:
        signed, _, value = argument.partition("=")
        key = signed.lstrip("+~")
        return cls(argument=argument, sign=signed.removesuffix(key), key=key, value=value)

    @property
    def group(self) -> str:
        """The configuration group of the key: `optim/moment` for `optim/moment@optim.first_moment`."""
        return self.key.partition("@")[0]

    def parsed(self) -> Override:
        """Return the override as Hydra parses it."""
        return OverridesParser.create().parse_override(self.argument)

    def text(self) -> str | None:
        """Return the value as Hydra reads it; None if that is no text, or an interpolation."""
        try:
            value = self.parsed().value()
        except HydraException:
            return None
        return value if isinstance(value, str) and "${" not in value else None

    def renaming(self) -> str | None:
        """Return what the setting is called now, if its key or value was renamed."""
        return renamed_keys.renaming(self.key, self.value if "=" in self.argument else None)

    def unreadable(self) -> str | None:
        """Return why the argument is not `key=value`; None if it is."""
        shown = self.argument or "''"
        if "=" not in self.argument and self.sign != "~":
            colon = re.fullmatch(r"([\w./@]+):\s*(.+)", self.argument)
            return f"{shown} is not a setting; write {f'{colon[1]}={colon[2]}' if colon else 'key=value'}"
        if not self.key:
            return f"{shown} has no key; write key=value"
        try:
            self.parsed()
        except Exception as error:
            reason = _first(error).removeprefix("LexerNoViableAltException: ")
            return (
                f"cannot read {self.argument}: {reason}; close brackets and quotes, and quote a value that has signs: "
                f"'{self.key}=\"...\"'"
            )
        return None

    def misplaced(self) -> str | None:
        """Return the error for a group without the plus sign that it needs."""
        if self.key in ADDED and self.sign != "+" and self.value:
            return f"{self.argument}: a {self.key} is added with a plus sign: +{self.key}={self.value}"
        return None

    def no_choice(self) -> str | None:
        """Return the error for a group whose value cannot be the name of a file."""
        if self.group not in groups() or self.sign == "~":
            return None
        value = self.parsed().value()
        return None if isinstance(value, str | list) and value else _no_choice(self, self.value)


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with Hydra's options before the settings, which it reads on one side of an option only."""
    options: list[str] = []
    rest: list[str] = []
    for each, before in zip(arguments, ("", *arguments)):
        (options if each.startswith("-") or before in _WITH_VALUE else rest).append(each)
    return [*options, *rest]


def settings(arguments: Sequence[str]) -> list[Setting]:
    """Return the settings among the arguments, without Hydra's options and their values."""
    after = [each for each, before in zip(arguments, ("", *arguments)) if before not in _WITH_VALUE]
    return [Setting.of(each) for each in after if not each.startswith("-")]


def _renaming_in_file(error: BaseException) -> str | None:
    """Return the new name of a renamed key or choice that a YAML file uses and Hydra does not find."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").partition("/")
        return renamed_keys.renaming(error.missing_cfg_file or "") or renamed_keys.renaming(group, name)
    patterns = (r"full_key: (\S+)", r"Could not override '([^']+)'", r"Key '([^']+)' (?:is )?not in")
    named = next(filter(None, (re.search(pattern, str(error)) for pattern in patterns)), None)
    return renamed_keys.renaming(named[1]) if named else None


def _no_choice(setting: Setting, name: str, options: Sequence[str] = ()) -> str:
    known = [*options] or config.choices(setting.group)
    guess = meant(name, known) if name else None
    suggestion = f"; did you mean {setting.sign}{setting.key}={guess}?" if guess else ";"
    return f"{setting.argument}: there is no {setting.group} {name!r}{suggestion} one of {', '.join(known)}"


def _missing(error: MissingConfigException, given: Sequence[Setting]) -> str:
    """Return the error for a choice that has no configuration file."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    for setting in given:
        if setting.group == group and name in (each.strip() for each in setting.value.split(",")):
            return _no_choice(setting, name, error.options or ())
    choices = [each.argument for each in given if each.group in groups()]
    return (
        f"there is no configuration file {error.missing_cfg_file!r}, requested by {' '.join(choices) or 'the defaults'}"
    )


def _no_key(typed: Setting, key: str, error: BaseException) -> str:
    if typed.group in groups() and not typed.sign and key.partition("@")[2] in _keys():
        return f"{typed.argument}: {key} has no choice yet; one is added with a plus sign: +{typed.argument}"
    if key.startswith("optim.rule.") and not typed.sign:
        return f"{typed.argument}: an option of optim.rule is added with a plus sign: +{typed.argument}"
    if (inner := re.search(r"full_key: (\S+)", str(error.__cause__))) and key in _keys():  # key={inner: ...}
        if not any(each.startswith(f"{key}.") for each in _keys()):
            return f"{typed.argument}: {key} takes its keys one by one, with a plus sign: +{key}.KEY=VALUE"
        return f"{typed.argument}: there is no key {inner[1]}{_meant(inner[1], '', _keys())}"
    return f"Could not override {key!r} by {typed.argument}: there is no such key{_meant(key, typed.value, _keys())}"


def _wrong_value(typed: Setting, argument: str, error: BaseException) -> str:
    return f"{argument}: {_first(error.__cause__ or error)}"


def _no_plus(typed: Setting, key: str, error: BaseException) -> str:
    return f"{typed.argument}: {key} exists already; write it without the plus: {typed.argument.lstrip('+')}"


def _twice(typed: Setting, key: str, error: BaseException) -> str:
    advice = "choose it once" if key in ADDED else f"write it without the plus: {typed.argument.lstrip('+')}"
    return f"{typed.argument}: {key} is chosen already; {advice}"


def _sweep(typed: Setting, argument: str, error: BaseException) -> str:
    quoted = f"'{typed.argument.partition('=')[0]}=\"{typed.value}\"'"
    return f"{typed.argument}: several values need --multirun (a sweep); quote a value that has a comma: {quoted}"


_FAULTS = (
    (r"Could not override '(?P<what>[^']+)'", _no_key),
    (r"Could not delete from config\. '(?P<what>[^']+)'", _no_key),
    (r"config group '(?P<what>[^']+)' does not", _no_key),
    (r"An item is already at '(?P<what>[^']+)'", _no_plus),
    (r"Multiple values for (?P<what>[\w/@.]+)\.", _twice),
    (r"(?P<what>[\w/@.]+) appears more than once", _twice),
    (r"Ambiguous value for argument '(?P<what>[^']+)'", _sweep),
    (r"Sweep parameters '(?P<what>[^']+)'", _sweep),
    (r"Error merging override (?P<what>.+)", _wrong_value),
)


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _meant(key: str, value: str, known: Sequence[str]) -> str:
    """Return the end of a `there is no such key` message: a suggestion, or the keys at the same level."""
    guess = _guess(key, known)
    if guess in ADDED:
        return f"; did you mean +{guess}{f'={value}' if value else ''}?"
    if guess is not None:
        return f"; did you mean {guess}?"
    above = key.rpartition(".")[0]
    beside = [each for each in known if each.rpartition(".")[0] == above]
    if not beside:
        beside = [each for each in known if "." not in each]
    return f"; there are {', '.join(each.rpartition('.')[2] for each in beside)}"


def _guess(key: str, known: Sequence[str]) -> str | None:
    """Return the most similar key: one at the same level, one with a similar last part, or a similar whole key."""
    above, _, last = key.rpartition(".")
    beside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == above}
    names: dict[str, str] = {}
    for each in known:
        names.setdefault(each.rpartition(".")[2], each)
    for pool in (beside | ({} if above else {name: name for name in ADDED}), names):
        if (found := meant(last, pool)) is not None:
            return pool[found]
    return meant(key, known)


def _keys(run: DictConfig | None = None) -> list[str]:
    """Return every key of the configuration, inner keys included; of the defaults if `run` is None."""
    if run is None:
        config.register()
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config.directory()), version_base="1.3"):
            run = compose("train")
    tree = OmegaConf.to_container(run, resolve=False)
    assert isinstance(tree, dict)
    unknown = set(_unknown(tree, RunConfig))
    return [key for key in _names(tree) if key not in unknown]


def _names(tree: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{above}{key}.")


def _type(key: str) -> Any:
    at: Any = RunConfig
    for part in key.split("."):
        at = get_type_hints(at).get(part) if is_dataclass(at) else None
    return at


def _unknown(tree: Mapping[Any, Any], schema: type, above: str = "") -> Iterator[str]:
    """Yield the keys of a tree that its dataclass does not have."""
    types = get_type_hints(schema)
    for key, value in tree.items():
        if key not in types:
            yield f"{above}{key}"
        elif is_dataclass(types[key]) and isinstance(value, Mapping):
            yield from _unknown(value, types[key], f"{above}{key}.")
