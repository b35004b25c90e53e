"""A stand-in for NVIDIA's TransformerEngine with its names, signatures and life of delayed scaling, on a CPU.

What it shares with the real one (2.20): `te.Linear` made on the meta device and called with lent tensors;
`te.autocast`, whose outermost end moves the forward amax of every layer into its history; the first layer's backward
pass, which moves those of gradients; scales of the history's largest amax; `get_fp8_meta_tensors` and
`reset_fp8_meta_tensors`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lowprec_train import nvidia
from lowprec_train.precision import transformer_engine

FP8 = {"E4M3": (torch.float8_e4m3fn, 448.0), "E5M2": (torch.float8_e5m2, 57344.0)}


class Recipe:
    """Of any name: keyword arguments are its attributes."""

    defaults: ClassVar[dict[str, Any]] = {"fp8_format": "HYBRID"}

    def __init__(self, **options: Any) -> None:
        unknown = set(options) - set(self.defaults)
        if unknown:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        self.__dict__.update(self.defaults | options)

    def __repr__(self) -> str:
        return f"recipe_type={type(self).__name__}, " + ", ".join(f"{k}={v}" for k, v in self.__dict__.items())


HISTORY = {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"}
RECIPES = {
    "DelayedScaling": type("DelayedScaling", (Recipe,), {"defaults": Recipe.defaults | HISTORY}),
    "Float8CurrentScaling": type("Float8CurrentScaling", (Recipe,), {}),
    "Float8BlockScaling": type("Float8BlockScaling", (Recipe,), {"defaults": {"fp8_format": "E4M3"}}),
    "MXFP8BlockScaling": type("MXFP8BlockScaling", (Recipe,), {"defaults": {"fp8_format": "E4M3"}}),
    "NVFP4BlockScaling": type("NVFP4BlockScaling", (Recipe,), {"defaults": {}}),
}


class State:
    """Of the process, as FP8GlobalStateManager."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.depth, self.first, self.layers = 0, False, []


class Meta:
    """Scale and history of the tensors of one direction."""

    def __init__(self, tensors: int, history: int) -> None:
        self.scale, self.amax_history = torch.ones(tensors), torch.zeros(history, tensors)

    def update(self, top: float, recipe: Any) -> None:
        """History moves on; scales follow from its largest amax."""
        amax = self.amax_history.amax(0) if recipe.amax_compute_algo == "max" else self.amax_history[0].clone()
        self.amax_history.copy_(self.amax_history.roll(-1, 0))
        self.amax_history[0] = 0.0
        good = (amax > 0) & amax.isfinite()
        self.scale.copy_(torch.where(good, top / amax / 2**recipe.margin, self.scale))


def make(monkeypatch: pytest.MonkeyPatch, version: str = "2.20.2") -> Any:
    """`transformer_engine.pytorch`, importable and on any device until the test ends."""
    state = State()

    class autocast:
        def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
            self.enabled, self.recipe = enabled, recipe

        def __enter__(self):
            self.before, state.recipe = state.recipe, self.recipe if self.enabled else None
            state.first, state.depth = state.first or state.depth == 0, state.depth + 1
            return self

        def __exit__(self, *error):
            state.recipe, state.depth = self.before, state.depth - 1
            if self.enabled and state.depth == 0 and torch.is_grad_enabled():
                for layer in state.layers:
                    layer.fp8_meta["scaling_fwd"].update(448.0, layer.recipe)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, layer, first):
            q = [layer.rounded("scaling_fwd", i, each, "E4M3") for i, each in enumerate((x, weight))]
            ctx.save_for_backward(*q)
            ctx.layer, ctx.first = layer, first
            return (q[0] @ q[1].t()).to(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            q = ctx.layer.rounded("scaling_bwd", 0, dy, "E5M2")
            dw = q.flatten(end_dim=-2).t() @ x.flatten(end_dim=-2)
            if ctx.first:
                for layer in state.layers:
                    layer.fp8_meta["scaling_bwd"].update(57344.0, layer.recipe)
            return (q @ weight).to(dy.dtype), dw.to(dy.dtype), None, None

    class Linear(nn.Module):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda", **options):
            super().__init__()
            assert device == "meta" and not options, "memory of its own is not asked of the stand-in"
            self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype)) if bias else None
            self.fp8_meta, self.fp8_initialized, self.recipe = {}, False, None

        def init_fp8_metadata(self, num_gemms=1):
            if state.recipe is None or self.fp8_initialized:
                return
            self.recipe, self.fp8_initialized = state.recipe, True
            history = getattr(self.recipe, "amax_history_len", 0)
            self.fp8_meta = {"scaling_fwd": Meta(3, history), "scaling_bwd": Meta(2, history)}

        def get_fp8_meta_tensors(self):
            return {key: [m.scale.clone(), m.amax_history.clone()] for key, m in self.fp8_meta.items()}

        def reset_fp8_meta_tensors(self, fp8_meta_tensors=None):
            for key, meta in self.fp8_meta.items():
                for live, new in zip((meta.scale, meta.amax_history), fp8_meta_tensors[key], strict=True):
                    live.copy_(new)

        def rounded(self, key, index, x, format):
            dtype, top = FP8[format]
            amax = x.abs().amax().float()
            if type(self.recipe) is not RECIPES["DelayedScaling"]:
                scale = top / amax
            else:
                meta = self.fp8_meta[key]
                meta.amax_history[0, index] = torch.maximum(meta.amax_history[0, index], amax)
                scale = meta.scale[index].clone()
            return (x.float() * scale).clamp(-top, top).to(dtype).float() / scale

        def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
            assert state.recipe is not None, "outside of an autocast the real one computes in BF16"
            assert self.weight.dtype == inp.dtype, "Data types for parameters must match"
            self.init_fp8_metadata()
            if self not in state.layers and type(self.recipe) is RECIPES["DelayedScaling"]:
                state.layers.append(self)
            first, state.first = state.first and torch.is_grad_enabled(), False
            y = Product.apply(inp, self.weight, self, first)
            return y if self.bias is None else y + self.bias

    package, te = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    common, recipes = ModuleType("transformer_engine.common"), ModuleType("transformer_engine.common.recipe")
    package.__version__, package.pytorch, package.common, common.recipe = version, te, common, recipes
    recipes.__dict__.update(RECIPES)
    recipes.Format = type("Format", (), {"HYBRID": "HYBRID", "E4M3": "E4M3"})
    te.Linear, te.autocast, te.state = Linear, autocast, state
    for what in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        setattr(te, f"is_{what}_available", lambda return_reason=False: (True, "") if return_reason else True)
    for name, module in (("", package), (".pytorch", te), (".common", common), (".common.recipe", recipes)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    monkeypatch.setattr(nvidia, "transformer_engine", lambda: te)
    monkeypatch.setattr(nvidia, "te_version", lambda: version)
    monkeypatch.setattr(transformer_engine.TransformerEngine, "check_machine", lambda self, device: None)
    transformer_engine.recipe_of.cache_clear()
    return te
