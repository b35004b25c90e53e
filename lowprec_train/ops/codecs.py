"""Codecs of optimizer states: storage formats of an FP32 matrix [n, k] between two steps.

    none       a cast to FP32 or BF16                                                  4 or 2 bytes per element
    tensor     codes * 2^e, one e per tensor: E4M3, E5M2, FP16 (arXiv 2310.18313)      1 or 2 bytes
    expanded   sign(code) |code s|^(1/k) c, three FP32 numbers per group: COAT's dynamic range expansion (arXiv
               2410.19313, `ops.states`) of E4M3 or E5M2                               1.094 bytes in groups of 128

Moments and master weights use the same codecs. A shard of a matrix has the same codes as it has in the whole matrix:
a codec with one scale per tensor takes the amax of the whole tensor; one with segments in rows takes their number in
the shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowprec_train.ops import reference
from lowprec_train.ops.formats import parse_format
from lowprec_train.ops.schema import segment_groups

T = TypeVar("T")
Parts = dict[str, Tensor]
Values = dict[str, Tensor]  # FP32 [n, k] by name: the moments, and "master"
PARTS = {"none": ("codes",), "tensor": ("codes", "scale"), "expanded": ("codes", "scale", "exponent", "center")}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class StateCodec:
    """Codec: format of the codes, scaling (a key of PARTS), elements per group, rounding."""

    format: str = "FP32"
    scaling: str = "none"
    group: int = 1
    stochastic: bool = False

    def __str__(self) -> str:
        how = {"none": "", "tensor": " scaled", "expanded": f" expanded in groups of {self.group}"}[self.scaling]
        return self.format + how + (", stochastic" if self.stochastic else "")

    @property
    def exact(self) -> bool:
        """Return whether decode(encode(x)) is x, bit for bit."""
        return self.format == "FP32"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Return the dtype of a matrix whose master weights use this codec."""
        return torch.float32 if self.exact else torch.bfloat16

    @property
    def one_scale(self) -> bool:
        """Return whether codes have one scale per tensor, so that all depend on the amax of the whole tensor."""
        return self.scaling == "tensor"

    @property
    def expanded(self) -> bool:
        """Return whether each group has its own scale."""
        return self.scaling == "expanded"

    def encode(
        self,
        x: Tensor,
        *,
        amax: Tensor | None = None,
        segments: int | None = None,
        seed: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> Parts:
        """Encode x FP32 [n, k] to `codes` [n, k] and their scales.

        amax: of the whole tensor, one FP32 number. segments: per row of x. seed: 0-dim int64, for stochastic rounding.
        origin: int64 [2], global row and column of x[0, 0]. Shards need amax and segments, stochastic rounding needs a
        seed, and stochastic rounding of shards needs an origin.
        """
        if x.shape[0] == 0:  # an empty shard has the scale of the whole tensor
            parts = self.encode(x.new_zeros((1, x.shape[1])), amax=amax, segments=segments, seed=seed)
            return {name: part[:0] if name in self.along((0, x.shape[1])) else part for name, part in parts.items()}
        if self.expanded:
            made = torch.ops.lowprec.quantize_expanded(x, self.format, self.group, segments or row_segments(x.shape[1]))
        elif not self.one_scale and not self.stochastic:
            made = (x.to(parse_format(self.format).carrier),)
        else:
            rounding = "stochastic" if self.stochastic else "nearest"
            given = (self.format, (-1, -1), "POW2", 1.0, 0, rounding, seed if self.stochastic else None, origin)
            if amax is None or not self.one_scale:
                made = torch.ops.lowprec.quantize(x, *given)
            else:
                made = torch.ops.lowprec.quantize_by(x, amax.view(1, 1), None, *given)
        return dict(zip(PARTS[self.scaling], made, strict=False))

    def decode(self, parts: Mapping[str, Tensor], *, segments: int | None = None) -> Tensor:
        """Decode to FP32 [n, k]; the codes may have the shape of the parameter."""
        codes = as_matrix(parts["codes"])
        if self.expanded:
            scales = (parts[name] for name in PARTS["expanded"][1:])
            groups = (self.format, self.group, segments or row_segments(codes.shape[1]))
            return torch.ops.lowprec.dequantize_expanded(codes, *scales, *groups)
        return torch.ops.lowprec.dequantize(codes, parts["scale"]) if self.one_scale else codes.float()

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return shapes of the parts that are sharded with a matrix of `shape`; other parts are equal on all ranks."""
        if not self.expanded:
            return {"codes": shape}
        return {"codes": shape} | dict.fromkeys(PARTS["expanded"][1:], (shape[0], self._groups(shape[-1])))

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a matrix of `shape`, with its scales."""
        numbers, rows = torch.Size(shape).numel(), torch.Size(shape[:-1]).numel()
        scales = 3 * rows * self._groups(shape[-1]) if self.expanded else int(self.one_scale)
        return numbers * parse_format(self.format).carrier.itemsize + 4 * scales

    def _groups(self, columns: int) -> int:
        """Return the groups of a whole row."""
        return row_segments(columns) * segment_groups(columns, self.group, row_segments(columns))


FP32 = StateCodec()
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class StateCodecs:
    """Codecs of one parameter: one for each moment by name, and one for the master weights.

    The state is a flat dict: `exp_avg` has codes, `exp_avg.scale` their scale. If the master's codec is a cast, the
    parameter is the master; if it has a scale, the master is `master` and `master.scale`, and the parameter is its
    BF16 rounding.
    """

    moments: tuple[tuple[str, StateCodec], ...]
    master: StateCodec

    @property
    def named(self) -> tuple[tuple[str, StateCodec], ...]:
        """Return all codecs by name, the master's last."""
        return (*self.moments, ("master", self.master))

    @property
    def kept(self) -> tuple[tuple[str, StateCodec], ...]:
        """Return the codecs that have state tensors besides the parameter."""
        return self.named if self.master.one_scale else self.moments

    @property
    def exact(self) -> bool:
        """Return whether everything is FP32."""
        return all(codec.exact for _, codec in self.named)

    @property
    def one_scale(self) -> bool:
        """Return whether any codec has one scale per tensor."""
        return any(codec.one_scale for _, codec in self.named)

    def decode(self, parameter: Tensor, state: Parts, segments: int | None = None) -> Values:
        """Decode everything to FP32 [n, k]."""
        stored = state if self.master.one_scale else state | {"master": parameter}
        return {name: codec.decode(parts_of(stored, name), segments=segments) for name, codec in self.named}

    def encode(
        self,
        new: Values,
        *,
        old: Mapping[str, Tensor] = NOTHING,
        decays: Mapping[str, float] = NOTHING,
        amax: Tensor | None = None,
        segments: int | None = None,
        seed: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> Parts:
        """Return the new state by flat names, and the new value of the parameter as "parameter".

        old, decays: values before the step, and the decay factors of moments that decay without gradients (`decaying`).
        amax: of the whole tensors, FP32 [names], as from `amax`. The rest as in `StateCodec.encode`.
        """
        coded: Parts = {}
        for place, (name, codec) in enumerate(self.named):
            whole = None if amax is None else amax[place]
            draws = {"seed": seed, "origin": origin} if name == "master" else {}
            parts = codec.encode(new[name], amax=whole, segments=segments, **draws)
            if name in decays and new[name].numel() and not (codec.exact or codec.expanded):
                parts["codes"] = decaying(parts["codes"], parts.get("scale"), new[name], old[name], decays[name])
            if name != "master":
                coded |= flat(name, parts)
            elif codec.one_scale:
                coded |= flat(name, parts) | {"parameter": codec.decode(parts).to(torch.bfloat16)}
            else:
                coded["parameter"] = parts["codes"]
        return coded

    def amax(self, values: Values, device: torch.device) -> Tensor:
        """Return the largest magnitudes, FP32 [names]: zero for codecs without a scale per tensor, for names that are
        not in `values`, and for empty shards.
        """
        zero = torch.zeros((), device=device)
        asked = {name for name, codec in self.named if codec.one_scale and name in values and values[name].numel()}
        return torch.stack([values[name].abs().amax() if name in asked else zero for name, _ in self.named])

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state tensors that are sharded with a parameter of `shape`, by flat name."""
        return {key: each for name, codec in self.kept for key, each in flat(name, codec.along(shape)).items()}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of state for a parameter of `shape`, without the parameter."""
        return sum(codec.state_bytes(shape) for _, codec in self.kept)


def row_segments(columns: int) -> int:
    """Return the segments of a whole row, at which groups restart: 8 if it divides the row, so that each of 2, 4 or 8
    ranks has whole segments.
    """
    return 1 if columns % 8 else 8


def as_matrix(x: Tensor) -> Tensor:
    """Reshape [..., k] to [n, k]; a vector becomes one row, a 0-dim tensor one element."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def flat(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Name parts for a flat state: `codes` by the state's name, others as `<name>.<part>`."""
    return {name if part == "codes" else f"{name}.{part}": value for part, value in parts.items()}


def parts_of(state: Mapping[str, Tensor], name: str) -> Parts:
    """Return the parts of `name` from a flat state."""
    keys = {part: name if part == "codes" else f"{name}.{part}" for part in PARTS["expanded"]}
    return {part: state[key] for part, key in keys.items() if key in state}


def subnormal(codes: Tensor) -> Tensor:
    """Return where codes of a floating-point dtype are subnormal or zero."""
    return codes.float().abs() < torch.finfo(codes.dtype).smallest_normal


def by_decay_alone(x: Tensor, old: Tensor, beta: float) -> Tensor:
    """Return where x = b1 old + (1 - b1) g, in FP32, has a gradient |g| <= |old| / 64, up to rounding."""
    size, share = old.abs(), (1.0 - beta) / 64
    within = (x.abs() >= size * (beta - share)) & (x.abs() <= size * (beta + share))
    return within & (x.signbit() == old.signbit())


def decaying(codes: Tensor, scale: Tensor | None, x: Tensor, old: Tensor, beta: float) -> Tensor:
    """Return codes of a first moment that decays even where rounding to nearest would keep it constant.

    On a coarse grid, b1 m rounds to nearest back to m: in E4M3 the four smallest magnitudes never change at b1 = .9,
    while v decays below them. So x takes the next code towards zero where the nearest value of x is at least |old|
    although |x| < |old|, the same would hold for b1 `old`, and the code is subnormal or the gradient at most 1/64 of
    `old`. Without this last condition, gradients that scatter would make m too small from b1 = 1 - 2^-(mantissa + 1)
    on, where normal codes stay too.

    codes: `x` [n, k] rounded to nearest with `scale` ([1, 1]; None: 1). x, old: the moment after and before the step,
    FP32 [n, k]. beta: b1.
    """
    one, size = torch.ones_like(x[:1, :1]) if scale is None else scale, old.abs()
    bits = codes.view(BITS[codes.element_size()])
    lower = (bits - 1).view(codes.dtype)  # invalid for code zero, which is excluded because it is below `size`
    here = reference.dequantize(codes, one).abs()
    stays = (x.abs() < size) & (here >= size)
    stays &= here + reference.dequantize(lower, one).abs() <= size * (2.0 * beta)
    stays &= subnormal(codes) | by_decay_alone(x, old, beta)
    return (bits - stays.to(bits.dtype)).view(codes.dtype)
