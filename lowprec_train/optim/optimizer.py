"""An optimizer is a rule times codecs: what the new moments and weights are, and how they are stored between two steps.

A rule (`ops.updates.Rule`; AdamW is `ops.adamw`) computes in FP32; codecs (`optim.codecs`) decode before and encode
after it. Vectors keep FP32 state. Clipping and skipping happen on the device: global-norm clipping is a division by
max(norm / clip, 1), and a non-finite step is a found_inf of 1: weights, codes, scales and step counters stay as they
were, and the host never waits to learn which it was.

Parameters may be shards of whole tensors, as DTensors or plain: each rank steps its own, to the bits that the whole
would have there. Global amax and RMS are all-reduced before the step (`optim.tensor_stats`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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
    """A rule over coded state, also on CPU, with a device-side gradient divisor and skip flag.

    State exists from the start (a checkpoint of step 0 has it, and a lack of memory shows before the first step): plain
    tensors by flat names, `exp_avg` for codes, `exp_avg.scale` for what belongs to them, `master` where the parameter
    is not the master itself. With a reduced master the parameters of matrices become BF16 here, and their gradients
    stay FP32, so that micro-batches are summed in FP32; build the optimizer before a forward pass. A DTensor parameter
    stays FP32 and holds the BF16 values: FSDP2 rounds gradients to the dtype of the parameters that it keeps.

    Args:
        params: FP32 parameters or groups, see `parameter_groups`.
        rule: of groups that name none.
        codecs: of moments and master weights of matrices.
        lr: learning rate, a float; `set_lr` changes it between steps.
        weight_decay: of groups that name none.
        seed: the run's seed, for stochastic rounding.
        backend: "apex": NVIDIA's kernel steps everything (`optim.apex`, whose `check` says what it takes).
        fused: torch's kernel for AdamW where everything is FP32 and ours is not compiled; False: our op there too.
        offload: keep states of matrices in pinned host memory, and bring each to the device for its update
            (`optim.host_states`). Parameters may then be on the host before, and lie on `device` after.
        device: where updates are made; None: where the parameters are.
        shards: of parameters that this rank has a shard of. Building the optimizer and stepping it are then collective:
            all ranks do so, with the same gradients present.

    Raises:
        ValueError: a hyper-parameter out of its range, a DTensor without a shard, a shard that its codecs cannot store.
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
        self._device = device or self.param_groups[0]["params"][0].device
        self._host = HostStates(self._device) if offload else None
        with torch.no_grad():
            for group in self.param_groups:
                added = self._add(group, codecs or Codecs(), shards or {})
                self._states |= {held.owner: held for held in (with_regions(added) if group["rule"].gathers else added)}
            self._start()
        if self._host is not None:
            self._host.ready()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def along(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the state tensors that are sharded with `parameter`, whose whole has `shape`; the others are
        the same wherever a shard of it is held.
        """
        return self._states[parameter].codecs.along(shape)

    def value_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """What the values of `parameter` are rounded to: its dtype, or less than that where FSDP2 wants FP32."""
        return self._states[parameter].codecs.master.parameter_dtype

    def group_of(self, parameter: nn.Parameter) -> Group | None:
        """The ranks that hold shards of `parameter`; None where it is whole."""
        return self._states[parameter].group

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        observer: Observer | None = None,
    ) -> None:
        """One update.

        Args:
            grad_scale: 0-dim FP32 tensor on the parameters' device; gradients are divided by it. `.grad` may change.
            found_inf: 0-dim FP32 tensor there; 1.0 leaves parameters and state bit for bit as they are.
            observer: is told of every state that is rounded.
        """
        away = set() if self._host is None else {p for p in self._states if p.grad is not None and p in self._host}
        for parameter in (each for each in self._states if each in away):
            self.step_only(parameter, grad_scale=grad_scale, found_inf=found_inf)
        here = [group | {"params": [p for p in group["params"] if p not in away]} for group in self.param_groups]
        batches = [each for group in here for each in self._batches(group, grad_scale, found_inf)]
        for batch, known in zip(batches, tensor_stats(batches), strict=True):
            if observer is not None:
                batch.report(observer, known.rms, known.amax)
            batch.step(known.rms, known.amax)

    @torch.no_grad()
    def step_only(
        self, parameter: nn.Parameter, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """One update of one parameter, which has a gradient, to the bits of `step`, whose arguments these are."""
        (group,) = (each for each in self.param_groups if any(member is parameter for member in each["params"]))
        with nullcontext() if self._host is None or parameter not in self._host else self._host.there(parameter):
            batches = list(self._batches(group | {"params": [parameter]}, grad_scale, found_inf))
            for batch, known in zip(batches, tensor_stats(batches), strict=True):
                batch.step(known.rms, known.amax)

    @torch.no_grad()
    def update_rms(self, *, grad_scale: Tensor | None = None) -> dict[nn.Parameter, Tensor]:
        """Before a step, of each parameter with a gradient: sqrt(mean(g^2 / max(v', eps^2))), v' being Adam's second
        moment after it, without its bias (arXiv 2304.13013). About 1; larger where gradients outgrow it.
        """
        batches = [each for group in self.param_groups for each in self._batches(group, grad_scale, None)]
        pairs = zip(batches, update_rms(batches), strict=True)
        return {held.owner: rms[place] for batch, rms in pairs for place, held in enumerate(batch.members)}

    def prefetch(self) -> None:
        """Before a step, where states are on the host: fetch the first ones while it computes."""
        if self._host is not None:
            self._host.begin()

    def synchronize(self) -> None:
        """Before states are read or filled elsewhere: wait until those on the host are those of the last step."""
        if self._host is not None:
            self._host.synchronize()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters, and every tensor bit for bit, into the live ones: torch would cast codes to the parameter's
        dtype.
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
        """Codes of zero moments and of the first weights."""
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

    def _batches(self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterable[Batch]:
        """The group's parameters that have gradients, those together that are stepped alike."""
        alike: dict[tuple[StateCodecs, Group | None, object], list[ParamState]] = {}
        for parameter in (each for each in group["params"] if each.grad is not None):
            held = self._states[parameter]
            here = held.parameter
            kind = (held.gradient.dtype, here.device, here.is_contiguous())
            alike.setdefault((held.codecs, held.group, kind), []).append(held)
        for (codecs, ranks, _), members in alike.items():
            batch = Batch(
                rule=group["rule"],
                codecs=codecs,
                group=ranks,
                members=tuple(members),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                grad_scale=grad_scale,
                found_inf=found_inf,
                seed=self._seed,
            )
            own = next((kind for kind in self._kinds if kind.serves(batch)), Batch)
            yield (ApexAdamW if self._apex else own)(**vars(batch))


def parameter_groups(
    model: nn.Module, weight_decay: float, rule: Rule | None = None, adamw: AdamWRule | None = None
) -> list[dict[str, Any]]:
    """Decay for weights with two or more dimensions, embeddings among them, none for norms and biases.

    `indexed` of a group: places of the weights that are looked up by index (`codecs.Codecs`). rule: the
    optimizer's if left out. adamw: takes what is no hidden matrix where the rule wants these alone: vectors,
    embeddings and `head`.

    Raises:
        ValueError: a negative decay, a parameter that is not FP32 (master weights are), or one that is still on the
            meta device.
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
