"""AdamW over coded state, whose clipping and skipping happen on the device.

    g' = g / grad_scale,   m' = m + (1 - b1) (g' - m),   v' = b2 v + (1 - b2) g'^2
    w' = w (1 - r weight_decay) - r m'^ / (sqrt(v'^) + eps)                   unless found_inf
    r  = lr, or with `clip_updates` lr / max(1, RMS),   RMS^2 = mean(g'^2 / max(v'^, eps^2)) over the tensor

m, v and w are decoded before the update and encoded after it: the weights see the new moments before these are rounded
(arXiv 2410.19313, 2310.18313). m^ and v^ are the bias-corrected moments; update clipping is StableAdamW (arXiv
2304.13013, algorithm 2), the decoupled decay arXiv 1711.05101. Vectors keep FP32 state. Where the CUDA library is
there, its kernel steps all tensors in a few launches (`ops.updates`); else what is FP32 throughout runs in torch's
fused kernel, the rest one by one. An observer makes roundings' steps one by one, to the same bits.

Parameters may be pieces of wholes, as DTensors or plain: each rank steps its own, to the bits that the whole would have
there, and the ranks tell each other a few numbers a tensor, in as many collectives a step as there are kinds of numbers
and sets of ranks (`optim.wholes`).

Global-norm clipping is a division by max(norm / clip, 1), and a non-finite step is a found_inf of 1: weights, codes,
scales and step counters stay as they were, and the host never waits to learn which it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowprec_train.ops.updates import Constants, update, update_rms
from lowprec_train.optim import fused as kernels
from lowprec_train.optim.coded import Observer, Whole, start, step_one
from lowprec_train.optim.master import FP32Master, Master, seeds
from lowprec_train.optim.moments import Codec, of_rows
from lowprec_train.optim.piece import Piece, local
from lowprec_train.optim.slots import FP32_MASTER, FP32_MOMENTS, Held, Slot, slot, steps_after
from lowprec_train.optim.wholes import before_start, before_step

EPS = (1e-18, 1.0)
"""Least and largest eps. Zero makes 0 / 0 of a row that has seen no gradient; below 1e-18 eps^2, which update clipping
divides by, is no normal FP32 number."""

__all__ = ["EPS", "AdamW", "Observer", "Slot", "parameter_groups", "update", "update_rms"]


class AdamW(torch.optim.Optimizer):
    """AdamW, also on CPU, with a device-side gradient divisor and skip flag.

    State exists from the start (a checkpoint of step 0 has it, and a lack of memory shows before the first step): plain
    tensors by flat names, `exp_avg` for codes, `exp_avg.scale` for what belongs to them, `master` where the parameter
    is not the master itself. With a reduced master the parameters of matrices become BF16 here, and their gradients
    stay FP32, so that micro-batches are summed in FP32; build the optimizer before a forward pass. A DTensor parameter
    stays FP32 and holds the BF16 values: FSDP2 rounds gradients to the dtype of the parameters that it keeps.

    Args:
        params: FP32 parameters or groups, see `parameter_groups`.
        lr: learning rate, a float; `set_lr` changes it between steps.
        betas, eps, weight_decay: as in torch; betas default to what language models use.
        moments: codecs of the first and second moments of matrices; a group's `indexed` ones take FP32 in place of one
            scale for all rows.
        master: codec of the weights of matrices, except for a group's `indexed` ones.
        clip_updates: StableAdamW's update clipping.
        seed: the run's seed, for stochastic rounding.
        fused: torch's kernel where everything is FP32 and ours is not there; False: the equations of coded state.
        pieces: of parameters that this rank has a part of. Building the optimizer and stepping it are then collective:
            all ranks do so, with the same gradients present.

    Raises:
        ValueError: a hyper-parameter out of its range, a DTensor without a piece, a piece that its codecs cannot store.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: Iterable[float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        moments: tuple[Codec, Codec] = FP32_MOMENTS,
        master: Master = FP32_MASTER,
        clip_updates: bool = False,
        seed: int = 0,
        fused: bool = True,
        pieces: Mapping[nn.Parameter, Piece] | None = None,
    ) -> None:
        beta1, beta2 = (float(beta) for beta in betas)
        _check(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay})
        self._clip_updates, self._fused = clip_updates, fused and not clip_updates
        self._seed = seed & 0x7FFFFFFFFFFFFFFF
        self._slots: dict[nn.Parameter, Slot] = {}
        for group in self.param_groups:
            indexed = {id(group["params"][place]) for place in group.get("indexed", ())}
            for parameter in (p for p in group["params"] if p.requires_grad):
                how = _stored(parameter, id(parameter) in indexed, moments, master)
                piece = _piece(parameter, pieces or {})
                self._slots[parameter] = slot(local(parameter), len(self._slots), *how, piece)
        known = before_start([(slot, local(parameter)) for parameter, slot in self._slots.items()])
        for parameter, whole in zip(self._slots, known, strict=True):
            self._start(parameter, whole)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def along(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the state tensors that are cut with `parameter`, whose whole has `shape`; the others are the
        same wherever a part of it is held.
        """
        return self._slots[parameter].along(shape)

    def value_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """What the values of `parameter` are rounded to: its dtype, or less than that where FSDP2 wants FP32."""
        return self._slots[parameter].master.parameter_dtype

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
        work: list[tuple[Held, Constants]] = []
        for group in self.param_groups:
            active = [self._held(p) for p in group["params"] if p.grad is not None]
            watched = [] if observer is None else [held for held in active if not held.slot.plain]
            ours = [held for held in active if held.slot.plain] if watched else active
            given = (grad_scale, found_inf)
            rest = watched + kernels.step_served(group, ours, *given, seed=self._seed, clip=self._clip_updates)
            plain = [held for held in rest if self._fused and held.slot.plain]
            if plain:
                kernels.step_plain(group, plain, grad_scale, found_inf)
            coded = [held for held in rest if not (self._fused and held.slot.plain)]
            work += zip(coded, self._constants(group, coded), strict=True)
        known = before_step(work, grad_scale, clip=self._clip_updates)
        for (held, constants), whole in zip(work, known, strict=True):
            step_one(held, constants, whole, grad_scale, found_inf, observer, clip=self._clip_updates)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters, and every tensor bit for bit: torch would cast codes to the parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, ours, strict=True):
            tensors = state_dict["state"].get(index, {})
            self.state[parameter] = {k: v.detach().clone().to(parameter.device) for k, v in tensors.items()}

    @torch.no_grad()
    def _start(self, parameter: nn.Parameter, whole: Whole) -> None:
        """Codes of zero moments and of the first weights."""
        slot, step = self._slots[parameter], torch.zeros((), dtype=torch.float32, device=parameter.device)
        seed = self._seeds([slot], step.unsqueeze(0))[0] if slot.master.stochastic else None
        value, coded = start(slot, local(parameter), seed, whole)
        self.state[parameter] = {"step": step} | coded
        if isinstance(parameter, DTensor):
            local(parameter).copy_(value)
        elif not isinstance(slot.master, FP32Master):
            parameter.data = value
            parameter.grad_dtype = torch.float32

    def _held(self, parameter: nn.Parameter) -> Held:
        assert parameter.grad is not None
        return Held(parameter, self._slots[parameter], local(parameter), local(parameter.grad), self.state[parameter])

    def _constants(self, group: dict[str, Any], members: list[Held]) -> list[Constants]:
        if not members:
            return []
        slots, done = [held.slot for held in members], steps_after([held.state for held in members])
        corrections = [(1.0 - beta ** done.double()).unbind() for beta in group["betas"]]
        draws = any(slot.master.stochastic for slot in slots)
        drawn = self._seeds(slots, done).unbind() if draws else [None] * len(slots)
        given = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return [
            Constants(**given, corrections=pair, seed=seed if slot.master.stochastic else None)
            for slot, pair, seed in zip(slots, zip(*corrections, strict=True), drawn, strict=True)
        ]

    def _seeds(self, slots: list[Slot], steps: Tensor) -> Tensor:
        indices = torch.stack([slot.index for slot in slots])
        return seeds(torch.full_like(indices[0], self._seed), indices, steps)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay for weights with two or more dimensions, embeddings among them, none for norms and biases.

    `indexed` of a group: places of the weights that are looked up by index. Their masters stay FP32, as in FP8-LM's own
    code: a token's gradient is a sum over its occurrences, which torch takes in the parameter's dtype (on the CPU a
    thousand ones make 256 in BF16). Their moments stay FP32 where a codec has one scale for all rows, most of which
    have no gradient in most steps (`moments.of_rows`).

    Raises:
        ValueError: a negative decay, a parameter that is not FP32 (master weights are), or one that is still on the
            meta device.
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be a number and not negative, got {weight_decay}")
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.is_meta:
            raise ValueError(f"AdamW starts from FP32 weights; {name} is {parameter.dtype} on {parameter.device}")
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    indexed = [place for place, parameter in enumerate(matrices) if id(parameter) in looked_up]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "indexed": indexed},
        {"params": vectors, "weight_decay": 0.0, "indexed": []},
    ]
    return [group for group in groups if group["params"]]


def _stored(
    parameter: nn.Parameter, indexed: bool, moments: tuple[Codec, Codec], master: Master
) -> tuple[tuple[Codec, Codec], Master]:
    """Codecs of one parameter: vectors are FP32, what is looked up by index at least as fine as its rows ask for."""
    if parameter.ndim < 2:
        return FP32_MOMENTS, FP32_MASTER
    first, second = moments
    return ((of_rows(first), of_rows(second)), FP32_MASTER) if indexed else (moments, master)


def _piece(parameter: nn.Parameter, pieces: Mapping[nn.Parameter, Piece]) -> Piece | None:
    if isinstance(parameter, DTensor) and parameter not in pieces:
        raise ValueError(f"a DTensor parameter of shape {tuple(parameter.shape)} has no piece that says where it lies")
    return pieces.get(parameter)


def _check(*, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number and not negative, got {value}")
    if not EPS[0] <= eps <= EPS[1]:
        raise ValueError(f"eps must lie in [{EPS[0]:g}, {EPS[1]:g}], got {eps}")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {value}")
