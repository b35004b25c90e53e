"""COAT (arXiv 2410.19313, ICLR 2025): FP8 saved activations and optimizer states, with the GEMMs of fp8.

    linears      E4M3 codes of their inputs, a scale per tensor          recipe `fp8`
    norms        input rounded to E4M3 in groups of 1x16 and saved as codes
    activations  gate and up, or GELU's input, likewise
    Adam         both moments in E4M3 with range expansion, groups of up to 128  configs/optim/adamw_coat.yaml

The residual stream and attention stay in BF16. This file defines what norms and activations save.
"""

from __future__ import annotations

from lowprec_train.numerics.formats import parse_format
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.precision.saved_activations import SavedActivationPolicy


def saved_activations(*, format: str = "E4M3", group: int = 16) -> SavedActivationPolicy:
    """format, group: of the codes that norms and activations keep, a scale per `group` channels of a token."""
    line = Quantizer(parse_format(format), tile=(1, group), scale=ScaleRule.POW2)
    return SavedActivationPolicy(norm=line, activation=line)
