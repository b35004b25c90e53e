"""All-gather of quantised weights in FSDP2, by extension functions on the sharded parameters.

    shard, FP32 -> BF16 -> (codes, scales), once per step -> every all-gather -> the layer's GEMMs       W
    leaf <- dW, FP32  -> reduce-scatter -> the shard's gradient -> the estimator's slope, once per step

`all_gather_format` chooses the format. `QuantizedAllGather.prepare` quantises before the first micro-batch of a step
and before an evaluation. Every all-gather sends the result, and `finish` frees it after the last backward pass. A scale
of the whole tensor needs the amax of all shards: `prepare` all-reduces those of all weights at once, and an all-gather
needs none. Gathered codes have no gradient: a leaf has it, and its hook adds it to the parameter that FSDP2 reads
(`precision.all_gathered_weight`).

DGE's slope f' is elementwise, the same for all contributions, and needs the weight itself. With codes each rank
multiplies it once into its shard of the summed gradient (`QuantizedAllGather.finish`). That is f' sum(g) for sum(f' g):
n + 1 roundings of FP32 in another place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.comm.fsdp import managed
from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.quantizer import Quantized, Shared
from lowprec_train.optim.tensor_stats import over_groups
from lowprec_train.parallel.all_gather_format import AllGatherFormat, all_gather_format
from lowprec_train.parallel.fsdp_parameters import extension_tensor, reset_buffers
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.linear_plan import Op, OperandPlan, Source

BYTE = torch.float8_e4m3fn  # dtype of one-byte codes where FSDP2 needs a floating dtype


class QuantizedAllGather:
    """All-gathers the weights of the linear layers of `model` as `param_all_gather` says ("bf16" or "quantized").

    model: sharded, allocated, before its first forward pass. dtype: of its residual stream. shards: the group of
    dp_shard. parts: the group of tp, if layers are divided.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        param_all_gather: str,
        dtype: torch.dtype,
        shards: dist.ProcessGroup,
        parts: dist.ProcessGroup | None = None,
    ) -> None:
        self._coded = param_all_gather == "quantized"
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = {"shards": shards} | ({} if parts is None else {"parts": parts})
        self._groups = {name: DistributedGroup.of(group) for name, group in groups.items()}
        owners = {module: unit for unit in self._units for module in cast(nn.Module, unit).modules()}  # inner ones last
        self.weights = {
            name: _Weight(module, owners[module], param_all_gather=param_all_gather, dtype=dtype, shards=shards.size())
            for name, module in model.named_modules()
            if isinstance(module, Linear) and "weight" in dict(module.named_parameters(recurse=False))
        }
        by_unit = ([w for w in self.weights.values() if w.unit is unit] for unit in self._units)
        self._whole_units = [made for made, unit in zip(by_unit, self._units) if len(made) == len(managed(unit))]

    def formats(self) -> dict[str, AllGatherFormat]:
        """Return the format of each layer's weight under its current recipe, by the layer's name."""
        return {name: weight.current_format() for name, weight in self.weights.items()}

    def coded(self) -> set[Linear]:
        """Return the layers whose weights are gathered as codes, from `prepare` on."""
        return {weight.linear for weight in self.weights.values() if weight.sends_codes}

    @classmethod
    def of(cls, model: nn.Module, *, param_all_gather: str, **options: Any) -> QuantizedAllGather | None:
        """Create it; None for "fp32": FSDP2 gathers parameters as stored."""
        return None if param_all_gather == "fp32" else cls(model, param_all_gather=param_all_gather, **options)

    @torch.no_grad()
    def prepare(self) -> None:
        """Free what stayed gathered as codes from an earlier pass, all-reduce amaxes, and quantise every shard. Call it
        before the first micro-batch of a step and before an evaluation, after the change of weights and recipes.
        """
        if self._coded:
            for unit in self._units:
                unit.reshard()
            self._all_reduce_amaxes([weight for weight in self.weights.values() if weight.refresh_format()])
        for weight in self.weights.values():
            weight.round()
        for weights in self._whole_units:
            plain = all(weight.is_plain for weight in weights)
            for weight in weights:
                weight.keeps_dtype = plain

    def _all_reduce_amaxes(self, waiting: list[_Weight]) -> None:
        """All-reduce the amaxes of these weights: one all-reduce for each axis that divides one of them."""
        for name, group in sorted(self._groups.items()):
            members = [weight for weight in waiting if name in weight.amax_groups]
            amaxes = over_groups([(group, weight.amax) for weight in members], lambda group, x: group.all_reduce_max(x))
            for weight, amax in zip(members, amaxes, strict=True):
                weight.amax = amax

    @torch.no_grad()
    def finish(self) -> None:
        """Multiply the slopes of estimators into the summed gradients, and free what was gathered. Call it after the
        last backward pass of a step.
        """
        for weight in self.weights.values():
            weight.finish()


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A shard as sent. wide: the tensors that FSDP2 gathers. For codes: `known`, scales of all ranks, and `scale`."""

    wide: tuple[Tensor, ...]
    known: tuple[Tensor, ...] | None = None
    scale: Tensor | None = None


class _Weight:
    """One layer's weight: this rank's shard, its format, and the two functions that FSDP2 calls."""

    def __init__(
        self, linear: Linear, unit: FSDPModule, *, param_all_gather: str, dtype: torch.dtype, shards: int
    ) -> None:
        parameter = linear.weight
        assert isinstance(parameter, DTensor)
        self.linear, self.unit, self._parameter = linear, unit, parameter
        self._part, self._shape = extension_tensor(parameter), (parameter.shape[0], parameter.shape[1])
        self._param_all_gather, self._dtype, self._shards = param_all_gather, dtype, shards
        self._split = None if linear.split is None else linear.split.dim
        self._format = self.current_format()
        self._values = torch.empty(0)
        self._sent: _Sent | None = None
        self.amax = torch.empty(0)
        self._leaf: Tensor | None = None
        self.keeps_dtype = False  # gradients keep the dtype in which they are made, if it is one for all of a unit
        found = cast(Any, self._part)
        found.fsdp_pre_all_gather, found.fsdp_post_all_gather = self._pre_all_gather, self._post_all_gather

    @property
    def amax_groups(self) -> set[str]:
        """Names of the groups over which its amax is all-reduced."""
        dims = {"shards": 0, "parts": self._split}
        return {name for name, dim in dims.items() if dim in self._format.amax_dims}

    @property
    def is_plain(self) -> bool:
        """Whether its GEMM multiplies values in the dtype of the residual stream; its gradient then has that dtype."""
        return self.linear.recipe.takes_values

    @property
    def sends_codes(self) -> bool:
        """Whether codes are gathered."""
        return self._format.quantizer is not None

    def current_format(self) -> AllGatherFormat:
        """Return the format under the current recipe."""
        return all_gather_format(
            self.linear.recipe,
            self._shape,
            shards=self._shards,
            param_all_gather=self._param_all_gather,
            dtype=self._dtype,
            split=self._split,
        )

    def refresh_format(self) -> bool:
        """Refresh the all-gather format from the current recipe. Returns True if a global amax is needed; `amax` then
        is that of the shard.
        """
        now = self.current_format()
        if now != self._format:
            reset_buffers(self.unit, self.linear)
            self._format, self.linear.gathered = now, None
        quantizer = now.quantizer
        if quantizer is None or not now.amax_dims:
            return False
        self.amax = quantizer.local_amax(self._rounded(), now.amax_dim)
        return True

    def finish(self) -> None:
        estimator, gradient = self.linear.recipe.estimator, self._parameter.grad
        if self._format.quantizer is not None and not isinstance(estimator, StraightThrough) and gradient is not None:
            here = cast(DTensor, gradient).to_local()
            scale = self._rounding().scale
            assert scale is not None
            here.copy_(estimator(here, self._rounded(), scale, here.dtype))
        self._sent, self.amax = None, torch.empty(0)

    def round(self) -> None:
        """Compute what all-gathers send until `finish`."""
        self._sent = None
        self._sent = self._rounding()

    def _rounding(self) -> _Sent:
        """Return what an all-gather sends: that of the step, or else of the current weight."""
        if self._sent is not None:
            return self._sent
        w = self._rounded()
        if self._format.quantizer is None:
            padding = self._format.rows - w.shape[0]
            return _Sent(wide=(torch.cat((w, w.new_zeros(padding, w.shape[1]))) if padding else w,))
        codes = self._codes(w)
        scales = codes.parts.get("block", codes.scale)
        sent = torch.ops.lowprec.pack_e2m1(codes.codes) if self._format.packed else codes.codes
        wide = (_bytes(sent), *([_bytes(scales)] if self._format.sends_scales else []))
        return _Sent(wide=wide, known=(scales, *([codes.parts["tensor"]] if codes.parts else [])), scale=codes.scale)

    def _rounded(self) -> Tensor:
        return self._part.detach().to(self._dtype)

    def _codes(self, w: Tensor) -> Quantized:
        """Quantise this rank's shard, with the scales of the whole weight."""
        form = self._format
        assert form.quantizer is not None
        if form.amax_dims and not self.amax.numel():
            raise RuntimeError("a weight whose scale depends on all shards was gathered before `prepare`")
        shared = Shared(dim=form.amax_dim, amax=self.amax) if form.amax_dims else None
        return form.quantizer(w, shared=shared)

    def _pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tensors that FSDP2 gathers, and what `_post_all_gather` gets from this rank."""
        if self.linear.observer is not None and self._format.quantizer is not None:
            w_plan = OperandPlan(
                gemm=Gemms.FPROP,
                operand=Operand.B,
                source=Source.ALL_GATHERED,
                quantizer=self._format.quantizer,
                op=Op.QUANTIZE,
            )
            w = self._rounded()
            self.linear.observer(w_plan, w, self._codes(w))
        sent = self._rounding()
        return sent.wide, sent.known

    def _post_all_gather(
        self, gathered: Sequence[Tensor], known: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Give the layer its weight. out: None at the first call, which returns the tensor that FSDP2 uses as the
        parameter from then on, and the tensors that it frees and allocates for it. dtype: of gradients.
        """
        if self._leaf is None:
            self._leaf = torch.zeros((), dtype=dtype, device=self._part.device).expand(self._shape).requires_grad_()
            self._leaf.register_post_accumulate_grad_hook(self._accumulate_grad)
        if self._format.quantizer is None:
            return self._post_all_gather_values(gathered[0], first=out is None)
        if out is None:
            self._values = gathered[0].new_empty(self._shape) if self._format.packed else gathered[0]
        if self._format.packed:
            self._values.data.copy_(_bytes(torch.ops.lowprec.unpack_e2m1(gathered[0])))
        for scale in known:
            if scale.is_cuda:  # made on the stream of the gather
                scale.record_stream(torch.cuda.current_stream())
        scales = gathered[1].clone().view(known[0].dtype) if self._format.sends_scales else known[0]
        codes = self._values.view(self._format.quantizer.format.carrier)
        self.linear.gathered = AllGatheredWeight(leaf=self._leaf, coded=True, tensors=(codes, scales, *known[1:]))
        return (self._values.view(BYTE), (self._values,) if self._format.packed else ()) if out is None else None

    def _post_all_gather_values(self, values: Tensor, *, first: bool) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if first:
            leaf = values[: self._shape[0]].detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(self._accumulate_grad)
            self._values = leaf
        assert self._leaf is not None
        self.linear.gathered = AllGatheredWeight(leaf=self._leaf, coded=False, tensors=(self._values,))
        return (values, ()) if first else None

    def _accumulate_grad(self, leaf: Tensor) -> None:
        """Add a leaf's gradient to that of the gathered parameter, until the backward pass of its unit is over. FSDP2
        needs gradients of one dtype per unit, adds those of micro-batches in FP32, and casts when it copies them. A
        compiled block also calls this for a leaf without a gradient.
        """
        parameter, gradient, leaf.grad = self.linear.weight, leaf.grad, None
        if gradient is None:
            return
        if parameter.grad is None:
            assert self._leaf is not None
            parameter.grad_dtype = gradient.dtype if self.keeps_dtype else self._leaf.dtype
            parameter.grad = gradient.to(parameter.grad_dtype)
        else:
            parameter.grad += gradient


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
