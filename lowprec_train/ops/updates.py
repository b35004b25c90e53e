"""AdamW's step over many tensors, in place: what the fused CUDA kernel of `adamw` means, one tensor after the other.

State crosses the boundary as flat lists of tensors, and how it is stored as strings:

    moments   "FP32" | "BF16"                                   codes
              "FP16 scaled" | "E4M3 scaled" | "E5M2 scaled"     codes, scale [1, 1]: one power of two a tensor
              "E4M3 expanded" | "E5M2 expanded"                 codes, scale, exponent, center: `ops.states`
    masters   "FP32"                                            the FP32 parameter
              "FP16 scaled" | "FP16 scaled, stochastic"         codes, scale; the parameter is their BF16 rounding
              "BF16, stochastic"                                the BF16 parameter

so that `first` holds one, two or four tensors a parameter. Decoded, updated in FP32, encoded: the weights see the new
moments before these are rounded. First moments that are cast or lie under one scale are rounded by `decaying`, all else
to nearest. found_inf = 1 leaves all bits as they are, without a word to the host. The kernel returns these bits; with
update clipping, whose RMS is a sum in another order and in FP32, it returns them up to the roundings of that sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowprec_train.ops import reference, states
from lowprec_train.ops.formats import parse_format
from lowprec_train.ops.philox import philox
from lowprec_train.ops.reference import square_root

STREAM = 1 << 16
"""The draws' stream of masters: those of linear layers count from 0 (`numerics.draws`)."""

SLICE = 1 << 24  # elements that are in FP64 at a time
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Constants:
    """One parameter's numbers of one step. decay, beta and eps are floats; the corrections 1 - b^t are 0-dim FP64."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    corrections: tuple[Tensor, Tensor]
    seed: Tensor | None


def update(
    old: dict[str, Tensor], gradient: Tensor, constants: Constants, *, clip: bool, rms: Tensor | None = None
) -> dict[str, Tensor]:
    """`exp_avg`, `exp_avg_sq` and `master` after one step in FP32; each operation rounds by itself.

    rms: `update_rms` of the whole tensor, where these are parts of it.
    """
    correction1, correction2 = constants.corrections
    m = first_moment(old["exp_avg"], gradient, constants.betas)
    v = second_moment(old["exp_avg_sq"], gradient, constants.betas)
    rate = torch.full_like(correction1, constants.lr)
    if clip:
        rms = update_rms(gradient, v, correction2, constants.eps) if rms is None else rms
        rate = rate / rms.double().clamp_min(1.0)
    step_size, decay = (rate / correction1).float(), (1.0 - rate * constants.weight_decay).float()
    denominator = square_root(v) / correction2.sqrt().float() + constants.eps
    return {"exp_avg": m, "exp_avg_sq": v, "master": old["master"] * decay - m * step_size / denominator}


def first_moment(m: Tensor, gradient: Tensor, betas: tuple[float, float]) -> Tensor:
    """m after a step."""
    return m + (gradient - m) * (1.0 - betas[0])


def second_moment(v: Tensor, gradient: Tensor, betas: tuple[float, float]) -> Tensor:
    """v after a step."""
    return v * betas[1] + gradient * gradient * (1.0 - betas[1])


def update_rms(gradient: Tensor, v: Tensor, correction2: Tensor, eps: float) -> Tensor:
    """StableAdamW's sign of a stale second moment: 0-dim, about 1 in a steady state, large when the gradient jumps."""
    return (squared_updates(gradient, v, correction2, eps) / gradient.numel()).sqrt().float()


def squared_updates(gradient: Tensor, v: Tensor, correction2: Tensor, eps: float) -> Tensor:
    """The sum that the RMS is made of, 0-dim FP64."""
    second = (v / correction2.float()).clamp_min(eps * eps)
    return wide_sum(gradient * gradient / second)


def wide_sum(x: Tensor) -> Tensor:
    """The sum in FP64, 0-dim. What it rounds is so small that an FP32 number made of it is the same, but for one case
    in about 2^27, in whatever order and in however many parts x is added. Zero for an empty x.
    """
    return _wide(x, lambda part: part.sum(dtype=torch.float64))


def wide_squares(x: Tensor) -> Tensor:
    """The sum of squares, as `wide_sum`: the squares of FP32 numbers are exact."""
    return _wide(x, lambda part: torch.linalg.vector_norm(part, dtype=torch.float64).square())


def _wide(x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.flatten().split(SLICE):  # torch converts before it adds
        total = total + add(part)
    return total


def seeds(run_seed: Tensor, parameters: Tensor, steps: Tensor) -> Tensor:
    """Seeds of parameters' roundings, int64 [p]: first 63 bits of Philox4x32-10((parameter, STREAM, step), run seed).

    run_seed: 0-dim int64. parameters: their indices, int64 [p]. steps: updates that were done, [p].
    """
    step = steps.long()
    counter = (parameters, torch.full_like(step, STREAM), step & 0xFFFFFFFF, step >> 32)
    words = philox(counter, run_seed)
    return (words[1] & 0x7FFFFFFF) << 32 | words[0]


def write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Set `target`, unless `skip`; as integers, because not every dtype has a `where`."""
    assert target.dtype == value.dtype
    here, there = target.view(BITS[target.element_size()]), value.view(BITS[target.element_size()])
    here.copy_(there if skip is None else torch.where(skip, here, there))


def as_matrix(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]; a vector is a row, a single number a row of one."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def parts(codec: str) -> int:
    """Tensors that hold one moment; of masters, the first is the parameter's where it is the master."""
    return 4 if "expanded" in codec else 2 if "scaled" in codec else 1


def decaying(codes: Tensor, scale: Tensor | None, x: Tensor, old: Tensor, beta: float) -> Tensor:
    """Codes of a first moment that cannot stay where they are without gradients.

    To nearest, b1 m rounds back to m where the grid is coarse: in E4M3 the four smallest magnitudes stay for ever at
    b1 = .9, while v decays below them. So where nearest would store x, though smaller than `old`, as no less than
    `old`, and would do the same with b1 `old`, x takes the next code towards zero.

    codes: `x` [n, k] rounded to nearest under `scale` ([1, 1]; None: 1). x, old: the moment after and before the step,
    FP32 [n, k]. beta: b1.
    """
    one, size = torch.ones_like(x[:1, :1]) if scale is None else scale, old.abs()
    bits = codes.view(BITS[codes.element_size()])
    lower = (bits - 1).view(codes.dtype)  # not looked at where the code is zero: that is less than `size`
    here = reference.dequantize(codes, one).abs()
    stays = (x.abs() < size) & (here >= size)
    stays &= here + reference.dequantize(lower, one).abs() <= size * (2.0 * beta)
    return (bits - stays.to(bits.dtype)).view(codes.dtype)


def encode(codec: str, x: Tensor, group: int, segments: int, seed: Tensor | None = None) -> tuple[Tensor, ...]:
    """FP32 [n, k] -> the tensors that hold it, rounded to nearest without a seed."""
    format = codec.split()[0].strip(",")
    if "expanded" in codec:
        return states.quantize_expanded(x, format, group, segments)
    if "scaled" in codec or seed is not None:
        rounding = "nearest" if seed is None else "stochastic"
        codes, scale = reference.quantize(x, format, (-1, -1), "POW2", 1.0, 0, rounding, seed, None)
        return (codes, scale) if "scaled" in codec else (codes,)
    return (x.to(parse_format(format).carrier),)


def decode(codec: str, held: list[Tensor], group: int, segments: int) -> Tensor:
    """FP32 [n, k]."""
    if "expanded" in codec:
        codes, scale, exponent, center = held
        return states.dequantize_expanded(as_matrix(codes), scale, exponent, center, codec.split()[0], group, segments)
    if "scaled" in codec:
        return reference.dequantize(as_matrix(held[0]), held[1])
    return as_matrix(held[0]).float()


def _first(codec: str, coded: tuple[Tensor, ...], new: Tensor, old: Tensor, beta: float) -> tuple[Tensor, ...]:
    if "expanded" in codec or codec == "FP32":
        return coded
    scale = coded[1] if len(coded) > 1 else None
    return (decaying(coded[0], scale, new, old, beta), *coded[1:])


def adamw(  # type: ignore[no-untyped-def]
    params, grads, first, second, masters, steps, corrections, indices, grad_scale, found_inf,
    first_codec, second_codec, master_codec, group, segments, seed, lr, beta1, beta2, eps, weight_decay, clip,
):  # fmt: skip
    """One step. corrections: 1 - b^t, FP64 [2, p]. indices: int64 [p], where masters draw. segments: of rows, per
    parameter.
    """
    skip = None if found_inf is None else found_inf == 1.0
    drawn: list[Tensor | None] = [None] * len(params)
    if indices is not None:
        drawn = list(seeds(torch.full_like(indices[0], seed), indices, torch.stack(list(steps)) + 1.0).unbind())
    for place, parameter in enumerate(params):
        each = {"exp_avg": (first_codec, first), "exp_avg_sq": (second_codec, second)}
        held = {name: state[place * parts(how) : (place + 1) * parts(how)] for name, (how, state) in each.items()}
        layout = (group, segments[place])
        old = {name: decode(how, held[name], *layout) for name, (how, _) in each.items()}
        held["master"] = masters[2 * place : 2 * place + 2] or [parameter]
        old["master"] = decode(master_codec, held["master"], *layout)
        gradient = as_matrix(grads[place]).float()
        gradient = gradient if grad_scale is None else gradient / grad_scale
        pair = (corrections[0, place], corrections[1, place])
        constants = Constants(lr, (beta1, beta2), eps, weight_decay, pair, drawn[place])
        new = update(old, gradient, constants, clip=clip)
        coded = {name: encode(how, new[name], *layout) for name, (how, _) in each.items()}
        coded["exp_avg"] = _first(first_codec, coded["exp_avg"], new["exp_avg"], old["exp_avg"], beta1)
        coded["master"] = encode(master_codec, new["master"], *layout, drawn[place])
        if "scaled" in master_codec:
            value = reference.dequantize(*coded["master"]).to(torch.bfloat16)
            write(parameter, value.view(parameter.shape), skip)
        for name, tensors in coded.items():
            for target, tensor in zip(held[name], tensors, strict=True):
                write(target, tensor.view(target.shape), skip)
        write(steps[place], steps[place] + 1.0, skip)
