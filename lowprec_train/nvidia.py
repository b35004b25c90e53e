"""NVIDIA's own packages that may run parts of a model: TransformerEngine and apex, found, imported and judged.

Both are optional and built for one GPU stack, so many states of an installation cannot work: absent, a directory or
another project of the same name, an older version, a library that does not load. Each is one ValueError that says what
was found and where. Whoever needs a package calls `transformer_engine`, `apex_adam` or `apex_norms` before work begins,
and again where it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

TE_OLDEST = (2, 8)  # `autocast`, and the recipes that `precision.transformer_engine` names
TE_NEEDS = ("Linear", "autocast", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available")
APEX_SOURCE = "NVIDIA's apex is built from github.com/NVIDIA/apex, and is in NVIDIA's PyTorch images"


@cache
def transformer_engine() -> ModuleType:
    """`transformer_engine.pytorch`. Raises ValueError where it cannot be used, with what was found and where."""
    wanted = "TransformerEngine, of which 'transformer_engine' is the package"
    origin = _found("transformer_engine", wanted, "pip install 'lowprec_train[te]' builds it where there is CUDA")
    te = _imported("transformer_engine.pytorch", origin)
    _has(te, TE_NEEDS, "transformer_engine.pytorch", origin)
    version = te_version()
    numbers = tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:2]))  # "2.10rc1" is 2.10
    if numbers and numbers < TE_OLDEST:
        raise ValueError(
            f"TransformerEngine {version} at {origin} is older than {'.'.join(map(str, TE_OLDEST))}, the oldest that "
            "is served"
        )
    return te


def te_version() -> str:
    """Version of the imported package; "unknown" for a checkout that does not say it."""
    return _version("transformer_engine")


@cache
def apex_adam() -> tuple[Callable[..., None], Callable[..., None]]:
    """(multi_tensor_applier, amp_C.multi_tensor_adam_capturable): what apex.optimizers.FusedAdam steps with. Raises
    ValueError as `transformer_engine` does.
    """
    origin = _apex()
    _has(_imported("apex.optimizers", origin), ("FusedAdam",), "apex.optimizers", origin)
    applier = getattr(_imported("apex.multi_tensor_apply", origin), "multi_tensor_applier", None)
    if not getattr(applier, "available", False):
        raise ValueError(f"apex at {origin} was built without its CUDA extensions (amp_C); {APEX_SOURCE}")
    kernels = _imported("amp_C", origin)
    _has(kernels, ("multi_tensor_adam_capturable",), "amp_C", origin)
    return applier, kernels.multi_tensor_adam_capturable  # type: ignore[return-value]


@cache
def apex_norms() -> ModuleType:
    """`apex.normalization.fused_layer_norm`. Raises ValueError as `transformer_engine` does."""
    origin = _apex()
    norms = _imported("apex.normalization.fused_layer_norm", origin)
    needs = ("mixed_dtype_fused_rms_norm_affine", "mixed_dtype_fused_layer_norm_affine")
    _has(norms, needs, "apex.normalization.fused_layer_norm", origin)
    _imported("fused_layer_norm_cuda", origin)
    return norms


def _apex() -> str:
    """Where NVIDIA's apex lies."""
    origin = _found("apex", "NVIDIA's apex", APEX_SOURCE)
    for part in ("apex.optimizers", "apex.normalization", "apex.multi_tensor_apply"):
        if _spec(part, origin) is None:
            raise ValueError(
                f"the package 'apex' {_version('apex')} at {origin} is not NVIDIA's: it has no {part}; the package "
                f"index has an unrelated project of that name. {APEX_SOURCE}"
            )
    return origin


def _found(package: str, wanted: str, how: str) -> str:
    """The file that a package begins with."""
    spec = _spec(package, package)
    if spec is None:
        raise ValueError(f"{wanted}, is not installed: {how}")
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or ())
        raise ValueError(f"{wanted}, is not installed: {places} is a directory of that name and no package; {how}")
    return spec.origin


def _spec(module: str, origin: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # a package runs its own code here
        raise ValueError(f"{origin} cannot be imported: {_one_line(error)}") from error


def _imported(module: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # of a library that does not load: OSError, RuntimeError, AssertionError, ...
        raise ValueError(f"{module} of {origin} cannot be imported: {_one_line(error)}") from error


def _has(module: ModuleType, names: Sequence[str], path: str, origin: str) -> None:
    if absent := [name for name in names if not hasattr(module, name)]:
        raise ValueError(
            f"{path} of {origin} (version {_version(path.partition('.')[0])}) has no {', '.join(absent)}: it is "
            "another project, a stub, or a version that is not served"
        )


def _version(package: str) -> str:
    for name in (package, package.replace("_", "-")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        return str(getattr(importlib.import_module(package), "__version__", "unknown"))
    except Exception:
        return "unknown"


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
