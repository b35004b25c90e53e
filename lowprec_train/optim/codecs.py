"""Storage formats of moments and master weights: values of `ops.codecs.StateCodec`, and which parameters use which.

Formats of master weights, to which updates are added, with their bytes per parameter:

    FP32   the parameter itself                                                            4 bytes
    FP16   codes * 2^e, one e per tensor (FP8-LM, arXiv 2310.18313, section 2.2)            2 bytes and the parameter
    BF16   the parameter itself, rounded stochastically (arXiv 2010.06192)                  2 bytes

With the last two, the parameter of a matrix is BF16: its master rounded for the GEMMs.

tests/optim/test_master.py adds 1e-4 of a weight to it 1,000 times. Rounding to nearest drops or doubles an update near
half a step: FP16's step is 2^-11 to 2^-10 of a normal number, so an update of 1e-4 is always below half of it (2.4e-4
to 4.9e-4). Stochastic rounding keeps all updates on average, at the price of a random walk.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowprec_train.numerics.formats import parse_format
from lowprec_train.ops.codecs import FP32, StateCodec, StateCodecs
from lowprec_train.ops.updates import Rule


def plain(format: str = "FP32", stochastic: bool = False) -> StateCodec:
    """Return a codec that casts to FP32 or BF16, without a scale. Raises ValueError for other formats."""
    if parse_format(format).scaled:
        raise ValueError(f"{format} codes need a scale: `scaled` or `expanded` stores them, not `plain`")
    return StateCodec(parse_format(format).name, stochastic=stochastic)


def scaled(format: str, stochastic: bool = False) -> StateCodec:
    """Return a codec with one power-of-two scale for the whole tensor, chosen in each step so that nothing saturates.

    format: E4M3, E5M2 or FP16. Raises ValueError for formats without a scale or with a smaller range.
    """
    if parse_format(format).name not in ("E4M3", "E5M2", "FP16"):
        raise ValueError(f"scaled states are E4M3, E5M2 or FP16, not {format}")
    return StateCodec(parse_format(format).name, "tensor", stochastic=stochastic)


def expanded(format: str = "E4M3", group: int = 128) -> StateCodec:
    """COAT's dynamic range expansion. format: E4M3 or E5M2; group: elements that share an exponent (128 in the paper).
    A group without gradients decays through its scale, so its codes may stay. Raises ValueError for another format or a
    group below 1.
    """
    if parse_format(format).name not in ("E4M3", "E5M2") or group < 1:
        raise ValueError(f"expanded moments are groups of E4M3 or E5M2, not {group} of {format}")
    return StateCodec(parse_format(format).name, "expanded", group)


MASTER_CODECS = (FP32, plain("BF16", stochastic=True), scaled("FP16"), scaled("FP16", stochastic=True))


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """Codecs of the moments and master weights of matrices.

    Vectors have FP32 states. Embeddings have FP32 masters, as in FP8-LM's code: the gradient of a token is a sum over
    its occurrences, which torch computes in the dtype of the parameter (on the CPU, a thousand ones sum to 256 in
    BF16). Embeddings also have FP32 moments if a moment has one scale for all rows: rows of tokens that do not occur
    have no gradient for thousands of steps.

    Raises ValueError for a master that is not in MASTER_CODECS, and for moments with stochastic rounding.
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
        """Return the codecs of one parameter. Raises ValueError if the rule has more moments than there are codecs."""
        if len(rule.moments) > len(self.moments):
            raise ValueError(
                f"{rule} keeps {', '.join(rule.moments)}, and there are {len(self.moments)} codecs for them"
            )
        fine = [codec if matrix and not (indexed and codec.one_scale) else FP32 for codec in self.moments]
        named = tuple(zip(rule.moments, fine, strict=False))
        return StateCodecs(named, self.master if matrix and not indexed else FP32)
