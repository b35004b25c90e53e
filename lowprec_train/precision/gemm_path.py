"""The paths on which GEMMs are executed: names, without torch, which the command line does not import. `precision.gemm`
selects one for a pair of operands.
"""

from enum import Enum


class Path(Enum):
    """The execution path of a GEMM."""

    BF16 = "bf16"
    FP8_TENSOR = "fp8_tensor"
    FP8_ROW = "fp8_row"
    FP8_FOLDED = "fp8_folded"
    FP8_BLOCK = "fp8_block"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    INT8 = "int8"
    DEQUANTIZE = "dequantize"
    FP8_LIBRARY = "fp8_library"
    FP4_LIBRARY = "fp4_library"

    @property
    def peak(self) -> str:
        """The device peak that bounds the GEMM: "bf16", "fp8", "fp4" or "int8"."""
        kind = self.value.removeprefix("mx").removeprefix("nv").partition("_")[0]
        return kind if kind in ("fp8", "fp4", "int8") else "bf16"
