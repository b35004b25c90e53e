"""What is estimated: one rank's part of a run's model on the meta device, made by the functions that make a run's own.

Tensor-parallel layers are cut as in a run, with ranks that only have shapes; what `fully_shard` cuts is arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lowprec_train.config import Compile, ParallelConfig, RunConfig
from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.ops.codecs import StateCodecs
from lowprec_train.optim.codecs import Codecs
from lowprec_train.parallel import tensor
from lowprec_train.parallel.all_gather_format import AllGatherFormat, all_gather_format
from lowprec_train.parallel.mesh import Sizes, sizes
from lowprec_train.precision import policy
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.tools.estimate.meta_group import MetaGroup
from lowprec_train.train import build, build_optimizer, checks
from lowprec_train.train.describe import MetaModel

META = torch.device("meta")
FP32 = 4
DTYPES = {FP32: torch.float32, 2: torch.bfloat16}  # of parameters, by bytes


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter. shape: of the whole; cut: the dimension that is cut over tp, or None; indexed: an embedding, which
    the optimizer leaves in FP32.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    indexed: bool = False

    @property
    def matrix(self) -> bool:
        """Whether it is sharded and coded; vectors are whole on every rank and FP32."""
        return len(self.shape) >= 2

    @property
    def unit(self) -> str:
        """What is gathered with it: "blocks.3", "head", or "" with the rest of the model."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if parts[0] == "blocks" else "head" if parts[0] == "head" else ""

    def part(self, tp: int) -> tuple[int, ...]:
        """Shape of a tensor-parallel part."""
        return tuple(size // tp if dim == self.cut else size for dim, size in enumerate(self.shape))

    def mine(self, over: Sizes) -> tuple[int, ...]:
        """Shape of the part on the first ranks, the largest."""
        rows, *rest = self.part(over.tp)
        return (-(-rows // over.dp_shard) if self.matrix else rows, *rest)


def grid(asked: ParallelConfig, gpus: int | None) -> Sizes:
    """Processes along each axis; without a number of GPUs a dp_shard of -1 is 1."""
    axes = {"dp_replicate": asked.dp_replicate, "dp_shard": asked.dp_shard, "tp": asked.tp}
    if gpus is None:
        axes["dp_shard"] = 1 if asked.dp_shard == -1 else asked.dp_shard
    return sizes(math.prod(axes.values()) if gpus is None else gpus, **axes)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run on a number of GPUs. Raises ValueError for a layout that does not fit it, with the numbers."""

    run: RunConfig
    gpus: int | None = None
    group: MetaGroup = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", MetaGroup(self.sizes.tp))
        checks.choices(self.run.parallel)
        checks.sequence(self.run)
        build.choices(self.run, self.laid_out).check_memory(self.sizes, on_gpu=True)

    @cached_property
    def sizes(self) -> Sizes:
        """Processes along each axis."""
        return grid(self.run.parallel, self.gpus)

    @property
    def seq_len(self) -> int:
        length: int = self.run.data["seq_len"]
        return length

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.run.micro_batch * self.seq_len

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank."""
        return max(1, -(-self.run.tokens_per_step // (self.tokens * self.sizes.dp)))

    @property
    def compiled(self) -> bool:
        return self.run.compile is not Compile.off

    @cached_property
    def _codecs(self) -> Codecs:
        return build_optimizer.codecs(self.run)

    @cached_property
    def laid_out(self) -> MetaModel:
        """The whole model on the meta device, with its recipes. Raises ValueError where a library computes a part of
        it: what that saves is not known.
        """
        if self.run.model.norm_backend != "own":
            raise ValueError(
                f"model.norm_backend={self.run.model.norm_backend} computes the norms, and what it keeps in memory is "
                "not known here; model.norm_backend=own is"
            )
        laid_out = build.layout(self.run)
        for backend in filter(None, (phase.backend for phase in laid_out.phases)):
            raise ValueError(f"{backend} runs the linear layers, and what it keeps in memory is not known here")
        return laid_out

    def model(self, recompute: str | None = None) -> Transformer:
        """One rank's part, with recipes of the first step, draws, and weights as they are gathered.

        recompute: instead of the run's choice.
        """
        made, _ = self._cut(recompute)
        named = dict(made.named_parameters())
        for weight in self.weights:
            named[weight.name].data = named[weight.name].data.to(DTYPES[self.value_size(weight)])
            way = self.way(weight)
            if way is not None:
                linear = made.get_submodule(weight.name.removesuffix(".weight"))
                assert isinstance(linear, Linear)
                linear.gathered = arrived(linear, way)
        return made

    def loss(self, model: Transformer, batch: int) -> Tensor:
        """The forward pass and its loss on `batch` sequences without memory."""
        tokens = torch.empty(batch, self.seq_len, dtype=torch.int64, device=META)
        return model.loss(tokens, tokens, 1.0, tokens if self.run.data.get("document_mask") else None)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters, in the model's order."""
        _, cuts = self._cut(None)
        whole = self.laid_out.model
        indexed = {f"{name}.weight" for name, module in whole.named_modules() if isinstance(module, nn.Embedding)}
        return tuple(
            Weight(name=name, shape=tuple(p.shape), cut=cuts.get(name), indexed=name in indexed)
            for name, p in whole.named_parameters()
        )

    def codecs_of(self, weight: Weight) -> StateCodecs:
        """What stores a weight and its moments."""
        rule, adamw = build_optimizer.rules(self.run)
        inside = weight.matrix and not weight.indexed and weight.unit != "head"
        taken = adamw if rule.hidden_matrices_only and not inside else rule
        return self._codecs.of(taken, matrix=weight.matrix, indexed=weight.indexed)

    def value_size(self, weight: Weight) -> int:
        """Bytes of an element of the parameter as it is computed with, and of its gradient as autograd makes it."""
        return self.codecs_of(weight).master.parameter_dtype.itemsize

    def stored_size(self, weight: Weight) -> int:
        """Bytes of an element of the parameter as it is held: `fully_shard` keeps FP32, whatever its values are."""
        return FP32 if self.sizes.dp > 1 else self.value_size(weight)

    def way(self, weight: Weight) -> AllGatherFormat | None:
        """How a linear layer's weight is gathered; None for what comes as it is stored."""
        recipe = self.laid_out.phases[0].recipes.get(weight.name.removesuffix(".weight"))
        gather = self.run.parallel.param_all_gather if self.sizes.dp > 1 else "fp32"
        rows, columns = (*weight.part(self.sizes.tp), 1)[:2]
        found = all_gather_format(
            recipe, (rows, columns), shards=self.sizes.dp_shard, param_all_gather=gather, split=weight.cut
        )
        return None if gather == "fp32" or recipe is None or not weight.matrix else found

    def sent_bytes(self, weight: Weight) -> int:
        """What this rank sends to each of the others when a weight is gathered."""
        way = self.way(weight)
        return self.value_size(weight) * math.prod(weight.mine(self.sizes)) if way is None else way.bytes

    def gathered_bytes(self, weight: Weight) -> int:
        """Of a tensor-parallel part when it is there to be computed with; E2M1 codes are unpacked beside what came."""
        way, elements = self.way(weight), math.prod(weight.part(self.sizes.tp))
        if way is None:
            return self.value_size(weight) * elements
        return self.sizes.dp_shard * way.bytes + (elements if way.packed else 0)

    def _cut(self, recompute: str | None) -> tuple[Transformer, dict[str, int]]:
        chosen = self.run.model.recompute if recompute is None else recompute
        alone = replace(self.run.model, recompute=chosen, offload=False)
        laid_out = build.layout(replace(self.run, model=alone))
        model, cuts = laid_out.model, {}
        if self.sizes.tp > 1:
            recipes = [phase.recipes for phase in laid_out.phases]
            tensor.check(model, self.sizes.tp, tokens=self.tokens, recipes=recipes)
            cuts = dict(tensor.apply(model, self.group))
        PrecisionSchedule(laid_out.phases).begin(model, 0)
        policy.attach_draws(model, SeedTable(0, policy.count_linears(model), META).at(0, 0))
        return model, cuts

    def kinds(self) -> list[int]:
        """For each block, the first one that computes and saves as it does."""
        plans = self.laid_out.plans(META)[0]
        seen: dict[tuple[object, ...], int] = {}
        blocks = (f"blocks.{index}." for index in range(len(self.laid_out.model.blocks)))
        alike = (tuple(plan for name, plan in plans.items() if name.startswith(block)) for block in blocks)
        return [seen.setdefault(plan, index) for index, plan in enumerate(alike)]


def arrived(linear: Linear, way: AllGatherFormat) -> AllGatheredWeight:
    """What `parallel.quantized_all_gather` gives to a layer, without memory."""
    shape = linear.weight.shape
    leaf = torch.zeros((), dtype=linear.weight.dtype, device=META).expand(shape).requires_grad_()
    values = torch.empty(shape, dtype=way.dtype, device=META, requires_grad=linear.recipe.takes_values)
    if way.quantizer is None:
        return AllGatheredWeight(leaf=leaf, coded=False, tensors=(values,))
    codes = way.quantizer(values)
    return AllGatheredWeight(leaf=leaf, coded=True, tensors=(codes.codes, *(codes.parts.values() or (codes.scale,))))
