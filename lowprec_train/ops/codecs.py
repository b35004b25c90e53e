"""How an optimizer stores a matrix [n, k] of FP32 numbers between two steps, as data.

    none       a cast to FP32 or BF16                                                  4 or 2 bytes a number
    tensor     codes * 2^e, one e a tensor: E4M3, E5M2, FP16 (arXiv 2310.18313)        1 or 2 bytes
    expanded   sign(code) |code s|^(1/k) c, three FP32 numbers a group: COAT's dynamic range expansion (arXiv
               2410.19313, `ops.states`) of E4M3 or E5M2                               1.094 bytes in groups of 128

Moments and master weights are stored by the same codecs. A shard of a matrix gets the codes that it has in the whole:
where one scale serves the tensor, the codec is told the whole's amax; where rows have segments, how many the shard has.
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
    """Format of the codes, how they are scaled (a key of PARTS), elements of a group, rounding."""

    format: str = "FP32"
    scaling: str = "none"
    group: int = 1
    stochastic: bool = False

    def __str__(self) -> str:
        how = {"none": "", "tensor": " scaled", "expanded": f" expanded in groups of {self.group}"}[self.scaling]
        return self.format + how + (", stochastic" if self.stochastic else "")

    @property
    def exact(self) -> bool:
        """Whether decode(encode(x)) is x, bit for bit."""
        return self.format == "FP32"

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Of a matrix whose master is stored so."""
        return torch.float32 if self.exact else torch.bfloat16

    @property
    def one_scale(self) -> bool:
        """Whether every code depends on the amax of the whole tensor."""
        return self.scaling == "tensor"

    @property
    def expanded(self) -> bool:
        """Whether groups have scales of their own."""
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
        """x FP32 [n, k] -> `codes` [n, k] and their scales.

        amax: of the whole tensor, one FP32 number. segments: of a row of x. seed: 0-dim int64, of stochastic rounding.
        origin: int64 [2], global row and column of x[0, 0]. The last three are needed for a shard alone, or for draws.
        """
        if x.shape[0] == 0:  # an empty shard knows the scale of the whole
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
        """FP32 [n, k]; the codes may have the parameter's shape."""
        codes = as_matrix(parts["codes"])
        if self.expanded:
            scales = (parts[name] for name in PARTS["expanded"][1:])
            groups = (self.format, self.group, segments or row_segments(codes.shape[1]))
            return torch.ops.lowprec.dequantize_expanded(codes, *scales, *groups)
        return torch.ops.lowprec.dequantize(codes, parts["scale"]) if self.one_scale else codes.float()

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts that lie along a matrix of `shape` and are sharded with it; the others are the same on
        every rank.
        """
        if not self.expanded:
            return {"codes": shape}
        return {"codes": shape} | dict.fromkeys(PARTS["expanded"][1:], (shape[0], self._groups(shape[-1])))

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """What a matrix of `shape` takes, scales included."""
        numbers, rows = torch.Size(shape).numel(), torch.Size(shape[:-1]).numel()
        scales = 3 * rows * self._groups(shape[-1]) if self.expanded else int(self.one_scale)
        return numbers * parse_format(self.format).carrier.itemsize + 4 * scales

    def _groups(self, columns: int) -> int:
        """Groups of a whole row."""
        return row_segments(columns) * segment_groups(columns, self.group, row_segments(columns))


FP32 = StateCodec()
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class StateCodecs:
    """How one parameter is stored: a codec for each moment by name, and one for the weights.

    State is flat: `exp_avg` holds codes, `exp_avg.scale` what belongs to them. The parameter itself is the master where
    the master's codec is a cast; under a scale the parameter is the BF16 rounding of `master`, `master.scale`.
    """

    moments: tuple[tuple[str, StateCodec], ...]
    master: StateCodec

    @property
    def named(self) -> tuple[tuple[str, StateCodec], ...]:
        """All codecs by name, the master's last."""
        return (*self.moments, ("master", self.master))

    @property
    def kept(self) -> tuple[tuple[str, StateCodec], ...]:
        """Those that have state of their own."""
        return self.named if self.master.one_scale else self.moments

    @property
    def exact(self) -> bool:
        """FP32 throughout."""
        return all(codec.exact for _, codec in self.named)

    @property
    def one_scale(self) -> bool:
        """Whether something is stored under one scale a tensor."""
        return any(codec.one_scale for _, codec in self.named)

    def decode(self, parameter: Tensor, state: Parts, segments: int | None = None) -> Values:
        """Everything in FP32 [n, k]."""
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
        """The new state by its flat names, and the new value of the parameter as "parameter".

        old, decays: values before the step, and of moments that decay without gradients the factor (`decaying`). amax:
        of the whole tensors, FP32 [names], as `amax` makes them. The rest as for one codec.
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
        """Largest magnitudes, FP32 [names]: zero for what has no scale of the whole tensor, for what is not among
        `values`, and where the shard is empty.
        """
        zero = torch.zeros((), device=device)
        asked = {name for name, codec in self.named if codec.one_scale and name in values and values[name].numel()}
        return torch.stack([values[name].abs().amax() if name in asked else zero for name, _ in self.named])

    def along(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the state tensors that are sharded with a parameter of `shape`, by flat name."""
        return {key: each for name, codec in self.kept for key, each in flat(name, codec.along(shape)).items()}

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """What the optimizer keeps beside a parameter of `shape`."""
        return sum(codec.state_bytes(shape) for _, codec in self.kept)


def row_segments(columns: int) -> int:
    """Segments of a whole row, where groups restart: 8 where 8 divides it, so that 2, 4 or 8 ranks hold whole ones."""
    return 1 if columns % 8 else 8


def as_matrix(x: Tensor) -> Tensor:
    """[..., k] -> [n, k]; a vector is a row, a single number a row of one."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


def flat(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """`codes` under the state's own name, the rest as `<name>.<part>`."""
    return {name if part == "codes" else f"{name}.{part}": value for part, value in parts.items()}


def parts_of(state: Mapping[str, Tensor], name: str) -> Parts:
    """The parts that `flat` named."""
    keys = {part: name if part == "codes" else f"{name}.{part}" for part in PARTS["expanded"]}
    return {part: state[key] for part, key in keys.items() if key in state}


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
