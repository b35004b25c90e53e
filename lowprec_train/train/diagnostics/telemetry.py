"""Telemetry of quantisation: every `interval` steps all roundings are measured; other steps cost nothing.

    probe    one more forward and backward pass of the step's first micro-batch, with an observer on every linear layer
             and on every norm and activation that keeps codes; its gradients are dropped
    update   the optimizer's own, with an observer on every state that is stored in codes

The probe makes the step's own draws. Modules whose forward is compiled run the eager one in it: an observer in a
compiled graph would be another graph. The loss and the rounding kernels, which have no observer inside, stay compiled
(`torch.compiler.set_stance` would take them too, and eagerly a compiled loss makes an FP32 copy of all logits).
Training meets neither, so losses are the same bits with telemetry and without. Figures are copied to the host like
metrics and read one step later.

One row is one rounding: `{"step", "site", "gemm", "operand", "what", figures}` for an operand of a GEMM, the same with
gemm "saved" for the inputs of a norm or an activation (operand a, and b for the second one), and `{"step", "parameter",
"state", "what", figures}` for the optimizer. `roundings` defines the figures; what is not a finite number is null.
Under recompute the first of two equal roundings counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_train.numerics.quantizer import Quantized, Quantizer
from lowprec_train.ops.formats import FORMATS
from lowprec_train.optim.optimizer import CodedOptimizer
from lowprec_train.precision.linear_plan import OperandPlan
from lowprec_train.precision.outliers import OutlierClamp
from lowprec_train.precision.policy import named_linears
from lowprec_train.precision.saved_activations import saved_inputs
from lowprec_train.train.diagnostics import roundings
from lowprec_train.train.diagnostics.roundings import Figures
from lowprec_train.train.logging.metrics import AsyncHostCopy

Row = dict[str, Any]

SAVED_OPERANDS = "ab"

STORED = {format.carrier: format.name for format in FORMATS.values() if format.native}

OPERAND_SERIES = (
    *(("sqnr_db", "min"), ("sqnr_db", "mean"), ("underflow_pct", "mean"), ("underflow_pct", "max")),
    *(("saturated_pct", "max"), ("clamped_blocks_pct", "max"), ("nonfinite_pct", "max")),
)
STATE_SERIES = (("sqnr_db", "mean"), ("sqnr_db", "min"), ("underflow_pct", "mean"), ("stalled_pct", "mean"))
REDUCE: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max, "mean": fmean}


class Record:
    """The roundings of one step as they come, on the device. `labels` and figures are kept by what they are of."""

    def __init__(self, names: Mapping[nn.Parameter, str], stored: Callable[[nn.Parameter, str], str]) -> None:
        self.rows: dict[tuple[str, ...], tuple[Row, Figures]] = {}
        self.forward_over = False
        self._names, self._stored = names, stored

    def operand(self, site: str, plan: OperandPlan, x: Tensor, rounded: Quantized) -> None:
        """An observer of `Linear`, given its site."""
        assert plan.quantizer is not None
        labels = {"site": site, "gemm": plan.gemm.name.lower(), "operand": plan.operand.name.lower()}
        self._add(labels | {"what": plan.rounding}, x, rounded, plan.quantizer, plan.outliers)

    def saved(self, site: str, x: Tensor, rounded: Quantized, how: Quantizer) -> None:
        """An observer of `QuantizedSavedInput`, given its site: it meets a module's inputs in turn, in forward only."""
        if not self.forward_over:
            known = sum((site, "saved", operand) in self.rows for operand in SAVED_OPERANDS)
            labels = {"site": site, "gemm": "saved", "operand": SAVED_OPERANDS[known], "what": str(how)}
            self._add(labels, x, rounded, how)

    def state(self, parameter: nn.Parameter, state: str, before: Tensor, wanted: Tensor, after: Tensor) -> None:
        """An observer of `CodedOptimizer.step`."""
        labels = {"parameter": self._names[parameter], "state": state, "what": self._stored(parameter, state)}
        self.rows[labels["parameter"], state] = labels, roundings.of_state(before, wanted, after)

    def _add(
        self, labels: Row, x: Tensor, rounded: Quantized, how: Quantizer, clamp: OutlierClamp | None = None
    ) -> None:
        """Of two equal roundings, as recomputation makes them, the first."""
        key = (labels["site"], labels["gemm"], labels["operand"])
        if key not in self.rows:
            self.rows[key] = labels, roundings.of_operand(x, rounded, how, clamp)


class Telemetry:
    """Watches `model` and `optimizer` at every step whose number, counted from 1, `interval` divides; 0: at none.

    Raises ValueError for a negative interval.
    """

    def __init__(self, model: nn.Module, optimizer: CodedOptimizer, *, interval: int = 0) -> None:
        if interval < 0:
            raise ValueError(f"telemetry_interval={interval} must not be negative (0: no telemetry)")
        self.model, self.optimizer, self.interval = model, optimizer, interval
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._sent: dict[int, tuple[list[tuple[Row, Figures]], AsyncHostCopy]] = {}

    def due(self, step: int) -> bool:
        """Whether a step, counted from 1, is watched."""
        return self.interval > 0 and step % self.interval == 0

    def probe(self, loss: Callable[[], Tensor]) -> Record:
        """The roundings of one forward and backward pass; the model's gradients are none before and after."""
        record = Record(self._names, self._stored)
        with eager(self.model), self._watched(record):
            total = loss()
            record.forward_over = True
            total.backward()
        self.model.zero_grad(set_to_none=True)
        return record

    def send(self, step: int, record: Record, device: torch.device) -> None:
        """Set the figures of a step out for the host; nothing waits for them."""
        rows = list(record.rows.values())
        if rows:
            figures = [figure.double() for _, each in rows for figure in each.values()]
            self._sent[step] = rows, AsyncHostCopy(torch.stack(figures), device)

    def read(self, step: int) -> list[Row]:
        """The rows of a step, once; none where it was not watched. Waits until the device has made them."""
        if step not in self._sent:
            return []
        rows, arriving = self._sent.pop(step)
        numbers = (number if math.isfinite(number) else None for number in arriving.read())
        return [{"step": step, **labels} | {name: next(numbers) for name in each} for labels, each in rows]

    @contextmanager
    def _watched(self, record: Record) -> Iterator[None]:
        observers: dict[Any, Any] = {module: partial(record.saved, name) for name, module in saved_inputs(self.model)}
        observers |= {linear: partial(record.operand, name) for name, linear in named_linears(self.model)}
        for module, observer in observers.items():
            module.observer = observer
        try:
            yield
        finally:
            for module in observers:
                module.observer = None

    def _stored(self, parameter: nn.Parameter, state: str) -> str:
        """Format of a state, e.g. "E4M3 expanded"; a master without codes of its own is the parameter."""
        kept = self.optimizer.state[parameter]
        expanded = " expanded" if f"{state}.exponent" in kept else ""
        return STORED[kept.get(state, parameter).dtype] + expanded


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Modules run the forward of their class; one of their own, as `Transformer.compile_blocks` gives, comes back."""
    compiled = {module: module.__dict__.pop("forward") for module in model.modules() if "forward" in module.__dict__}
    try:
        yield
    finally:
        for module, forward in compiled.items():
            module.forward = forward


def aggregates(rows: Sequence[Row]) -> dict[str, float]:
    """A few series over all layers: `quant/fprop.a/sqnr_db_min`, `opt/exp_avg_sqnr_db`. Left out: without a number."""
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
