"""AdamW over coded state, whose clipping and skipping happen on the device.

    g' = g / grad_scale,   m' = m + (1 - b1) (g' - m),   v' = b2 v + (1 - b2) g'^2
    w' = w (1 - r weight_decay) - r m'^ / (sqrt(v'^) + eps)                   unless found_inf
    r  = lr, or with `clip_updates` lr / max(1, RMS),   RMS^2 = mean(g'^2 / max(v'^, eps^2)) over the tensor

m, v and w are decoded before the update and encoded after it: the weights see the new moments before these are rounded
(arXiv 2410.19313, 2310.18313). m^ and v^ are the bias-corrected moments; update clipping is StableAdamW (arXiv
2304.13013, algorithm 2), the decoupled decay arXiv 1711.05101. Vectors keep FP32 state, and what is FP32 throughout
runs in torch's fused kernel; what is not, in ours where the CUDA library is there (`ops.updates`), all tensors in a few
launches. An observer makes the steps one by one, to the same bits.

Global-norm clipping is a division by max(norm / clip, 1), and a non-finite step is a found_inf of 1: weights, codes,
scales and step counters stay as they were, and the host never waits to learn which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from lowprec_train.numerics.formats import parse_format
from lowprec_train.ops.library import SERVED
from lowprec_train.ops.updates import Constants, update, update_rms
from lowprec_train.ops.updates import write as _write
from lowprec_train.optim.master import BF16Master, FP16Master, FP32Master, Master, seeds
from lowprec_train.optim.moments import Codec, Expanded, Parts, Plain, Scaled, segments

__all__ = ["AdamW", "Observer", "Slot", "parameter_groups", "update", "update_rms"]

Observer = Callable[[nn.Parameter, str, Tensor, Tensor, Tensor], None]
"""Told of everything that is rounded: parameter, "exp_avg" | "exp_avg_sq" | "master", its value before the step, the
new one, the new one as it was stored; FP32. A step that is skipped is reported as if it were taken."""

FP32_MOMENTS = (Plain("FP32"), Plain("FP32"))
FP32_MASTER = FP32Master()
PARTS = ("codes", "scale", "exponent", "center")


@dataclass(frozen=True)
class Slot:
    """How one parameter is stored, and its index among all (0-dim int64, on its device)."""

    index: Tensor
    moments: tuple[Codec, Codec]
    master: Master

    @property
    def plain(self) -> bool:
        """FP32 throughout."""
        return all(codec.exact for codec in self.moments) and isinstance(self.master, FP32Master)


@dataclass(frozen=True)
class Codecs:
    """How a slot is stored, in the words of the fused op."""

    first: str
    second: str
    master: str
    group: int


class AdamW(torch.optim.Optimizer):
    """AdamW, also on CPU, with a device-side gradient divisor and skip flag.

    State exists from the start (a checkpoint of step 0 has it, and a lack of memory shows before the first step): plain
    tensors by flat names, `exp_avg` for codes, `exp_avg.scale` for what belongs to them, `master` where the parameter
    is not the master itself. With a reduced master the parameters of matrices become BF16 here, and their gradients
    stay FP32, so that micro-batches are summed in FP32; build the optimizer before a forward pass.

    Args:
        params: FP32 parameters or groups, see `parameter_groups`.
        lr: learning rate, a float; `set_lr` changes it between steps.
        betas, eps, weight_decay: as in torch; betas default to what language models use.
        moments: codecs of the first and second moments of matrices.
        master: codec of the weights of matrices, except for a group's `indexed` ones.
        clip_updates: StableAdamW's update clipping.
        seed: the run's seed, for stochastic rounding.
        fused: torch's kernel where everything is FP32; False: the same equations as for coded state.

    Raises:
        ValueError: a hyper-parameter out of its range.
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
                kept = parameter.ndim < 2 or id(parameter) in indexed
                slot = Slot(
                    index=torch.tensor(len(self._slots), device=parameter.device),
                    moments=moments if parameter.ndim >= 2 else FP32_MOMENTS,
                    master=FP32_MASTER if kept else master,
                )
                self._slots[parameter] = slot
                self._start(parameter, slot)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

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
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None]
            plain = [p for p in active if self._fused and self._slots[p].plain]
            coded = [p for p in active if not (self._fused and self._slots[p].plain)]
            if plain:
                self._step_plain(group, plain, grad_scale, found_inf)
            if observer is None:
                coded = self._step_fused(group, coded, grad_scale, found_inf)
            for parameter, constants in zip(coded, self._constants(group, coded), strict=True):
                self._step_coded(parameter, constants, grad_scale, found_inf, observer)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hyper-parameters, and every tensor bit for bit: torch would cast codes to the parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, ours, strict=True):
            tensors = state_dict["state"].get(index, {})
            self.state[parameter] = {k: v.detach().clone().to(parameter.device) for k, v in tensors.items()}

    def _start(self, parameter: nn.Parameter, slot: Slot) -> None:
        """Codes of zero moments and of the first weights."""
        with torch.no_grad():
            zeros, step = torch.zeros_like(parameter), torch.zeros((), dtype=torch.float32, device=parameter.device)
            state = {"step": step}
            for name, codec in zip(("exp_avg", "exp_avg_sq"), slot.moments, strict=True):
                state |= _flat(name, codec.encode(_matrix(zeros)))
            state = {key: value.clone() for key, value in state.items()}
            if not isinstance(slot.master, FP32Master):
                seed = self._seeds([parameter], step.unsqueeze(0))[0] if slot.master.stochastic else None
                value, parts = slot.master.encode(_matrix(parameter.detach()), seed)
                state |= _flat("master", parts)
                parameter.data = value.view(parameter.shape)
                parameter.grad_dtype = torch.float32
        self.state[parameter] = state

    def _step_plain(
        self, group: dict[str, Any], parameters: list[nn.Parameter], grad_scale: Tensor | None, found: Tensor | None
    ) -> None:
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            params=list(parameters),
            grads=[p.grad for p in parameters if p.grad is not None],
            exp_avgs=[state["exp_avg"] for state in states],
            exp_avg_sqs=[state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            grad_scale=grad_scale,
            found_inf=found,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )

    def _step_fused(
        self, group: dict[str, Any], parameters: list[nn.Parameter], grad_scale: Tensor | None, found: Tensor | None
    ) -> list[nn.Parameter]:
        """Update what our kernel serves, the tensors of like codecs in one call; returns the rest."""
        alike: dict[tuple[Codecs, torch.dtype, torch.device], list[nn.Parameter]] = {}
        rest = []
        for parameter in parameters:
            codecs = _codecs(self._slots[parameter])
            assert parameter.grad is not None
            if codecs is None or not parameter.is_contiguous() or "adamw" not in SERVED.get(parameter.device.type, ()):
                rest.append(parameter)
            else:
                key = (codecs, parameter.grad.dtype, parameter.device)
                alike.setdefault(key, []).append(parameter)
        for (codecs, dtype, _), members in alike.items():
            states = [self.state[p] for p in members]
            gradients = [p.grad.contiguous() for p in members if p.grad is not None]
            done = torch.stack([state["step"] for state in states]) + 1.0
            beta1, beta2 = group["betas"]
            torch.ops.lowprec.adamw(
                [p.detach() for p in members],
                gradients if dtype in (torch.float32, torch.bfloat16) else [g.float() for g in gradients],
                _listed(states, "exp_avg"),
                _listed(states, "exp_avg_sq"),
                _listed(states, "master"),
                [state["step"] for state in states],
                torch.stack([1.0 - beta ** done.double() for beta in (beta1, beta2)]),
                torch.stack([self._slots[p].index for p in members]) if "stochastic" in codecs.master else None,
                grad_scale,
                found,
                codecs.first,
                codecs.second,
                codecs.master,
                codecs.group,
                [segments(p.shape[-1]) if p.ndim else 1 for p in members],
                self._seed,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                self._clip_updates,
            )
        return rest

    def _constants(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> list[Constants]:
        if not parameters:
            return []
        done = torch.stack([self.state[p]["step"] for p in parameters]) + 1.0
        corrections = [(1.0 - beta ** done.double()).unbind() for beta in group["betas"]]
        draws = any(self._slots[p].master.stochastic for p in parameters)
        drawn = self._seeds(parameters, done).unbind() if draws else [None] * len(parameters)
        given = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return [
            Constants(**given, corrections=pair, seed=seed if self._slots[p].master.stochastic else None)
            for p, pair, seed in zip(parameters, zip(*corrections, strict=True), drawn, strict=True)
        ]

    def _seeds(self, parameters: list[nn.Parameter], steps: Tensor) -> Tensor:
        indices = torch.stack([self._slots[p].index for p in parameters])
        return seeds(torch.full_like(indices[0], self._seed), indices, steps)

    def _step_coded(
        self,
        parameter: nn.Parameter,
        constants: Constants,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        observer: Observer | None,
    ) -> None:
        assert parameter.grad is not None
        slot, state = self._slots[parameter], self.state[parameter]
        gradient = _matrix(parameter.grad).float()
        gradient = gradient if grad_scale is None else gradient / grad_scale
        old = {name: codec.decode(_parts(state, name)) for name, codec in _named(slot)}
        old["master"] = slot.master.decode(_matrix(parameter.detach()), _parts(state, "master"))
        new = update(old, gradient, constants, clip=self._clip_updates)

        coded: dict[str, Parts] = {name: codec.encode(new[name]) for name, codec in _named(slot)}
        value, coded["master"] = slot.master.encode(new["master"], constants.seed)
        if observer is not None:
            _report(observer, parameter, slot, old, new, value, coded)
        skip = None if found_inf is None else found_inf == 1.0
        for name, parts in coded.items():
            for key, tensor in _flat(name, parts).items():
                _write(state[key], tensor, skip)
        _write(parameter.detach(), value.view(parameter.shape), skip)
        _write(state["step"], state["step"] + 1.0, skip)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay for weights with two or more dimensions, embeddings among them, none for norms and biases.

    `indexed` of a group: places of the weights that are looked up by index. Their masters stay FP32, as in FP8-LM's own
    code: a token's gradient is a sum over its occurrences, which torch takes in the parameter's dtype (on the CPU a
    thousand ones make 256 in BF16).

    Raises:
        ValueError: a negative decay, a parameter that is not FP32 (master weights are), or one that is still on the
            meta device.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay}")
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


def _named(slot: Slot) -> zip[tuple[str, Codec]]:
    return zip(("exp_avg", "exp_avg_sq"), slot.moments, strict=True)


def _report(
    observer: Observer,
    parameter: nn.Parameter,
    slot: Slot,
    old: dict[str, Tensor],
    new: dict[str, Tensor],
    value: Tensor,
    coded: dict[str, Parts],
) -> None:
    for name, codec in _named(slot):
        if not codec.exact:
            observer(parameter, name, old[name], new[name], codec.decode(coded[name]))
    if not isinstance(slot.master, FP32Master):
        observer(parameter, "master", old["master"], new["master"], slot.master.decode(value, coded["master"]))


def _matrix(x: Tensor) -> Tensor:
    return x.flatten(end_dim=-2) if x.ndim > 2 else x


def _flat(name: str, parts: Parts) -> Parts:
    """`codes` under the state's own name, the rest as `<name>.<part>`."""
    return {name if part == "codes" else f"{name}.{part}": value for part, value in parts.items()}


def _parts(state: dict[str, Tensor], name: str) -> Parts:
    prefix = f"{name}."
    parts = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return parts | ({"codes": state[name]} if name in state else {})


def _listed(states: list[dict[str, Tensor]], name: str) -> list[Tensor]:
    """The parts of one name, state after state."""
    held = (_parts(state, name) for state in states)
    return [parts[part] for parts in held for part in PARTS if part in parts]


def _codecs(slot: Slot) -> Codecs | None:
    """None where the fused op knows no such codec, or where two moments differ in their groups."""
    names, groups = [], set()
    for codec in slot.moments:
        if not isinstance(codec, Plain | Scaled | Expanded):
            return None
        kind = {Plain: "", Scaled: " scaled", Expanded: " expanded"}[type(codec)]
        names.append(parse_format(codec.format).name + kind)
        groups |= {codec.group} if isinstance(codec, Expanded) else set()
    masters = {FP32_MASTER: "FP32", FP16Master(True): "FP16 scaled, stochastic", FP16Master(False): "FP16 scaled"}
    master = (masters | {BF16Master(): "BF16, stochastic"}).get(slot.master)
    if master is None or len(groups) > 1:
        return None
    return Codecs(names[0], names[1], master, groups.pop() if groups else 1)


def _check(*, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {value}")
