"""The optimizer: a rule computes new moments and weights, codecs store them between two steps.

A rule (`ops.updates.Rule`; AdamW is `ops.adamw`) computes in FP32; codecs (`optim.codecs`) decode its inputs and encode
its results. Vectors have FP32 states. Clipping and skipping happen on the device, without host synchronization:
global-norm clipping divides by max(norm / clip, 1), and with found_inf = 1 weights, codes, scales and step counters are
unchanged.

Parameters may be shards, as DTensors or plain tensors: each rank updates its shard, with the same bits as an update of
the whole tensor. Global amax and RMS are all-reduced before the step (`optim.tensor_stats`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.group import Group
from lowprec_train.ops import updates
from lowprec_train.ops.adamw import AdamWRule
from lowprec_train.ops.codecs import StateCodecs, as_matrix
from lowprec_train.ops.updates import Rule
from lowprec_train.optim.apex import ApexAdamW
from lowprec_train.optim.batch import Batch, Observer
from lowprec_train.optim.codecs import Codecs
from lowprec_train.optim.fused import FusedAdamW, TorchAdamW
from lowprec_train.optim.host_states import HostStates
from lowprec_train.optim.param_state import ParamState, param_state, with_regions
from lowprec_train.optim.shard import Shard
from lowprec_train.optim.tensor_stats import over_groups, tensor_stats, update_rms

__all__ = ["CodedOptimizer", "Observer", "parameter_groups"]


class CodedOptimizer(torch.optim.Optimizer):
    """Optimizer with quantised states, on CPU and GPU, with a gradient divisor and a skip flag on the device.

    States are allocated at construction, so that checkpoints of step 0 contain them and a lack of memory is noticed
    before the first step. They are plain tensors with flat names: `exp_avg` for codes, `exp_avg.scale` for their
    scales, `master` if the parameter is not the master. With a reduced master, parameters of matrices become BF16 here
    and their gradients stay FP32, so that micro-batches are summed in FP32: build the optimizer before a forward pass.
    A DTensor parameter stays FP32 with BF16 values, because FSDP2 rounds gradients to the dtype of its parameters.

    Args:
        params: FP32 parameters or groups, see `parameter_groups`.
        rule: of groups without a rule.
        codecs: of moments and master weights of matrices.
        lr: learning rate, a float; `set_lr` changes it between steps.
        weight_decay: of groups without a value.
        seed: the run's seed, for stochastic rounding.
        backend: "apex": NVIDIA's kernel updates all parameters (`optim.apex.check` lists what it supports).
        fused: use torch's AdamW kernel if everything is FP32 and our kernel is not compiled; False: always our op.
        offload: keep states of matrices in pinned host memory and copy them to the device for their update
            (`optim.host_states`). Parameters may be on the host before; they are on `device` afterwards.
        device: device of the updates; None: that of the parameters.
        shards: shards of sharded parameters. Construction and steps are then collective: all ranks call them, with the
            same gradients present.

    Raises:
        ValueError: a hyper-parameter out of range, a DTensor without a shard, a shard that its codecs cannot store.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule | None = None,
        codecs: Codecs | None = None,
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        seed: int = 0,
        fused: bool = True,
        backend: str = "own",
        shards: Mapping[nn.Parameter, Shard] | None = None,
        offload: bool = False,
        device: torch.device | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number and not negative, got {value}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rule": rule or AdamWRule()})
        self._seed = seed & 0x7FFFFFFFFFFFFFFF
        self._kinds = (TorchAdamW, FusedAdamW) if fused else (FusedAdamW,)
        self._apex = backend == "apex"
        self._states: dict[nn.Parameter, ParamState] = {}
        self._groups = {p: place for place, group in enumerate(self.param_groups) for p in group["params"]}
        self._device = device or self.param_groups[0]["params"][0].device
        self._host = HostStates(self._device) if offload else None
        self._rates = [torch.full((), math.nan, dtype=torch.float64, device=self._device) for _ in self.param_groups]
        self._known_rates = [math.nan] * len(self._rates)
        with torch.no_grad():
            for group in self.param_groups:
                added = self._add(group, codecs or Codecs(), shards or {})
                self._states |= {held.owner: held for held in (with_regions(added) if group["rule"].gathers else added)}
            self._start()
        if self._host is not None:
            self._host.ready()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for place, group in enumerate(self.param_groups):
            group["lr"] = lr
            self._rate(place)

    def along(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the unsharded shapes of state tensors that are sharded like `parameter`, whose unsharded shape is
        `shape`. Other state tensors are equal on all ranks with a shard.
        """
        return self._states[parameter].codecs.along(shape)

    def value_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype to which values of `parameter` are rounded: its own, or less if FSDP2 needs FP32."""
        return self._states[parameter].codecs.master.parameter_dtype

    def group_of(self, parameter: nn.Parameter) -> Group | None:
        """Return the ranks with shards of `parameter`; None if it is not sharded."""
        return self._states[parameter].group

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Update all parameters with gradients.

        Args:
            grad_scale: divisor of gradients, 0-dim FP32 on the device of the parameters. `.grad` may change.
            found_inf: 0-dim FP32 there; 1.0 leaves all bits of parameters and states unchanged.
            observer: called for every state that is rounded.

        Raises:
            ValueError: found_inf is not one number.
        """
        if found_inf is not None and found_inf.numel() != 1:
            raise ValueError(f"found_inf of step is one number, 0-dim, not a tensor of shape {tuple(found_inf.shape)}")
        away = set() if self._host is None else {p for p in self._states if p.grad is not None and p in self._host}
        self.step_only([each for each in self._states if each in away], grad_scale=grad_scale, found_inf=found_inf)
        here = [each for each in self._states if each not in away]
        self._step_together(here, grad_scale, found_inf, observer)

    @torch.no_grad()
    def step_only(
        self, parameters: Sequence[nn.Parameter], *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Update parameters that have gradients, with the bits and the arguments of `step`. With offloaded states, they
        are updated one by one. found_inf: one number, or [parameters]. Raises ValueError for another count.
        """
        host = self._host
        if host is None:
            self._step_together(parameters, grad_scale, found_inf)
            return
        found_inf = _one_or_each(found_inf, len(parameters))
        skips = [found_inf] * len(parameters) if found_inf is None or not found_inf.ndim else found_inf.unbind()
        for parameter, skip in zip(parameters, skips, strict=True):
            with host.there(parameter) if parameter in host else nullcontext():
                self._step_together([parameter], grad_scale, skip)

    def _step_together(
        self,
        parameters: Sequence[nn.Parameter],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        observer: Observer | None = None,
    ) -> None:
        batches = list(self._batches(parameters, grad_scale, found_inf))
        for batch, known in zip(batches, tensor_stats(batches), strict=True):
            if observer is not None:
                batch.report(observer, known.rms, known.amax)
            batch.step(known.rms, known.amax)

    @torch.no_grad()
    def update_rms(self, *, grad_scale: Tensor | None = None) -> dict[nn.Parameter, Tensor]:
        """Return sqrt(mean(g^2 / max(v', eps^2))) of each parameter with a gradient, before a step; v' is the
        bias-corrected second moment after it (arXiv 2304.13013). About 1; larger if the second moment is out of date.
        """
        batches = list(self._batches(list(self._states), grad_scale, None))
        pairs = zip(batches, update_rms(batches), strict=True)
        return {held.owner: rms[place] for batch, rms in pairs for place, held in enumerate(batch.members)}

    def prefetch(self) -> None:
        """Start to fetch offloaded states. Call it before a step."""
        if self._host is not None:
            self._host.begin()

    def synchronize(self) -> None:
        """Wait until offloaded states are up to date. Call it before other code reads or writes states."""
        if self._host is not None:
            self._host.synchronize()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy hyper-parameters and all tensors into the existing ones, bit for bit; torch would cast codes to the
        dtype of the parameter.
        """
        self.synchronize()
        live = {parameter: held.state for parameter, held in self._states.items()}
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, ours, strict=True):
            if parameter in live:
                self.state[parameter] = live[parameter]
                for key, tensor in live[parameter].items():
                    updates.write(tensor, state_dict["state"][index][key].to(tensor.device), None)

    def _add(self, group: dict[str, Any], codecs: Codecs, shards: Mapping[nn.Parameter, Shard]) -> list[ParamState]:
        added: list[ParamState] = []
        indexed = {id(group["params"][place]) for place in group.get("indexed", ())}
        for parameter in (each for each in group["params"] if each.requires_grad):
            if isinstance(parameter, DTensor) and parameter not in shards:
                shape = tuple(parameter.shape)
                raise ValueError(f"a DTensor parameter of shape {shape} has no shard that says where it lies")
            stored = codecs.of(group["rule"], matrix=parameter.ndim >= 2, indexed=id(parameter) in indexed)
            state: dict[str, Tensor] = self.state[parameter]
            index = len(self._states) + len(added)
            added.append(param_state(parameter, index, stored, shards.get(parameter), state, self._device))
        return added

    def _start(self) -> None:
        """Return the codes of zero moments and of the initial weights."""
        sharded = {
            parameter: (held.group, held.codecs.amax({"master": as_matrix(held.parameter)}, held.index.device))
            for parameter, held in self._states.items()
            if held.group is not None and held.codecs.master.one_scale
        }
        amax = over_groups(list(sharded.values()), lambda group, x: group.all_reduce_max(x))
        known = dict(zip(sharded, amax, strict=True))
        for parameter, held in self._states.items():
            weights = as_matrix(held.parameter).to(self._device)
            step = torch.zeros((), dtype=torch.float32, device=weights.device)
            seed = updates.seeds(self._seed, held.index[None], step[None])[0] if held.codecs.master.stochastic else None
            new = {name: torch.zeros_like(weights) for name, _ in held.codecs.moments} | {"master": weights}
            coded = held.codecs.encode(new, amax=known.get(parameter), seed=seed, **held.where)
            value = coded.pop("parameter").view(held.parameter.shape)
            if parameter.ndim < 2:
                coded = {name: tensor.view(parameter.shape) for name, tensor in coded.items()}
            held.state.update({"step": step} | {name: tensor.clone() for name, tensor in coded.items()})
            if isinstance(parameter, DTensor):
                held.parameter.copy_(value)
            elif not held.codecs.master.exact or parameter.device != value.device:
                parameter.data = value
                parameter.grad_dtype = torch.float32
            if self._host is not None and parameter.ndim >= 2:
                self._host.take(parameter, held.state)

    def _rate(self, place: int) -> Tensor:
        """Return the learning rate of a group on the device: kernels read it there, also those of a CUDA graph."""
        lr, rate = self.param_groups[place]["lr"], self._rates[place]
        if lr != self._known_rates[place]:
            rate.fill_(lr)
            self._known_rates[place] = lr
        return rate

    def _batches(
        self, parameters: Sequence[nn.Parameter], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> Iterable[Batch]:
        """Group parameters with gradients by hyper-parameters, codecs and ranks. found_inf: one number, or
        [parameters]. Raises ValueError for another count.
        """
        found_inf = _one_or_each(found_inf, len(parameters))
        skips = None if found_inf is None or not found_inf.ndim else found_inf.unbind()
        alike: dict[tuple[int, StateCodecs, Group | None, object], list[int]] = {}
        for place, parameter in enumerate(parameters):
            if parameter.grad is None:
                continue
            held = self._states[parameter]
            here = held.parameter
            kind = (held.gradient.dtype, here.device, here.is_contiguous())
            alike.setdefault((self._groups[parameter], held.codecs, held.group, kind), []).append(place)
        for (of, codecs, ranks, _), places in alike.items():
            group = self.param_groups[of]
            if skips is not None:
                found_inf = torch.stack([skips[place] for place in places]) if len(places) > 1 else skips[places[0]]
            batch = Batch(
                rule=group["rule"],
                codecs=codecs,
                group=ranks,
                members=tuple(self._states[parameters[place]] for place in places),
                lr=group["lr"],
                rate=self._rate(of),
                weight_decay=group["weight_decay"],
                grad_scale=grad_scale,
                found_inf=found_inf,
                seed=self._seed,
            )
            own = next((kind for kind in self._kinds if kind.serves(batch)), Batch)
            yield (ApexAdamW if self._apex else own)(**vars(batch))


def _one_or_each(found_inf: Tensor | None, parameters: int) -> Tensor | None:
    """Return one number, 0-dim, or one for each parameter."""
    if found_inf is None:
        return None
    if found_inf.numel() not in (1, parameters):
        raise ValueError(f"found_inf is one number or one for each of {parameters} parameters, not {found_inf.numel()}")
    return found_inf.view(()) if found_inf.numel() == 1 else found_inf


def parameter_groups(
    model: nn.Module, weight_decay: float, rule: Rule | None = None, adamw: AdamWRule | None = None
) -> list[dict[str, Any]]:
    """Return groups: with decay for weights of two or more dimensions and embeddings, without for norms and biases.

    `indexed` of a group: indices of embeddings (`codecs.Codecs`). rule: default: that of the optimizer. adamw: the rule
    for vectors, embeddings and `head`, if `rule` is for hidden matrices only.

    Raises:
        ValueError: a negative decay, a parameter that is not FP32, or a parameter on the meta device.
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be a number and not negative, got {weight_decay}")
    apart = rule is not None and rule.hidden_matrices_only
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    hidden: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.is_meta:
            raise ValueError(
                f"the optimizer starts from FP32 weights; {name} is {parameter.dtype} on {parameter.device}"
            )
        if parameter.requires_grad:
            inside = apart and id(parameter) not in looked_up and not name.startswith("head.")
            (vectors if parameter.ndim < 2 else hidden if inside else matrices).append(parameter)
    indexed = [place for place, parameter in enumerate(matrices) if id(parameter) in looked_up]
    others = adamw or AdamWRule() if apart else rule
    groups = [
        {"params": hidden, "weight_decay": weight_decay, "indexed": [], "rule": rule},
        {"params": matrices, "weight_decay": weight_decay, "indexed": indexed, "rule": others},
        {"params": vectors, "weight_decay": 0.0, "indexed": [], "rule": others},
    ]
    return [{key: value for key, value in group.items() if value is not None} for group in groups if group["params"]]
