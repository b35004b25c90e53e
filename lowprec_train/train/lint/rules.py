"""The linter: find settings that train but silently give bad results, before the first step.

A rule reads the plan of a run: its settings, the recipe of every linear in every phase, and the path of each GEMM. It
reports combinations that are known to fail, with the source (a paper or an issue) and an alternative. Errors end the
run before any work; warnings are printed and stored in run.json. `lint_allow=[rule]` waives a rule by name, for
experiments that need the combination; run.json records it.

checks.py refuses settings that cannot work (sizes that do not divide, missing devices). The linter reports settings
that work but are not advisable.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import wraps
from types import ModuleType
from typing import Any

from lowprec_train.config import RunConfig
from lowprec_train.numerics.quantizer import Quantizer
from lowprec_train.ops import updates
from lowprec_train.ops.adamw import AdamWRule
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
    """Linears with the same recipe and plan, e.g. `blocks.*.mlp.down`. last: one of them is in the last block."""

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
    """One quantised operand of one GEMM. side: `a` (X, dY, dY^T) or `b` (W, W^T, X^T)."""

    group: LayerGroup
    gemm: str
    side: str
    quantizer: Quantizer

    @property
    def fault(self) -> "Fault":
        """The fault that a rule reports for this operand."""
        return Fault(what=f"{self.gemm}.{self.side} = {self.quantizer}", where=self.group.layers)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The settings and plans of a run that the rules read."""

    run: RunConfig
    layer_groups: tuple[LayerGroup, ...]
    codecs: Codecs  # of moments and master weights
    rule: updates.Rule  # of the optimizer
    learning_rate: Schedule  # of a 0-based step
    on_gpu: bool = False

    @property
    def uses_adamw(self) -> bool:
        """True if AdamW updates some or all parameters."""
        return isinstance(self.rule, AdamWRule) or self.rule.hidden_matrices_only

    def gemms(self) -> Iterator[tuple[LayerGroup, str, Gemm]]:
        """Yield every GEMM that quantises an operand."""
        return ((s, name, g) for s in self.layer_groups for name, g in s.recipe.gemms().items() if not g.is_identity)

    def operands(self) -> Iterator[RoundedOperand]:
        """Yield every quantised operand. Codes of fprop that a backward GEMM reuses are yielded for fprop only."""
        for group, name, gemm in self.gemms():
            for side in ("a", "b"):
                quantizer = getattr(gemm, side)
                if isinstance(quantizer, Quantizer):
                    yield RoundedOperand(group=group, gemm=name, side=side, quantizer=quantizer)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, with the offending value, and the affected layers ("" for the run as a whole)."""

    what: str
    where: str = ""


Find = Callable[[RunPlan], Iterable[Fault]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination of settings that is known to fail."""

    name: str
    severity: Severity
    find: Find
    why: str  # with its source, an arXiv id or owner/repo#N
    instead: str  # an alternative
    on_gpu: bool  # applies on a CUDA device only


def rule(
    *, why: str, instead: str, severity: Severity = Severity.WARNING, on_gpu: bool = False
) -> Callable[[Find], Rule]:
    """Make a rule from a function that finds the faults of a run. The rule has the function's name."""

    def made(find: Find) -> Rule:
        name = find.__name__.replace("_", "-")
        return Rule(name=name, severity=severity, find=find, why=why, instead=instead, on_gpu=on_gpu)

    return made


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """Return the rules that modules define, in source order."""
    return tuple(each for module in modules for each in vars(module).values() if isinstance(each, Rule))


def operands(wrong: Callable[[RoundedOperand], bool]) -> Find:
    """Make a rule's function from a test of one operand."""

    @wraps(wrong)
    def find(plan: RunPlan) -> Iterator[Fault]:
        return (operand.fault for operand in plan.operands() if wrong(operand))

    return find


def gemms(wrong: Callable[[LayerGroup, str, Gemm], str]) -> Find:
    """Make a rule's function from a test of one GEMM that returns what is wrong, or ""."""

    @wraps(wrong)
    def find(plan: RunPlan) -> Iterator[Fault]:
        found = ((group, name, wrong(group, name, gemm)) for group, name, gemm in plan.gemms())
        return (Fault(what=f"{name} = {what}", where=group.layers) for group, name, what in found if what)

    return find


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that applies, with all values to which it applies."""

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
        """Errors that are not waived: the run must not start."""
        return [f for f in self.findings if f.severity is Severity.ERROR and not f.waived]

    @property
    def lines(self) -> list[str]:
        """Log lines about warnings and waived rules."""
        waived = [f"waived by lint_allow: {f.rule}: {f.what}: {f.why}" for f in self.findings if f.waived]
        return waived + [str(f) for f in self.findings if f.severity is Severity.WARNING and not f.waived]

    @property
    def overrides(self) -> list[str]:
        """The waived rules, in the form of overrides."""
        return [f"lint_allow={f.rule}" for f in self.findings if f.waived]

    @property
    def facts(self) -> list[dict[str, Any]]:
        """The findings as JSON, for run.json."""
        return [asdict(f) | {"severity": f.severity.value} for f in self.findings]


def layer_groups(phases: Sequence[Phase], plans: Sequence[Plans]) -> tuple[LayerGroup, ...]:
    """Group the linears of all phases by recipe and shape. plans: per phase, by name."""
    groups: dict[tuple[Any, ...], list[LayerGroup]] = {}
    for phase, table in zip(phases, plans, strict=True):
        names = list(phase.recipes)
        for name, recipe in phase.recipes.items():
            label = re.sub(INDEX, ".*.", name)
            group = LayerGroup(layers=label, recipe=recipe, plan=table[name], last=_is_last(name, names))
            groups.setdefault((label, recipe, table[name].shape), []).append(group)
    return tuple(replace(alike[0], last=any(group.last for group in alike)) for alike in groups.values())


def _is_last(name: str, names: Sequence[str]) -> bool:
    """Return whether the linear is in the last block."""
    numbered = [match[0] for match in (re.match(rf".*?{INDEX}", each) for each in names) if match]
    return bool(numbered) and name.startswith(numbered[-1])


def examine(plan: RunPlan, rules: Sequence[Rule], allow: Sequence[str] = ()) -> Report:
    """Apply every rule to the plan. allow: names of waived rules. Raises ValueError for an unknown name."""
    known = [rule.name for rule in rules]
    for name in allow:
        if name not in known:
            raise ValueError(f"lint_allow: {name!r} is not a rule; the rules are {', '.join(known)}")
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
    """Raise ValueError that lists every error of the report that is not waived."""
    if report.errors:
        raise ValueError("\n".join(["the start-up linter refuses this run:", *(f"  {f}" for f in report.errors)]))
