"""Estimate the time of an optimizer step on one GPU, from the plan of every linear layer and measured rates of a
device.

    gemm             2 m n k / rate of the plan's path
    quantise         every operand that the plan quantises: bytes / memory bandwidth, or elements x time of its kernel
    elementwise      norms, residual sums, rotary embedding, activations, loss, casts of weights and gradients, by bytes
    attention        FLOPs / rate
    optimizer        bytes of parameters, gradients and states, read and written
    accumulation     gradients added to FP32 sums, if a step has several micro-batches
    sharding         shards rounded once a step; gradients encoded, decoded and summed
    communication    exposed: tensor parallelism, the first all-gather and the last reduction of a step, and the time by
                     which the rest is longer than the kernels of a step
    host link        time of offloaded bytes that is not hidden: states are copied in the backward pass if parameters
                     are updated there, else during the update; inputs of blocks in the backward pass
    launches         gaps between kernels, or, if it is more and there is no CUDA graph, the time by which the host is
                     slower than all of the above

Kernels are assumed to run at their full rate during communication. A step without compilation has no estimate: its
elementwise ops are not fused, so their time does not follow from bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lowprec_train.comm.fsdp import Reduction
from lowprec_train.comm.layout import excluded
from lowprec_train.numerics.corrections import Candidates, Correction
from lowprec_train.numerics.draws import Operand
from lowprec_train.numerics.formats import E2M1
from lowprec_train.numerics.quantizer import ScaleRule
from lowprec_train.numerics.rotated import rotates
from lowprec_train.precision.gemm_path import Path
from lowprec_train.precision.linear_plan import GemmPlan, LinearPlan, Op, OperandPlan, Source
from lowprec_train.tools.estimate import offload
from lowprec_train.tools.estimate.device import Device
from lowprec_train.tools.estimate.memory import sent_unchanged, states
from lowprec_train.tools.estimate.subject import Subject, Weight
from lowprec_train.tools.estimate.traffic import between_nodes, traffic, units

FP32, BF16, CODE = 4, 2, 1
DECODED = CODE + FP32 + FP32 + BF16  # bytes per element of codes that are decoded for a BF16 GEMM: to FP32, then BF16
KERNELS_OF_A_BLOCK = 30  # without GEMMs and quantisation, forward and backward, compiled
PASSES = ("gemm", "quantise", "elementwise", "attention")
Seconds = dict[str, float]


def step_time(subject: Subject, reduction: Reduction, device: Device, *, weights_in: int | None = None) -> Seconds:
    """Return the seconds of an optimizer step by class; their sum is the time of the step.

    weights_in: bytes per element of weights as GEMMs and quantisers read them, instead of the run's. Raises ValueError
    for a run that is not compiled.
    """
    if not subject.compiled:
        raise ValueError("compile=off has no estimate of time: its elementwise ops are not fused")
    pass_ = Pass(subject, device, weights_in)
    times = {name: subject.micro_batches * seconds for name, seconds in pass_.times().items()}
    times["optimizer"] = optimizer(subject, device)
    times["accumulation"] = accumulation(subject, device)
    times |= _sharding(subject, reduction, device)
    busy = sum(times.values())
    kernels = pass_.kernels * subject.micro_batches
    times["communication"] = communication(subject, reduction, device, busy)
    times["host link"] = host_link(subject, device, times)
    sharded = subject.sizes.dp > 1
    host = kernels * device.host[sharded] + sharded * subject.micro_batches * unit_count(subject) * device.unit
    host *= not subject.run.cuda_graph  # one launch
    times["launches"] = max(kernels * device.launch, host - sum(times.values()))
    return {name: seconds for name, seconds in times.items() if seconds}


@dataclass(frozen=True)
class Pass:
    """The forward and backward pass of a micro-batch."""

    subject: Subject
    device: Device
    weights_in: int | None = None

    @property
    def plans(self) -> dict[str, LinearPlan]:
        """Plans of all linear layers, for this rank's shards."""
        return self.subject.plans

    @cached_property
    def recompute(self) -> tuple[str, ...]:
        """What each block recomputes; "norms" is "none" where linears quantise X again from what is saved anyway."""
        found = []
        for index, how in enumerate(self.subject.recompute):
            saved = [plan.saved_x for name, plan in self.plans.items() if name.startswith(f"blocks.{index}.")]
            ready = sum(each.rounded_again and not each.folded for each in saved) == len(saved) - 1  # but for `down`
            found.append("none" if how == "norms" and ready else how)
        return tuple(found)

    @property
    def forward_passes(self) -> float:
        """Number of forward passes of a block's GEMMs and attention, with that of full recomputation; the mean of all
        blocks.
        """
        return 1 + self.recompute.count("full") / self.subject.run.model.layers

    @property
    def kernels(self) -> int:
        """Approximate number of kernel launches; a forward pass has a third of them. X and X^T take as many by two ops
        as by QUANTIZE_BOTH, which has a kernel for the amax.
        """
        free = Op.NONE, Op.QUANTIZE_TRANSPOSED
        made = sum(3 + sum(o.op not in free for o in plan.operands()) for plan in self.plans.values())
        return int((made + KERNELS_OF_A_BLOCK * self.subject.run.model.layers) * (2 + self.forward_passes) / 3)

    def times(self) -> Seconds:
        """Return the seconds by class."""
        gemm = quantise = 0.0
        tp = self.subject.sizes.tp
        for name, plan in self.plans.items():
            how = self.recompute[int(name.split(".")[1])] if name.startswith("blocks.") else "none"
            forward, again = 2 if how == "full" else 1, (how != "none", how in ("selective", "full"))
            if how == "norms" and name.endswith(".down"):
                again = False, False
            read = self._weight_bytes(name)
            for which, each in plan.gemms().items():
                gemm += (forward if which == "fprop" else 1) * self._gemm(each) / tp
                quantise += self._quantise(plan, each, read, again if which == "fprop" else (False, False)) / tp
            if not plan.straight_through:
                quantise += math.prod(plan.shape) * self.device.kernels["slope"] / tp
            if plan.recomputes_w:
                copied = (read + BF16) / self.device.memory
                quantise += math.prod(plan.shape) * (copied + self._operand(plan, plan.fprop.b, BF16)) / tp
            if read == FP32 and plan.fprop.b.quantizer is None:
                quantise += math.prod(plan.shape) * (FP32 + BF16) / self.device.memory / tp
        return {"gemm": gemm, "quantise": quantise, "elementwise": self._elementwise(), "attention": self._attention()}

    def _weight_bytes(self, name: str) -> int:
        if self.weights_in is not None:
            return self.weights_in
        named = {each.name: each for each in self.subject.weights}
        tied = next(each for each in self.subject.weights if each.indexed)
        weight = named.get(f"{name}.weight", tied)
        return self.subject.value_size(weight) if self.subject.sizes.dp == 1 else BF16

    def _gemm(self, plan: GemmPlan) -> float:
        m, n, k = plan.sizes
        scaled = m * n * (FP32 + FP32 + BF16) / self.device.memory if plan.path is Path.INT8 else 0.0  # INT32 to BF16
        return 2 * m * n * k / self.device.gemm[plan.path, plan.split_accumulation] + scaled

    def _quantise(self, layer: LinearPlan, plan: GemmPlan, weight_bytes: int, again: tuple[bool, bool]) -> float:
        """Return the seconds to make both operands. again: whether each is made twice."""
        m, n, k = plan.sizes
        seconds = 0.0
        for operand, count, twice in ((plan.a, m * k, again[0]), (plan.b, n * k, again[1])):
            read, elements = weight_bytes if operand.name.startswith("W") else BF16, (1 + twice) * count
            seconds += elements * self._operand(layer, operand, read)
            if plan.path is Path.DEQUANTIZE and operand.quantizer is not None and operand.op is not Op.ROUND:
                seconds += elements * DECODED / self.device.memory
            spanned = operand.quantizer is not None and operand.quantizer.exponent_span > 0
            if plan.path is Path.FP8_FOLDED and operand.op is Op.QUANTIZE and spanned:
                seconds += elements * 2 * CODE / self.device.memory
        return seconds

    def _operand(self, layer: LinearPlan, operand: OperandPlan, read: int) -> float:
        """Return the seconds per element to produce one operand."""
        quantizer, kernels, copy = operand.quantizer, self.device.kernels, 1 / self.device.memory
        if quantizer is None or operand.source in (Source.DGRAD_CODES, Source.LIBRARY):
            return 0.0
        if operand.source is Source.FPROP_CODES:
            saved = layer.saved_x if operand.operand is Operand.B and operand.name == "X^T" else layer.saved_w
            ready = saved.transposed if saved is not None else not layer.recomputes_w
            return 0.0 if ready else 2 * CODE * copy
        if operand.op is Op.QUANTIZE_BOTH:  # one op quantises an operand and its transpose; counted with the first
            if operand.transposed and operand.name != "W^T":
                return 0.0
            whole = quantizer.tile == (-1, -1) or (quantizer.tile[0] == 1 and quantizer.tile[1] == -1)
            passes = read if whole and not operand.amax_from else 0
            return (passes + read + 2 * CODE) * copy
        from_norm = operand.name == "X" and layer.saved_x.from_norm and operand.op is Op.QUANTIZE
        if from_norm or operand.op is Op.QUANTIZE_TRANSPOSED:  # the kernel of the norm computes the amax
            return (read + CODE) * copy
        if operand.op is Op.ROTATE_FOLD:
            kind = "ladder" if quantizer.scale is ScaleRule.LADDER else "rotation"
            if kind == "rotation" and operand.rotation is None:
                return (read + CODE) * copy
            codes = operand.name == "X^T" and layer.saved_x.quantizer is not None
            rows = "plain rows" if operand.rotation is None else "rows of a gradient" if operand.codes_from else "rows"
            lines = rows if not operand.transposed else "columns of codes" if codes else "columns"
            return kernels[f"{kind}, {lines}"]
        if operand.op is Op.QUANTIZE_OUTLIERS:
            assert operand.outliers is not None
            return kernels["carrier" if operand.outliers.variant == "carrier" else "outliers"]
        return self._quantizer(operand, read)

    def _quantizer(self, operand: OperandPlan, read: int) -> float:
        """Return the seconds per element of `quantize`, with a separate rotation or transposed copy if its kernel does
        not include it.
        """
        quantizer, kernels, copy = operand.quantizer, self.device.kernels, 1 / self.device.memory
        assert quantizer is not None
        alone = operand.rotation is not None and not rotates(quantizer, operand.cut)
        before = (read + FP32) * copy if alone else 0.0
        before += 2 * read * copy if operand.transposed and not alone else 0.0
        if quantizer.correction is Correction.GROUP:
            return before + kernels["EDEN"]
        if quantizer.scale is ScaleRule.NVFP4:
            if quantizer.candidates is not Candidates.NONE:
                return before + kernels["candidate scales"]
            rotated = "rotated " if operand.rotation is not None else ""
            return before + kernels[f"{rotated}stochastic NVFP4" if quantizer.stochastic else "NVFP4"]
        if quantizer.stochastic:
            return before + kernels["stochastic"]
        if quantizer.tile[0] not in (1, -1):
            return before + kernels["squares"]
        if quantizer.exponent_span:
            return before + kernels["span"]
        amax = read if -1 in quantizer.tile and not operand.amax_from and quantizer.tile[0] == -1 else 0
        wide = FP32 if quantizer.format is E2M1 and operand.transposed else 0
        return before + (amax + read + CODE + wide) * copy

    def _elementwise(self) -> float:
        """Return the seconds of norms with residual sums, rotary embedding, activations, embedding and loss."""
        model, tokens, tp = self.subject.run.model, self.subject.tokens, self.subject.sizes.tp
        moved = 0.0
        for index, how in enumerate(self.recompute):
            layers = {n.rpartition(".")[2]: p for n, p in self.plans.items() if n.startswith(f"blocks.{index}.")}
            up, down = layers.get("gate_up", layers.get("up")), layers["down"]
            assert up is not None
            rotary, wide, inner = layers["qkv"].shape[0], up.shape[0], down.shape[1]
            forward = 2 * 4 * model.dim + 2 * rotary + wide + inner
            backward = 2 * 4 * model.dim + 2 * rotary + 2 * wide + 2 * inner
            repeated = {"norms": 2 * 4 * model.dim, "selective": forward - 2 * rotary, "full": forward}
            moved += forward + backward + repeated.get(how, 0)
        logits = 3 * model.vocab_size
        return tokens * BF16 * (moved + logits + 4 * model.dim) / self.device.memory / tp

    def _attention(self) -> float:
        model = self.subject.laid_out.model
        flops = model.attention_flops_per_token(self.subject.seq_len)
        more = (self.forward_passes - 1) / 3  # a forward pass is a third
        return self.subject.tokens * flops * (1 + more) / self.device.attention / self.subject.sizes.tp


def optimizer(subject: Subject, device: Device) -> float:
    """Return the seconds to read and write parameters and states, and to read gradients twice: for their norm, too.
    Clipping in the backward pass also divides them in place.
    """
    held = sum(math.prod(w.mine(subject.sizes)) for w in subject.weights)
    stored = sum(math.prod(w.mine(subject.sizes)) * subject.stored_size(w) for w in subject.weights)
    kept = states(subject)
    rate = device.adamw["FP32" if kept >= 2 * FP32 * held * 0.9 else "codes"]
    norm = held * FP32 / device.memory  # logged, also if it does not clip
    cast = held * (BF16 + FP32) / device.memory if subject.sizes.dp == 1 else 0.0  # gradients, as autograd makes them
    divided = 2 * norm if subject.run.optim.in_backward and subject.run.max_grad_norm else 0.0
    return (2 * (stored + kept) + held * FP32) / rate + norm + divided + cast


def accumulation(subject: Subject, device: Device) -> float:
    """Return the seconds to read gradients in BF16 and to read and write their FP32 sums; of whole gradients if ranks
    reduce only after the last micro-batch.
    """
    if subject.micro_batches == 1:
        return 0.0
    whole = subject.run.parallel.grad_reduce == "last_microbatch"
    parts = (w.part(subject.sizes.tp) if whole else w.mine(subject.sizes) for w in subject.weights if w.matrix)
    return subject.micro_batches * sum(map(math.prod, parts)) * (BF16 + FP32 + FP32) / device.memory


def _sent(weight: Weight, reduction: Reduction) -> int:
    """Return the bytes per element of a gradient that is sent, without scales."""
    if reduction.codec.exact:
        return FP32
    plain = reduction.codec.sends_bf16 or excluded(weight.name, reduction.exclude)
    return BF16 if plain else CODE


def _sharding(subject: Subject, reduction: Reduction, device: Device) -> Seconds:
    """Return the seconds to round shards in every step, to copy weights that are gathered as stored in every
    micro-batch, and to encode, decode and sum gradients at every reduction.
    """
    if subject.sizes.dp == 1:
        return {}
    matrices = [w for w in subject.weights if w.matrix]
    mine = sum(math.prod(w.mine(subject.sizes)) for w in matrices)
    copied = [w for w in matrices if subject.gather_format(w) is None]  # FSDP2's own all-gather
    gathered = sum((2 if subject.gathered_twice(w) else 1) * subject.gathered_bytes(w) for w in copied)
    sums = subject.micro_batches if subject.run.parallel.grad_reduce == "every_microbatch" else 1
    tp, codec, encoded = subject.sizes.tp, reduction.codec, 0
    for unit in units(matrices, subject.run.parallel.blocks_per_unit).values():
        copied_too = not sent_unchanged(subject, reduction, unit)
        for weight in unit:
            sent = _sent(weight, reduction)
            copy = subject.gradient_size(weight, codec) + sent if copied_too else 0
            encoded += math.prod(weight.part(tp)) * (copy + sent)
    rounded = sum(math.prod(w.mine(subject.sizes)) for w in matrices if subject.rounded_bytes(w))
    moved = rounded * (FP32 + BF16) + subject.micro_batches * 2 * gathered + sums * (encoded + mine * FP32)
    return {"sharding": moved / device.sharding}


def communication(subject: Subject, reduction: Reduction, device: Device, busy: float) -> float:
    """Return the seconds of exposed communication. busy: seconds of kernels."""
    sent, nic = traffic(subject, reduction), between_nodes(subject, reduction)
    if not sent:
        return 0.0

    def seconds(what: str) -> float:
        outside = nic.get(what, 0)
        return (sent[what] - outside) / device.nvlink + outside / device.nic

    alone = sum(seconds(what) for what in sent if what.startswith("tensor") or what == "gradients of vectors")
    beside = {what: seconds(what) for what in sent if what.startswith(("parameters", "gradients s", "gradients b"))}
    total = sum(beside.values())
    return alone + max(total - busy, total / unit_count(subject))


def unit_count(subject: Subject) -> int:
    """Return the number of FSDP2's units."""
    return len(units((w for w in subject.weights if w.matrix), subject.run.parallel.blocks_per_unit))


def host_link(subject: Subject, device: Device, times: Seconds) -> float:
    """Return the seconds that the GPU waits for offloaded states and block inputs."""
    crossing = offload.states_on_host(subject) / device.pcie
    inputs = offload.link_bytes(subject) / device.pcie - crossing
    passes = sum(seconds for what, seconds in times.items() if what in PASSES)
    again = subject.recompute.count("full") / subject.run.model.layers
    backward = passes * (2 + again) / (3 + again)
    if subject.run.optim.in_backward:
        return max(0.0, crossing + inputs - backward - times["optimizer"])
    return max(0.0, inputs - backward) + max(0.0, crossing - times["optimizer"])
