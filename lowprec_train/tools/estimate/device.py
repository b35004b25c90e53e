"""Measured rates of a GPU, from which `step_time` computes the time of a step.

Rates of GEMMs and kernels are from `lowprec bench gemm` and `lowprec bench kernels` (docs/results/gemm.md, kernels.md,
kernels_adamw.md, and docs/results/h200.md for later kernels). Other rates can only be measured in a step; they come
from profiles of steps, with one number for all recipes: BF16 GEMMs (alone they reach 764 TFLOP/s; in a step the power
limit slows them), attention, the time between kernels, the encoding of gradients, and NVLink while kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowprec_train.precision.gemm_path import Path

TERA, GIGA, PICO, MICRO = 1e12, 1e9, 1e-12, 1e-6


@dataclass(frozen=True, kw_only=True)
class Device:
    """Units are FLOP, bytes, seconds and elements.

    gemm: FLOP/s by path and split accumulation, over the shapes of a 7B model. attention: FLOP/s, causal, forward and
    backward. memory: bytes/s of a copy, read plus written. kernels: seconds per element of quantisation kernels that
    are not limited by memory. adamw: bytes/s of the optimizer with FP32 moments, with moments in codes, and of torch's
    AdamW in BF16. sharding: bytes/s of casts of shards and of gradient encoding. launch: seconds between two kernels.
    host: seconds of the host per kernel, on one GPU and in runs that FSDP2 shards. unit: seconds of the host for each
    unit of FSDP2, forward and backward. nvlink, nic, pcie: bytes/s of a GPU in one direction.
    """

    name: str
    gemm: Mapping[tuple[Path, bool], float]
    attention: float
    memory: float
    kernels: Mapping[str, float]
    adamw: Mapping[str, float]
    sharding: float
    launch: float
    host: tuple[float, float]
    unit: float
    nvlink: float
    nic: float
    pcie: float


_DECODED, _INT8 = 764 * TERA, 765 * TERA  # decoded values with few bits draw less power
H200 = Device(
    name="NVIDIA H200",
    gemm={
        (Path.BF16, False): 700 * TERA,
        (Path.BF16, True): 700 * TERA,
        (Path.DEQUANTIZE, False): _DECODED,
        (Path.DEQUANTIZE, True): _DECODED,
        (Path.FP8_TENSOR, False): 1347 * TERA,
        (Path.FP8_TENSOR, True): 1307 * TERA,
        (Path.FP8_ROW, False): 1421 * TERA,
        (Path.FP8_ROW, True): 1250 * TERA,
        (Path.FP8_FOLDED, False): 1421 * TERA,
        (Path.FP8_FOLDED, True): 1250 * TERA,
        (Path.FP8_BLOCK, False): 1192 * TERA,
        (Path.FP8_BLOCK, True): 1192 * TERA,
        (Path.INT8, False): _INT8,
        (Path.INT8, True): _INT8,
    },
    attention=330 * TERA,
    memory=4.1 * TERA,
    kernels={
        "NVFP4": 1.61 * PICO,
        "stochastic NVFP4": 1.95 * PICO,
        "rotated stochastic NVFP4": 2.37 * PICO,
        "EDEN": 2.97 * PICO,  # with the amax after rotation
        "candidate scales": 2.86 * PICO,  # with the amax of blocks
        "ladder, plain rows": 1.25 * PICO,  # without a rotation
        "ladder, rows": 1.65 * PICO,
        "ladder, rows of a gradient": 1.02 * PICO,  # in the kernel that computes it, besides the time of its bytes
        "ladder, columns": 1.58 * PICO,
        "ladder, columns of codes": 1.6 * PICO,
        "rotation, rows": 1.24 * PICO,
        "rotation, columns": 1.85 * PICO,
        "rotation, columns of codes": 2.07 * PICO,
        "stochastic": 3.3 * PICO,
        "outliers": 2.2 * PICO,
        "carrier": 2.27 * PICO,
        "squares": 5.0 * PICO,
        "span": 3.9 * PICO,
        "slope": 2.65 * PICO,
    },
    adamw={"FP32": 3.75 * TERA, "codes": 2.45 * TERA, "library": 2.5 * TERA},
    sharding=1.9 * TERA,
    launch=10 * MICRO,
    host=(10 * MICRO, 140 * MICRO),
    unit=2000 * MICRO,
    nvlink=190 * GIGA,
    nic=50 * GIGA,
    pcie=41 * GIGA,  # 15.0 GB in each direction while copies were active, 364 ms, beside kernels
)
# From profiles of steps on four H100s; kernels that memory does not limit have an H200's time. GEMMs of a kind are
# slower by the same share on every path: only BF16 and FP8 with a scale per tensor were in these steps.
H100 = replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    gemm={key: rate * (0.94 if key[0].value.startswith("fp8") else 0.945) for key, rate in H200.gemm.items()},
    attention=305 * TERA,
    memory=3.2 * TERA,
    adamw={"FP32": 2.75 * TERA, "codes": 2.0 * TERA, "library": 1.9 * TERA},
    sharding=1.5 * TERA,
    host=(10 * MICRO, 142 * MICRO),
    unit=3240 * MICRO,
)
DEVICES = {"h100": H100, "h200": H200}


def device_of(name: str) -> Device:
    """Return the device by its key in DEVICES. Raises ValueError for a GPU without measured rates."""
    if name not in DEVICES:
        raise ValueError(f"--device {name}: there are measured rates for {', '.join(DEVICES)} only")
    return DEVICES[name]
