"""Telemetry of quantisation: all roundings of every `interval`-th step are measured; other steps cost nothing.

    probe    one more forward and backward pass of the step's first micro-batch, with an observer on every linear layer
             and on every norm and activation that saves codes; its gradients are dropped
    update   the optimizer's own, with an observer on every state that is stored in codes

The probe uses the draws of the step. Modules with a compiled forward run the eager one in it, because an observer in a
compiled graph would need another graph. The loss and the rounding kernels have no observer inside and stay compiled
(`torch.compiler.set_stance` would make them eager too, and an eager loss makes an FP32 copy of all logits). Training is
not affected: losses are the same bits with telemetry and without. Figures are copied to the host asynchronously and
read one step later, like metrics.

One row is one rounding: `{"step", "site", "gemm", "operand", "what", figures}` for an operand of a GEMM, the same with
gemm "saved" for the inputs of a norm or an activation (operand a, and b for the second one), and `{"step", "parameter",
"state", "what", figures}` for the optimizer. `roundings` defines the figures; a number that is not finite is null.
Under recomputation the first of two equal roundings counts.

With several processes the figures are those of one process: of the step's first micro-batch, so only the data-parallel
rank that has it measures operands. Other ranks take part in the probe's all-gathers, and no gradient is reduced.
Operands, saved inputs and states that are sharded are measured shard by shard, and one sum and one maximum over each
group of ranks complete them. Rank 0 has every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowprec_train.group import Group
from lowprec_train.model.transformer import COMPILED
from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.ops.formats import FORMATS
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.optim.tensor_stats import over_groups
from lowprec_train.precision.linear_plan import OperandPlan, Source
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.policy import named_linears
from lowprec_train.precision.saved_activations import saved_inputs
from lowprec_train.precision.split import Split
from lowprec_train.train.diagnostics import roundings
from lowprec_train.train.diagnostics.roundings import Figures, Tally
from lowprec_train.train.logging.metrics import AsyncHostCopy

Row = dict[str, Any]
Entry = tuple[Row, Tally, Group | None]
"""Labels of a row, its tally, and the ranks with the other shards of what was rounded."""

SAVED_OPERANDS = "ab"

STORED = {format.carrier: format.name for format in FORMATS.values() if format.native}

OPERAND_SERIES = (
    *(("sqnr_db", "min"), ("sqnr_db", "mean"), ("underflow_pct", "mean"), ("underflow_pct", "max")),
    *(("saturated_pct", "max"), ("clamped_blocks_pct", "max"), ("nonfinite_pct", "max")),
)
STATE_SERIES = (("sqnr_db", "mean"), ("sqnr_db", "min"), ("underflow_pct", "mean"), ("stalled_pct", "mean"))
REDUCE: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max, "mean": fmean}


class Record:
    """The roundings of one step, on the device, by what was rounded. Its methods are observers.

    weights: the ranks with the other shards of each linear layer's weight, by its name. Others: as of `Telemetry`.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        stored: Callable[[nn.Parameter, str], str],
        group_of: Callable[[nn.Parameter], Group | None],
        *,
        tp: Group | None,
        first_data: bool,
        weights: Mapping[str, Group | None],
    ) -> None:
        self.entries: dict[tuple[str, ...], Entry] = {}
        self.forward_over = False
        self._names, self._stored, self._group_of = names, stored, group_of
        self._tp, self._first_data, self._weights = tp, first_data, weights

    def operand(self, site: str, split: Split | None, plan: OperandPlan, x: Tensor, rounded: Quantized) -> None:
        """Add an operand of a linear layer. split: of the layer."""
        assert plan.quantizer is not None
        labels = {"site": site, "gemm": plan.gemm.name.lower(), "operand": plan.operand.name.lower()}
        labels["what"] = plan.rounding
        if plan.source is Source.ALL_GATHERED:  # codes of this rank's shard of a weight
            self._add(labels, x, rounded, plan.quantizer, group=self._weights.get(site))
        elif self._first_data:
            split = None if plan.cut is None else split
            group = None if split is None else split.group
            self._add(labels, x, rounded, plan.quantizer, clamp=plan.outliers, split=split, group=group)

    def saved(self, site: str, x: Tensor, rounded: Quantized, quantizer: Quantizer) -> None:
        """Add an input of a `QuantizedSavedInput`: of its first inputs in the order of the calls, in forward only."""
        if self._first_data and not self.forward_over:
            known = sum((site, "saved", operand) in self.entries for operand in SAVED_OPERANDS)
            labels = {"site": site, "gemm": "saved", "operand": SAVED_OPERANDS[known], "what": str(quantizer)}
            self._add(labels, x, rounded, quantizer, group=self._tp)

    def state(self, parameter: nn.Parameter, state: str, before: Tensor, wanted: Tensor, after: Tensor) -> None:
        """Add a state of the optimizer, or this rank's shard of it."""
        labels = {"parameter": self._names[parameter], "state": state, "what": self._stored(parameter, state)}
        tally = roundings.tally_state(before, wanted, after)
        self.entries[labels["parameter"], state] = labels, tally, self._group_of(parameter)

    def figures(self) -> list[tuple[Row, Figures]]:
        """Return labels and figures of every row; collective over the groups of sharded rows."""
        entries = list(self.entries.values())
        sharded = [(place, group) for place, (_, _, group) in enumerate(entries) if group is not None]
        tallies = [tally for _, tally, _ in entries]
        sums = [(group, torch.stack(list(tallies[place].sums.values()))) for place, group in sharded]
        tops = [(group, torch.stack(list(tallies[place].tops.values()))) for place, group in sharded]
        totals = over_groups(sums, lambda group, x: group.all_reduce_sum(x))
        largest = over_groups(tops, lambda group, x: group.all_reduce_max(x))
        for (place, _), total, top in zip(sharded, totals, largest, strict=True):
            local = tallies[place]
            tallies[place] = Tally(dict(zip(local.sums, total)), dict(zip(local.tops, top)))
        return [(labels, tally.figures()) for (labels, _, _), tally in zip(entries, tallies, strict=True)]

    def _add(
        self,
        labels: Row,
        x: Tensor,
        rounded: Quantized,
        quantizer: Quantizer,
        *,
        group: Group | None,
        clamp: OutlierClamp | None = None,
        split: Split | None = None,
    ) -> None:
        """Add a rounding, unless an equal one is there, as recomputation makes it."""
        key = (labels["site"], labels["gemm"], labels["operand"])
        if key not in self.entries:
            self.entries[key] = labels, roundings.tally_operand(x, rounded, quantizer, clamp, split), group


class Telemetry:
    """Observes `model` and `optimizer` at every step whose number, counted from 1, `interval` divides; 0: at none.

    tp: the ranks with the other parts of the layers; None: layers are whole. first_data: whether this rank has the
    step's first micro-batch. Raises ValueError for a negative interval.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: CodedOptimizer,
        *,
        interval: int = 0,
        tp: Group | None = None,
        first_data: bool = True,
    ) -> None:
        if interval < 0:
            raise ValueError(f"telemetry_interval={interval} must not be negative (0: no telemetry)")
        self.model, self.optimizer, self.interval = model, optimizer, interval
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        linears = named_linears(model) if interval else ()
        parameters = {name: cast("nn.Parameter", each.weight) for name, each in linears}
        weights = {name: optimizer.group_of(p) for name, p in parameters.items() if p.requires_grad}
        self._role: dict[str, Any] = {"tp": tp, "first_data": first_data, "weights": weights}
        self._sent: dict[int, tuple[list[tuple[Row, Figures]], AsyncHostCopy]] = {}

    def due(self, step: int) -> bool:
        """Return whether a step, counted from 1, is observed."""
        return self.interval > 0 and step % self.interval == 0

    def probe(self, loss: Callable[[], Tensor]) -> Record:
        """Return the roundings of one forward and backward pass. The model has no gradients before and after."""
        record = Record(self._names, self._stored, self.optimizer.group_of, **self._role)
        with eager(self.model), self._watched(record):
            total = loss()
            record.forward_over = True
            total.backward()
        self.model.zero_grad(set_to_none=True)
        return record

    def send(self, step: int, record: Record, device: torch.device) -> None:
        """Start to copy the figures of a step to the host. Collective; nothing waits for the device."""
        rows = record.figures()
        if rows:
            figures = [figure.double() for _, each in rows for figure in each.values()]
            self._sent[step] = rows, AsyncHostCopy(torch.stack(figures), device)

    def read(self, step: int) -> list[Row]:
        """Return the rows of a step, once; none if it was not observed. Waits for the device. Of several ranks, rank 0
        has all rows.
        """
        if step not in self._sent:
            return []
        rows, arriving = self._sent.pop(step)
        numbers = (number if math.isfinite(number) else None for number in arriving.read())
        return [{"step": step, **labels} | {name: next(numbers) for name in each} for labels, each in rows]

    @contextmanager
    def _watched(self, record: Record) -> Iterator[None]:
        observers: dict[Any, Any] = {module: partial(record.saved, name) for name, module in saved_inputs(self.model)}
        observers |= {each: partial(record.operand, name, each.split) for name, each in named_linears(self.model)}
        for module, observer in observers.items():
            module.observer = observer
        try:
            yield
        finally:
            for module in observers:
                module.observer = None

    def _stored(self, parameter: nn.Parameter, state: str) -> str:
        """Return the format of a state, e.g. "E4M3 expanded"; a master without codes is the parameter."""
        kept = self.optimizer.state[parameter]
        expanded = " expanded" if f"{state}.exponent" in kept else ""
        return STORED[kept.get(state, parameter).dtype] + expanded


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Modules run the methods of their class, not the compiled ones that `Transformer.compile_blocks` sets."""
    set_on = ((module, name) for module in model.modules() for name in COMPILED if name in module.__dict__)
    compiled = {(module, name): module.__dict__.pop(name) for module, name in set_on}
    try:
        yield
    finally:
        for (module, name), method in compiled.items():
            setattr(module, name, method)


def aggregates(rows: Sequence[Row]) -> dict[str, float]:
    """Return a few series over all layers: `quant/fprop.a/sqnr_db_min`, `opt/exp_avg_sqnr_db`; none without values."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        prefix = f"opt/{row['state']}_" if "state" in row else f"quant/{row['gemm']}.{row['operand']}/"
        groups.setdefault(prefix, []).append(row)
    found: dict[str, float] = {}
    for prefix, members in groups.items():
        of_state = "state" in members[0]
        for figure, reduction in STATE_SERIES if of_state else OPERAND_SERIES:
            values = [row[figure] for row in members if row[figure] is not None]
            suffix = "" if of_state and reduction == "mean" else f"_{reduction}"
            if values:
                found[f"{prefix}{figure}{suffix}"] = REDUCE[reduction](values)
    return found
