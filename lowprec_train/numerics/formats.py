"""Number formats (table in `ops.formats`) and rounding rules (`ops.rounding`), for recipes."""

from lowprec_train.ops.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    INT4,
    INT8,
    Format,
    parse_format,
    register_format,
)
from lowprec_train.ops.rounding import NEAREST, STOCHASTIC, Rounding, parse_rounding, register_rounding

__all__ = [
    "BF16",
    "E2M1",
    "E4M3",
    "E5M2",
    "FORMATS",
    "FP16",
    "FP32",
    "INT4",
    "INT8",
    "NEAREST",
    "STOCHASTIC",
    "Format",
    "Rounding",
    "parse_format",
    "parse_rounding",
    "register_format",
    "register_rounding",
]
