"""How an optimizer stores moments and master weights: values of `ops.codecs.StateCodec`, and who takes which.

Master weights, the precision that updates are added in, per parameter:

    FP32   the parameter itself                                                            4 bytes
    FP16   codes * 2^e, one e a tensor (FP8-LM, arXiv 2310.18313, section 2.2)              2 bytes and the parameter
    BF16   the parameter itself, rounded stochastically (arXiv 2010.06192)                  2 bytes

With the last two, a matrix's parameter is BF16: the rounding of its master that GEMMs take.

What becomes of an update that is small beside its weight, measured by adding 1e-4 of it 1,000 times (tests/optim/
test_master.py): rounding to nearest drops or doubles an update near half a step. FP16's step is 2^-11 to 2^-10 of a
normal number, so an update of 1e-4 is below half of it (2.4e-4 to 4.9e-4) always. Stochastic rounding keeps every
update on average and pays with a random walk.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowprec_train.numerics.formats import parse_format
from lowprec_train.ops.codecs import FP32, StateCodec, StateCodecs
from lowprec_train.ops.updates import Rule


def plain(format: str = "FP32", stochastic: bool = False) -> StateCodec:
    """A cast to FP32 or BF16, whose range needs no scale. Raises ValueError for any other."""
    if parse_format(format).scaled:
        raise ValueError(f"{format} codes need a scale: `scaled` or `expanded` stores them, not `plain`")
    return StateCodec(parse_format(format).name, stochastic=stochastic)


def scaled(format: str, stochastic: bool = False) -> StateCodec:
    """Codes under one power of two for the whole tensor, chosen anew at each step so that nothing saturates. format:
    E4M3, E5M2, FP16. Raises ValueError for formats without a scale and for grids with less range than those.
    """
    if parse_format(format).name not in ("E4M3", "E5M2", "FP16"):
        raise ValueError(f"scaled states are E4M3, E5M2 or FP16, not {format}")
    return StateCodec(parse_format(format).name, "tensor", stochastic=stochastic)


def expanded(format: str = "E4M3", group: int = 128) -> StateCodec:
    """COAT's dynamic range expansion. format: E4M3 or E5M2; group: elements that share an exponent (128 in the paper).
    A group without gradients decays with its scale, so that its codes may stay. Raises ValueError for another format or
    a group below 1.
    """
    if parse_format(format).name not in ("E4M3", "E5M2") or group < 1:
        raise ValueError(f"expanded moments are groups of E4M3 or E5M2, not {group} of {format}")
    return StateCodec(parse_format(format).name, "expanded", group)


MASTER_CODECS = (FP32, plain("BF16", stochastic=True), scaled("FP16"), scaled("FP16", stochastic=True))


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """What stores the moments and the master weights of matrices.

    Vectors are FP32. So are the masters of weights that are looked up by index, as in FP8-LM's own code: a token's
    gradient is a sum over its occurrences, which torch takes in the parameter's dtype (on the CPU a thousand ones make
    256 in BF16). Their moments are FP32 in place of one scale for all rows: rows whose tokens are not seen have no
    gradient for thousands of steps, beside rows that have one.

    Raises ValueError for a master that is none of MASTER_CODECS, and for moments that round stochastically.
    """

    moments: tuple[StateCodec, ...] = (FP32, FP32)
    master: StateCodec = FP32

    def __post_init__(self) -> None:
        if self.master not in MASTER_CODECS:
            raise ValueError(f"master weights are stored as {', '.join(map(str, MASTER_CODECS))}, not as {self.master}")
        for codec in self.moments:
            if codec.stochastic:
                raise ValueError(f"moments are rounded to nearest, not stored as {codec}")

    def of(self, rule: Rule, *, matrix: bool, indexed: bool) -> StateCodecs:
        """Of one parameter. Raises ValueError where the rule keeps more moments than there are codecs."""
        if len(rule.moments) > len(self.moments):
            raise ValueError(
                f"{rule} keeps {', '.join(rule.moments)}, and there are {len(self.moments)} codecs for them"
            )
        fine = [codec if matrix and not (indexed and codec.one_scale) else FP32 for codec in self.moments]
        named = tuple(zip(rule.moments, fine, strict=False))
        return StateCodecs(named, self.master if matrix and not indexed else FP32)
