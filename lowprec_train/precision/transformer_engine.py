"""NVIDIA's TransformerEngine as the backend of linear layers: `te.Linear` under `te.autocast` and one of its recipes.

    delayed   DelayedScaling         per-tensor scale from the amax of earlier steps
    current   Float8CurrentScaling   per-tensor scale from the current amax
    block     Float8BlockScaling     1x128 tiles of X and dY, 128x128 of W; compute capability 9.0, CUDA 12.9
    mxfp8     MXFP8BlockScaling      1x32 tiles with E8M0 scales; compute capability 10.0
    nvfp4     NVFP4BlockScaling      E2M1 with two levels of scales; compute capability 10.0

`te.Linear` is created on the meta device, so it owns no weight. `functional_call` passes it the weight of the `Linear`,
cast to the dtype of x. TransformerEngine owns the scales and amax histories of delayed scaling; this module reads and
sets them by `get_fp8_meta_tensors` and `reset_fp8_meta_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lowprec_train import nvidia
from lowprec_train.precision.gemm_path import Path

NAMES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
AVAILABLE = {"block": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available", "nvfp4": "is_nvfp4_available"}
MULTIPLES = {"delayed": (16, 16), "current": (16, 16), "block": (16, 16), "mxfp8": (32, 32), "nvfp4": (32, 16)}
"""Scaling -> (multiple for the number of tokens, multiple for both sizes of a weight) of TransformerEngine's GEMMs."""
FORMATS = {"E5M2": "HYBRID", "E4M3": "E4M3"}  # format of gradients -> Format of TransformerEngine
PARTS = ("scale", "amax_history")


@dataclass(frozen=True, kw_only=True)
class TransformerEngine:
    """scaling: a key of NAMES. gradient: format of dY, "E5M2" or "E4M3"; None: TransformerEngine's default for the
    scaling. amax_history_len, amax_compute_algo, margin: only for delayed scaling.

    Raises ValueError for unknown values.
    """

    scaling: str = "delayed"
    gradient: str | None = None
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("scaling", self.scaling, tuple(NAMES)),
            ("gradient", self.gradient, (None, *FORMATS)),
            ("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(map(str, known))}")
        if self.scaling == "nvfp4" and self.gradient is not None:
            raise ValueError(f"gradient={self.gradient}: with scaling=nvfp4 gradients are E2M1")
        if self.amax_history_len < 1 or self.margin < 0:
            raise ValueError(
                f"amax_history_len={self.amax_history_len} must be at least 1 and margin={self.margin} at least 0"
            )
        history = (self.amax_history_len, self.amax_compute_algo, self.margin)
        if self.scaling != "delayed" and history != (1024, "max", 0):
            raise ValueError(f"amax_history_len, amax_compute_algo and margin need scaling=delayed, not {self}")

    @property
    def path(self) -> Path:
        return Path.FP4_LIBRARY if self.scaling == "nvfp4" else Path.FP8_LIBRARY

    @property
    def stateful(self) -> bool:
        return self.scaling == "delayed"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of TransformerEngine's recipe, with formats by name."""
        options: dict[str, Any] = {} if self.gradient is None else {"fp8_format": FORMATS[self.gradient]}
        if self.stateful:
            for name in ("amax_history_len", "amax_compute_algo", "margin"):
                options[name] = getattr(self, name)
        return options

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"TransformerEngine, {NAMES[self.scaling]}({given})"

    def layer(self, n: int, k: int, *, bias: bool, dtype: torch.dtype) -> Layer:
        te = nvidia.transformer_engine()
        return Layer(self, te.Linear(k, n, bias=bias, params_dtype=dtype, device="meta"))

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        with nvidia.transformer_engine().autocast(enabled=True, recipe=recipe_of(self)):
            yield

    def check(self, name: str, n: int, k: int, tokens: int) -> None:
        rows, columns = MULTIPLES[self.scaling]
        if n % columns or k % columns or tokens % rows:
            raise ValueError(
                f"{name} (in {k}, out {n}, {tokens} tokens): TransformerEngine's {NAMES[self.scaling]} needs sizes "
                f"that are multiples of {columns}, and tokens of a micro-batch that are multiples of {rows}"
            )

    @property
    def version(self) -> str:
        return nvidia.te_version()

    def settings(self) -> str:
        return " ".join(str(recipe_of(self)).split())

    def check_machine(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"TransformerEngine needs a CUDA GPU, and this run is on {device}; use +recipe=fp8")
        te = nvidia.transformer_engine()
        ask = AVAILABLE.get(self.scaling, "is_fp8_available")
        if not hasattr(te, ask):
            raise ValueError(f"TransformerEngine {nvidia.te_version()} has no {NAMES[self.scaling]} (no {ask})")
        there, reason = getattr(te, ask)(return_reason=True)
        if not there:
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise ValueError(
                f"scaling={self.scaling} cannot run on {torch.cuda.get_device_name(device)} (compute capability "
                f"{capability}): {reason}"
            )
        recipe_of(self)


@cache
def recipe_of(backend: TransformerEngine) -> Any:
    """Return TransformerEngine's recipe. Raises ValueError if this version lacks it or refuses the options."""
    nvidia.transformer_engine()
    from transformer_engine.common import recipe as recipes

    name, options = NAMES[backend.scaling], backend.options
    if not hasattr(recipes, name):
        raise ValueError(f"TransformerEngine {nvidia.te_version()} has no recipe {name}")
    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    try:
        return getattr(recipes, name)(**options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"TransformerEngine {nvidia.te_version()} refuses {backend}: {error}") from error


class Layer:
    """A `te.Linear` on the meta device. It is not an nn.Module, so it adds no parameters to the model."""

    def __init__(self, backend: TransformerEngine, module: Any) -> None:
        self._backend, self._module = backend, module

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        lent = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        y: Tensor = functional_call(self._module, lent, (x,))
        return y

    def state(self) -> dict[str, Tensor]:
        """Return the scales and amax histories, forward and backward; {} if the scaling has none."""
        if not self._backend.stateful:
            return {}
        self._prepare()
        found = self._module.get_fp8_meta_tensors()
        return {f"{way}_{part}": each for way, pair in found.items() for part, each in zip(PARTS, pair, strict=True)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if not self._backend.stateful:
            return
        self._prepare()
        ways = self._module.get_fp8_meta_tensors()
        self._module.reset_fp8_meta_tensors({way: [state[f"{way}_{part}"] for part in PARTS] for way in ways})

    def _prepare(self) -> None:
        """Create the tensors that a first pass creates. Without gradients: leaving an autocast updates histories."""
        if not self._module.fp8_initialized:
            with torch.no_grad(), self._backend.around_pass():
                self._module.init_fp8_metadata(num_gemms=1)
