"""The linter: rules that find settings which train but silently give bad results, before the first step.

A rule looks at what a run is about to do (its numbers, the recipe of every linear in every phase, the path each GEMM
takes) and names what is known to fail, with the paper or the report it is known from and a way out. Errors end the run
before any work; warnings are printed and kept in run.json. `lint_allow=[rule]` waives a rule by name: an experiment may
want the very combination, and its run says so.

Settings that cannot work (sizes that do not divide, missing devices) are refused in checks.py; the linter is about
settings that work but are not advisable.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import wraps
from types import ModuleType
from typing import Any

from lowprec_train.config import RunConfig
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.optim.codecs import Codecs
from lowprec_train.optim.schedule import Schedule
from lowprec_train.precision.linear_plan import LinearPlan
from lowprec_train.precision.recipe import Gemm, LinearRecipe
from lowprec_train.precision.schedule import Phase
from lowprec_train.train.describe import INDEX, Plans


class Severity(Enum):
    """Whether a finding ends the run."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Linears that compute alike: `blocks.*.mlp.down`, their recipe and plan. last: one is in the last block."""

    layers: str
    recipe: LinearRecipe
    plan: LinearPlan
    last: bool = False

    @property
    def in_blocks(self) -> bool:
        """False for the head."""
        return ".*." in self.layers


@dataclass(frozen=True, kw_only=True)
class RoundedOperand:
    """One quantised side of one GEMM. side: `a` (X, dY, dY^T) or `b` (W, W^T, X^T)."""

    group: LayerGroup
    gemm: str
    side: str
    quantizer: Quantizer

    @property
    def fault(self) -> "Fault":
        """This operand as what a rule found."""
        return Fault(what=f"{self.gemm}.{self.side} = {self.quantizer}", where=self.group.layers)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run is about to do, as values."""

    run: RunConfig
    layer_groups: tuple[LayerGroup, ...]
    codecs: Codecs  # of moments and master weights
    decays: Mapping[str, float]  # of the optimizer's moments
    learning_rate: Schedule  # of a 0-based step
    on_gpu: bool = False

    def gemms(self) -> Iterator[tuple[LayerGroup, str, Gemm]]:
        """Every GEMM that quantises something."""
        return ((s, name, g) for s in self.layer_groups for name, g in s.recipe.gemms().items() if not g.is_identity)

    def operands(self) -> Iterator[RoundedOperand]:
        """Every operand that is rounded; fprop's codes in a backward GEMM were counted in fprop."""
        for group, name, gemm in self.gemms():
            for side in ("a", "b"):
                quantizer = getattr(gemm, side)
                if isinstance(quantizer, Quantizer):
                    yield RoundedOperand(group=group, gemm=name, side=side, quantizer=quantizer)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, with the offending value, and the layers where it is (none for the run as a whole)."""

    what: str
    where: str = ""


Find = Callable[[RunPlan], Iterable[Fault]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One combination known to go wrong."""

    name: str
    severity: Severity
    find: Find
    why: str  # with its source, an arXiv id or owner/repo#N
    instead: str  # a way out
    on_gpu: bool  # holds on a CUDA device only


def rule(
    *, why: str, instead: str, severity: Severity = Severity.WARNING, on_gpu: bool = False
) -> Callable[[Find], Rule]:
    """Make a rule, of the function's name, out of a function that finds the faults of a run."""

    def made(find: Find) -> Rule:
        name = find.__name__.replace("_", "-")
        return Rule(name=name, severity=severity, find=find, why=why, instead=instead, on_gpu=on_gpu)

    return made


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """The rules that modules define, in the order of their lines."""
    return tuple(each for module in modules for each in vars(module).values() if isinstance(each, Rule))


def operands(wrong: Callable[[RoundedOperand], bool]) -> Find:
    """The faults of a run whose operands `wrong` looks at one at a time."""

    @wraps(wrong)
    def find(plan: RunPlan) -> Iterator[Fault]:
        return (operand.fault for operand in plan.operands() if wrong(operand))

    return find


def gemms(wrong: Callable[[LayerGroup, str, Gemm], str]) -> Find:
    """The faults of a run whose GEMMs `wrong` looks at one at a time; it says what is wrong, or nothing."""

    @wraps(wrong)
    def find(plan: RunPlan) -> Iterator[Fault]:
        found = ((group, name, wrong(group, name, gemm)) for group, name, gemm in plan.gemms())
        return (Fault(what=f"{name} = {what}", where=group.layers) for group, name, what in found if what)

    return find


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that applies, with every value it applies to."""

    rule: str
    severity: Severity
    what: str
    why: str
    instead: str
    waived: bool = False

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}: {self.why}. Instead: {self.instead} (lint_allow=[{self.rule}] waives it)"


@dataclass(frozen=True)
class Report:
    """The findings of a run."""

    findings: tuple[Finding, ...] = field(default_factory=tuple)

    @property
    def errors(self) -> list[Finding]:
        """Not waived, and the run must not begin."""
        return [f for f in self.findings if f.severity is Severity.ERROR and not f.waived]

    @property
    def lines(self) -> list[str]:
        """What the log says of warnings and of rules that were waived."""
        waived = [f"waived by lint_allow: {f.rule}: {f.what}: {f.why}" for f in self.findings if f.waived]
        return waived + [str(f) for f in self.findings if f.severity is Severity.WARNING and not f.waived]

    @property
    def overrides(self) -> list[str]:
        """Waived rules, as a run names what was changed in it."""
        return [f"lint_allow={f.rule}" for f in self.findings if f.waived]

    @property
    def facts(self) -> list[dict[str, Any]]:
        """For run.json."""
        return [asdict(f) | {"severity": f.severity.value} for f in self.findings]


def layer_groups(phases: Sequence[Phase], plans: Sequence[Plans]) -> tuple[LayerGroup, ...]:
    """The linears of all phases, those that compute alike as one. plans: of each phase, by name."""
    groups: dict[tuple[Any, ...], list[LayerGroup]] = {}
    for phase, table in zip(phases, plans, strict=True):
        names = list(phase.recipes)
        for name, recipe in phase.recipes.items():
            label = re.sub(INDEX, ".*.", name)
            group = LayerGroup(layers=label, recipe=recipe, plan=table[name], last=_is_last(name, names))
            groups.setdefault((label, recipe, table[name].shape), []).append(group)
    return tuple(replace(alike[0], last=any(group.last for group in alike)) for alike in groups.values())


def _is_last(name: str, names: Sequence[str]) -> bool:
    """True for the linears of the last block."""
    numbered = [match[0] for match in (re.match(rf".*?{INDEX}", each) for each in names) if match]
    return bool(numbered) and name.startswith(numbered[-1])


def examine(plan: RunPlan, rules: Sequence[Rule], allow: Sequence[str] = ()) -> Report:
    """Every rule over the plan. allow: names of rules that are waived. ValueError for a name that is no rule."""
    known = [rule.name for rule in rules]
    for name in allow:
        if name not in known:
            raise ValueError(f"lint_allow: {name!r} is no rule; rules are {', '.join(known)}")
    found = (_finding(rule, plan, waived=rule.name in allow) for rule in rules if plan.on_gpu or not rule.on_gpu)
    return Report(tuple(finding for finding in found if finding is not None))


def _finding(rule: Rule, plan: RunPlan, *, waived: bool) -> Finding | None:
    places: dict[str, list[str]] = {}
    for fault in dict.fromkeys(rule.find(plan)):
        places.setdefault(fault.what, []).append(fault.where)
    if not places:
        return None
    what = "; ".join(f"{text} in {', '.join(where)}" if any(where) else text for text, where in places.items())
    return Finding(rule=rule.name, severity=rule.severity, what=what, why=rule.why, instead=rule.instead, waived=waived)


def refuse(report: Report) -> None:
    """ValueError that lists every error of the report that is not waived."""
    if report.errors:
        raise ValueError("\n".join(["the start-up linter refuses this run:", *(f"  {f}" for f in report.errors)]))
