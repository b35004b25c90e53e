"""All-gather of quantised weights in FSDP2, by extension functions on the sharded parameters.

    shard, FP32 -> BF16 -> (codes, scales), once per step -> every all-gather -> the layer's GEMMs       W
    leaf <- dW        -> reduce-scatter -> the shard's gradient -> the estimator's slope, once per step

`all_gather_format` chooses the format. `QuantizedAllGather.prepare` quantises before the first micro-batch of a step
and before an evaluation. Every all-gather sends the result, into the tensors that the GEMMs read
(`in_place_all_gather`), and `finish` frees it after the last backward pass. A scale of the whole tensor needs the amax
of all shards: `prepare` all-reduces those of all weights at once, and an all-gather needs none. Gathered codes have no
gradient: a leaf has it, and its hook adds it to the parameter that FSDP2 reads (`precision.all_gathered_weight`).

DGE's slope f' is elementwise, the same for all contributions, and needs the weight itself. With codes each rank
multiplies it once into its shard of the summed gradient (`QuantizedAllGather.finish`). That is f' sum(g) for sum(f' g):
n + 1 roundings of FP32 in another place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.comm.fsdp_units import fsdp_units, modules_of
from lowprec_train.comm.process_group import DistributedGroup
from lowprec_train.numerics.draws import Gemms, Operand
from lowprec_train.numerics.lists import amax_all, quantize_lists, quantizes_lists
from lowprec_train.numerics.quantizer import Quantized, Quantizer, Shared
from lowprec_train.optim.gradient_hooks import after_gradient
from lowprec_train.optim.tensor_stats import over_groups
from lowprec_train.parallel.all_gather_format import CODED, AllGatherFormat, all_gather_format
from lowprec_train.parallel.fsdp_parameters import (
    cast_all,
    gathered_parameters,
    on_reshard,
    reset_buffers,
    stays_gathered,
    with_extensions,
)
from lowprec_train.parallel.in_place_all_gather import FILLER_BYTES, GatherMemory, UnitAllGather, read_by_current_stream
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.estimators import Estimator, StraightThrough
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.linear_plan import Op, OperandPlan, Source

BYTE = torch.float8_e4m3fn  # dtype of one-byte codes where FSDP2 needs a floating dtype


class QuantizedAllGather:
    """All-gathers the weights of the linear layers of `model` as `param_all_gather` says ("auto", "bf16", "quantized").

    model: sharded, allocated, before its first forward pass. dtype: of its residual stream. shards: the group of
    dp_shard. parts: the group of tp, if layers are divided. grad_dtype: in which GEMMs write gradients; None: that of
    the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        param_all_gather: str,
        dtype: torch.dtype,
        shards: dist.ProcessGroup,
        parts: dist.ProcessGroup | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self._coded, self._dtype = param_all_gather in CODED, dtype
        self._units = fsdp_units(model)
        groups = {"shards": shards} | ({} if parts is None else {"parts": parts})
        self._groups = {name: DistributedGroup.of(group) for name, group in groups.items()}
        tops = [(unit, top) for unit in self._units for top in modules_of(unit)]
        owners = {module: unit for unit, top in tops for module in top.modules()}  # inner units last
        options: dict[str, Any] = {"param_all_gather": param_all_gather, "dtype": dtype, "grad_dtype": grad_dtype}
        self.weights = {
            name: _Weight(module, owners[module], shards=shards.size(), **options)
            for name, module in model.named_modules()
            if isinstance(module, Linear) and "weight" in dict(module.named_parameters(recurse=False))
        }
        self.memory = GatherMemory()
        for unit in self._units:
            self._gather_in_place(unit)

    def _gather_in_place(self, unit: FSDPModule) -> None:
        weights: dict[Tensor, _Weight] = {
            w.parameter: w for w in self.weights.values() if w.unit is unit and w.in_place
        }
        if weights:
            first, *others = gathered_parameters(unit)
            if first in weights:
                weights[first].sends_filler = True
            whole = all(parameter in weights for parameter in (first, *others))
            gather = UnitAllGather(list(weights.values()), self.memory, whole=whole, stays=stays_gathered(unit))
            unit.set_custom_all_gather(cast(Any, gather))
            on_reshard(unit, partial(gather.release, next(iter(weights)).device))

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
        weights = list(self.weights.values())
        rounded = dict(zip(weights, cast_all([weight.shard for weight in weights], self._dtype), strict=True))
        listed: list[_Weight] = []
        if self._coded:
            for unit in self._units:
                unit.reshard()
            self.memory.clear()
            waiting = [weight for weight in weights if weight.refresh_format()]
            listed = [weight for weight in weights if weight.in_list]
            self._set_amaxes(waiting, listed, rounded)
            self._all_reduce_amaxes(waiting)
        operands = [(weight.quantizer, rounded[weight], weight.amax) for weight in listed]
        codes = dict(zip(listed, quantize_lists(operands), strict=True))
        for weight in weights:
            weight.round(rounded.pop(weight), codes.pop(weight, None))

    def _set_amaxes(self, waiting: list[_Weight], listed: list[_Weight], rounded: Mapping[_Weight, Tensor]) -> None:
        """Compute the amaxes of the shards of `waiting`, in one launch for those that are `listed`."""
        if listed:
            amaxes = amax_all([rounded[weight] for weight in listed]).view(-1, 1, 1).unbind()
            for weight, amax in zip(listed, amaxes, strict=True):
                weight.amax = amax
        for weight in set(waiting).difference(listed):
            weight.amax = weight.local_amax(rounded[weight])

    def _all_reduce_amaxes(self, waiting: list[_Weight]) -> None:
        """All-reduce the amaxes of these weights: one all-reduce for each axis that divides one of them."""
        for name, group in sorted(self._groups.items()):
            members = [weight for weight in waiting if name in weight.amax_groups]
            amaxes = over_groups([(group, weight.amax) for weight in members], lambda group, x: group.all_reduce_max(x))
            for weight, amax in zip(members, amaxes, strict=True):
                weight.amax = amax

    @torch.no_grad()
    def finish(self) -> None:
        """Multiply the slopes of estimators into summed gradients, and `free`. Call it after a step's last backward."""
        correct: dict[Estimator, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for weight in self.weights.values():
            if (operands := weight.estimated()) is not None:
                correct.setdefault(weight.linear.recipe.estimator, []).append(operands)
        for estimator, found in correct.items():
            grads, shards, scales = zip(*found, strict=True)
            estimator.correct_all(grads, shards, scales, self._dtype)
        self.free()

    def free(self) -> None:
        """Free what `prepare` has made and all-gathers have read."""
        for weight in self.weights.values():
            weight.finish()
        self.memory.clear()


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A shard as sent. wide: the tensors that are gathered. For codes: `known`, scales of all ranks, and `scale`."""

    wide: tuple[Tensor, ...]
    known: tuple[Tensor, ...] | None = None
    scale: Tensor | None = None


class _Weight:
    """One layer's weight: this rank's shard, its format, and the two functions that FSDP2 calls."""

    def __init__(
        self,
        linear: Linear,
        unit: FSDPModule,
        *,
        param_all_gather: str,
        dtype: torch.dtype,
        grad_dtype: torch.dtype | None,
        shards: int,
    ) -> None:
        parameter = linear.weight
        assert isinstance(parameter, DTensor)
        self.linear, self.unit, self.parameter = linear, unit, parameter
        self.shard = with_extensions(parameter, self._pre_all_gather, self._post_all_gather)
        self._shape = (parameter.shape[0], parameter.shape[1])
        self._param_all_gather, self._dtype, self._shards = param_all_gather, dtype, shards
        self._grad_dtype = grad_dtype
        self._split = None if linear.split is None else linear.split.dim
        self._recipe, self._format = linear.recipe, self.current_format()
        self._values: Tensor | None = None  # what is gathered: its memory comes and goes
        self._sent: _Sent | None = None  # of the step
        self._sending: _Sent | None = None  # of the all-gather that has begun
        self._packed = self._scales = self.amax = torch.empty(0)
        self._leaf: Tensor | None = None
        self._known: Any = None  # scales of the codes that the layer has
        self._plain = torch.empty(0)  # the values as a leaf, for GEMMs of values
        self.in_place = shards > 1 and self._shape[0] % shards == 0
        self.sends_filler = False
        self._filler = torch.zeros(FILLER_BYTES, dtype=torch.uint8, device=self.shard.device)

    @property
    def amax_groups(self) -> set[str]:
        """Names of the groups over which its amax is all-reduced."""
        dims = {"shards": 0, "parts": self._split}
        return {name for name, dim in dims.items() if dim in self._format.amax_dims}

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

    @property
    def quantizer(self) -> Quantizer:
        """The quantiser of its codes, if codes are gathered."""
        assert self._format.quantizer is not None
        return self._format.quantizer

    @property
    def in_list(self) -> bool:
        """Whether it is quantised together with others: its codes have one scale, from an all-reduced amax."""
        scaled = self.sends_codes and bool(self._format.amax_dims) and self.shard.is_contiguous()
        return scaled and quantizes_lists(self.quantizer, self.shard.device)

    def refresh_format(self) -> bool:
        """Refresh the all-gather format if the recipe has changed. Returns True if a global amax is needed."""
        if self._recipe is not self.linear.recipe:
            self._recipe, now = self.linear.recipe, self.current_format()
            if now != self._format:
                reset_buffers(self.unit, self.linear)
                self._format, self.linear.gathered, self._values = now, None, None
        return self.sends_codes and bool(self._format.amax_dims)

    def local_amax(self, w: Tensor) -> Tensor:
        """Return the amax of the shard. w: the shard in the dtype of the residual stream."""
        return self.quantizer.local_amax(w, self._format.amax_dim)

    def estimated(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the shard's summed gradient, the shard and its scales, if this rank applies an estimator to them."""
        estimator, gradient = self.linear.recipe.estimator, self.parameter.grad
        if self._format.quantizer is None or isinstance(estimator, StraightThrough) or gradient is None:
            return None
        scale = self._rounding().scale
        assert scale is not None
        return cast(DTensor, gradient).to_local(), self.shard.detach(), scale

    def finish(self) -> None:
        """Free what all-gathers of the step have sent."""
        self._sent, self.amax = None, torch.empty(0)

    def round(self, w: Tensor | None = None, codes: Quantized | None = None) -> None:
        """Compute what all-gathers send until `finish`. w: the shard in the dtype of the residual stream. codes: of w,
        if known.
        """
        self._sent = None
        self._sent = self._rounding(w, codes)

    def _rounding(self, w: Tensor | None = None, codes: Quantized | None = None) -> _Sent:
        """Return what an all-gather sends: that of the step, or else of the current weight."""
        if self._sent is not None:
            return self._sent
        w = self._rounded() if w is None else w
        if self._format.quantizer is None:
            padding = self._format.rows - w.shape[0]
            return _Sent(wide=(torch.cat((w, w.new_zeros(padding, w.shape[1]))) if padding else w,))
        codes = self._codes(w) if codes is None else codes
        scales = codes.parts.get("block", codes.scale)
        sent = torch.ops.lowprec.pack_e2m1(codes.codes) if self._format.packed else codes.codes
        parts = (sent, scales) if self._format.sends_scales else (sent,)
        wide = tuple(part.contiguous().view(torch.uint8) for part in parts)
        return _Sent(wide=wide, known=(scales, *([codes.parts["tensor"]] if codes.parts else [])), scale=codes.scale)

    def _rounded(self) -> Tensor:
        return self.shard.detach().to(self._dtype)

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
        self._sending = sent = self._rounding()
        wide = sent.wide if not self.in_place else (self._filler,) if self.sends_filler else ()
        return wide, sent.known

    def gather_buffers(self, ranks: int) -> list[tuple[Tensor, Tensor]]:
        """Allocate the whole weight; return (gathered, shard) of its tensors."""
        assert self._sending is not None
        sent, coded = self._sending.wide, self._format.quantizer is not None
        if self._sending is not self._sent:
            read_by_current_stream(sent)
        if self._values is None:
            dtype = torch.uint8 if coded else sent[0].dtype
            self._values = torch.empty(self._shape, dtype=dtype, device=self.shard.device)
        self._values.untyped_storage().resize_(self._values.nbytes)
        if self._format.packed:
            self._packed = sent[0].new_empty(ranks * sent[0].shape[0], sent[0].shape[1])
        made = [self._packed if self._format.packed else self._values.data]
        if self._format.sends_scales:
            self._scales = sent[1].new_empty(ranks * sent[1].shape[0], *sent[1].shape[1:])
            made.append(self._scales)
        return list(zip(made, sent, strict=True))

    def unpack(self) -> None:
        """Unpack codes."""
        if self._format.packed:
            assert self._values is not None
            torch.ops.lowprec.unpack_e2m1_all([self._packed], [self._values.data])
        self._sending, self._packed = None, torch.empty(0)

    def free(self) -> None:
        """Free the memory of the gathered weight."""
        if self._values is not None:
            self._values.untyped_storage().resize_(0)

    def _post_all_gather(
        self, gathered: Sequence[Tensor], known: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Give the layer its weight. out: None at the first call, which returns the tensor that FSDP2 uses as the
        parameter from then on, and the tensors that it frees and allocates for it. dtype: of gradients by default.
        """
        first = out is None
        if first and not self.in_place:
            self._values = gathered[0]
        assert self._values is not None
        if not first and known is self._known and not self._format.sends_scales:
            return None  # as in the forward pass: the memory is filled again
        self._known = known
        if self._leaf is None:
            zero = torch.zeros((), dtype=self._grad_dtype or dtype, device=self.shard.device)
            self._leaf = self._with_grad_hook(zero.expand(self._shape))
        if self._format.quantizer is None:
            if first:
                self._plain = self._with_grad_hook(self._values[: self._shape[0]].detach())
            self.linear.gathered = AllGatheredWeight(leaf=self._leaf, coded=False, tensors=(self._plain,))
            return (self._values, ()) if first else None
        own = self._sent is not None and known is self._sent.known  # made by `prepare`, on this stream
        read_by_current_stream((*(() if own else known), *((self._scales,) if self._format.sends_scales else ())))
        scales = self._scales.view(known[0].dtype) if self._format.sends_scales else known[0]
        codes = self._values.view(self._format.quantizer.format.carrier)
        self.linear.gathered = AllGatheredWeight(leaf=self._leaf, coded=True, tensors=(codes, scales, *known[1:]))
        return (self._values.view(BYTE), ()) if first else None

    def _with_grad_hook(self, leaf: Tensor) -> Tensor:
        """Return the leaf, which takes the weight's gradient."""
        after_gradient(leaf.requires_grad_(), self._accumulate_grad)
        return leaf

    def _accumulate_grad(self, leaf: Tensor) -> None:
        """Add a leaf's gradient to that of the gathered parameter, in the dtype in which it is made, until the backward
        pass of its unit is over. A compiled block also calls this for a leaf without a gradient.
        """
        parameter, gradient, leaf.grad = self.linear.weight, leaf.grad, None
        if gradient is None:
            return
        if parameter.grad is None:
            parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient
        else:
            parameter.grad += gradient
