"""All-gather of quantised weights in FSDP2, by extension functions on the sharded parameters.

    shard, FP32 -> BF16 -> (codes, scales), once a step -> every all-gather -> the layer's GEMMs       W
    leaf <- dW, FP32  -> reduce-scatter -> the shard's gradient -> the estimator's slope, once a step

`all_gather_format` says what travels. It is made before the first micro-batch of a step and before an evaluation
(`QuantizedAllGather.prepare`), sent as it lies by every all-gather, and dropped after the last backward pass
(`finish`). A scale of the whole tensor needs the amax of all shards: one all-reduce for all weights in `prepare`, and
none in an all-gather. Gathered codes take no gradient; a leaf takes it, and its hook adds it to the parameter that
FSDP2 reads (`precision.all_gathered_weight`).

DGE's slope f' is elementwise and the same for all contributions, and needs the weight itself: with codes each rank
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
from lowprec_train.parallel.fsdp_parameters import forget_buffers, looked_at
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.estimators import StraightThrough
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.linear_plan import Op, OperandPlan, Source

BYTE = torch.float8_e4m3fn  # what codes of one byte are called where a floating dtype is asked for


class QuantizedAllGather:
    """The weights of the linear layers of `model`, gathered as `param_all_gather` says ("bf16" or "quantized").

    model: sharded, with memory, before its first forward pass. dtype: of its residual stream. shards: the group of
    dp_shard. parts: the group of tp, where layers are cut.
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
        """Of each layer's weight under its present recipe, by the layer's name."""
        return {name: weight.current_format() for name, weight in self.weights.items()}

    def coded(self) -> set[Linear]:
        """The layers whose weights arrive as codes, from `prepare` on."""
        return {weight.linear for weight in self.weights.values() if weight.sends_codes}

    @classmethod
    def of(cls, model: nn.Module, *, param_all_gather: str, **how: Any) -> QuantizedAllGather | None:
        """None for "fp32": FSDP2 gathers parameters as stored."""
        return None if param_all_gather == "fp32" else cls(model, param_all_gather=param_all_gather, **how)

    @torch.no_grad()
    def prepare(self) -> None:
        """Before the first micro-batch of a step and before an evaluation, with the weights and recipes of both: drop
        what stayed gathered as codes from an earlier pass, all-reduce amaxes, and round every shard.
        """
        if self._coded:
            for unit in self._units:
                unit.reshard()
            self._agree([weight for weight in self.weights.values() if weight.refresh_format()])
        for weight in self.weights.values():
            weight.round()
        for weights in self._whole_units:
            plain = all(weight.is_plain for weight in weights)
            for weight in weights:
                weight.keeps_dtype = plain

    def _agree(self, waiting: list[_Weight]) -> None:
        """On the amaxes of these weights: one all-reduce for each axis that cuts one."""
        for name, group in sorted(self._groups.items()):
            members = [weight for weight in waiting if name in weight.amax_groups]
            amaxes = over_groups([(group, weight.amax) for weight in members], lambda group, x: group.all_reduce_max(x))
            for weight, amax in zip(members, amaxes, strict=True):
                weight.amax = amax

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward pass of a step, when gradients are sums: the slopes of estimators; and drop what was
        gathered.
        """
        for weight in self.weights.values():
            weight.finish()


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A shard rounded. wide: what FSDP2 gathers. Of codes: `known`, scales that all ranks have, and `scale`."""

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
        self._part, self._shape = looked_at(parameter), (parameter.shape[0], parameter.shape[1])
        self._param_all_gather, self._dtype, self._shards = param_all_gather, dtype, shards
        self._split = None if linear.split is None else linear.split.dim
        self._format = self.current_format()
        self._values = torch.empty(0)
        self._sent: _Sent | None = None
        self.amax = torch.empty(0)
        self._leaf: Tensor | None = None
        self.keeps_dtype = False  # of gradients as they are made, where all of a unit are made in one
        found = cast(Any, self._part)
        found.fsdp_pre_all_gather, found.fsdp_post_all_gather = self._pre_all_gather, self._post_all_gather

    @property
    def amax_groups(self) -> set[str]:
        """Names of the groups over which its amax is all-reduced."""
        dims = {"shards": 0, "parts": self._split}
        return {name for name, dim in dims.items() if dim in self._format.amax_dims}

    @property
    def is_plain(self) -> bool:
        """Whether its product is of values in the stream's dtype, and so is its gradient."""
        return self.linear.recipe.takes_values

    @property
    def sends_codes(self) -> bool:
        """Whether codes are gathered."""
        return self._format.quantizer is not None

    def current_format(self) -> AllGatherFormat:
        """Under the present recipe."""
        return all_gather_format(
            self.linear.recipe,
            self._shape,
            shards=self._shards,
            param_all_gather=self._param_all_gather,
            dtype=self._dtype,
            split=self._split,
        )

    def refresh_format(self) -> bool:
        """Refresh the all-gather format from the current recipe; True if a global amax is needed, `amax` is then the
        shard's.
        """
        now = self.current_format()
        if now != self._format:
            forget_buffers(self.unit, self.linear)
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
        """Make what all-gathers send from here to `finish`."""
        self._sent = None
        self._sent = self._rounding()

    def _rounding(self) -> _Sent:
        """What an all-gather sends: that of the step, else of the weight as it is."""
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
        """Of this rank's shard, with the scales of the whole."""
        how = self._format
        assert how.quantizer is not None
        if how.amax_dims and not self.amax.numel():
            raise RuntimeError("weights whose scale depends on all shards are gathered after `prepare`")
        shared = Shared(dim=how.amax_dim, amax=self.amax) if how.amax_dims else None
        return how.quantizer(w, shared=shared)

    def _pre_all_gather(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What FSDP2 gathers, and what `_post_all_gather` gets without a gather."""
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
        """Give the layer its weight. out: None the first time; the result is then what FSDP2 takes as the parameter
        from there on, and the tensors that it frees and allocates for it. dtype: of gradients.
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
            own = values[: self._shape[0]].detach().requires_grad_()
            own.register_post_accumulate_grad_hook(self._accumulate_grad)
            self._values = own
        assert self._leaf is not None
        self.linear.gathered = AllGatheredWeight(leaf=self._leaf, coded=False, tensors=(self._values,))
        return (values, ()) if first else None

    def _accumulate_grad(self, leaf: Tensor) -> None:
        """Add a leaf's gradient to the parameter's: that of the gathered one, until its unit's backward is over. FSDP2
        takes gradients of one dtype from a unit, adds those of micro-batches in FP32, and casts as it copies them. A
        compiled block calls this for a leaf without a gradient too.
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
