"""The model of one rank on the meta device, for estimates. The functions that build a run also build it.

Tensor-parallel layers are sharded as in a run, over a group without processes; shards of `fully_shard` are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lowprec_train.comm.grad_codec import GradCodec
from lowprec_train.config import Compile, ParallelConfig, RunConfig
from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.ops.codecs import StateCodecs
from lowprec_train.optim.codecs import Codecs
from lowprec_train.parallel import tensor
from lowprec_train.parallel.all_gather_format import AllGatherFormat, all_gather_format
from lowprec_train.parallel.data import grad_dtype
from lowprec_train.parallel.mesh import Sizes, check_nodes, sizes
from lowprec_train.precision import policy
from lowprec_train.precision.all_gathered_weight import AllGatheredWeight
from lowprec_train.precision.linear import Linear
from lowprec_train.precision.recipe import LinearRecipe
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.tools.estimate.meta_group import MetaGroup
from lowprec_train.train import build, build_optimizer, checks, ranges
from lowprec_train.train.describe import MetaModel, Plans
from lowprec_train.train.weights import architecture

META = torch.device("meta")
FP32, BF16 = 4, 2
DTYPES = {FP32: torch.float32, BF16: torch.bfloat16}  # of parameters, by bytes
MOST_GPUS = 1 << 20  # the ranks of every group are listed


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter. shape: unsharded. cut: the dimension that is sharded over tp, or None. indexed: an embedding,
    whose states stay FP32. forward_only: an embedding that the head does not share; its backward pass needs no weight.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    indexed: bool = False
    forward_only: bool = False

    @property
    def matrix(self) -> bool:
        """True for a matrix, which FSDP2 shards and codecs store. Vectors are replicated and FP32."""
        return len(self.shape) >= 2

    @property
    def unit(self) -> str:
        """The unit that is all-gathered together: "blocks.3", "head", "embedding", or "" for the rest of the model."""
        parts = self.name.split(".")
        if parts[0] == "blocks":
            return ".".join(parts[:2])
        return "embedding" if self.forward_only else "head" if parts[0] == "head" else ""

    def part(self, tp: int) -> tuple[int, ...]:
        """Return the shape of a tensor-parallel shard."""
        return tuple(size // tp if dim == self.cut else size for dim, size in enumerate(self.shape))

    def mine(self, over: Sizes) -> tuple[int, ...]:
        """Return the shape of the shard on the first ranks, which is the largest."""
        rows, *rest = self.part(over.tp)
        return (-(-rows // over.dp_shard) if self.matrix else rows, *rest)


def grid(parallel: ParallelConfig, gpus: int | None) -> Sizes:
    """Return the number of processes along each axis. Without a number of GPUs, dp_shard=-1 means 1. Raises ValueError
    for a grid that does not fit the GPUs, and for more than `MOST_GPUS`.
    """
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"--gpus {gpus} must be at least 1 and at most {MOST_GPUS:,}")
    axes = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard, "tp": parallel.tp}
    if gpus is None:
        axes["dp_shard"] = 1 if parallel.dp_shard == -1 else parallel.dp_shard
    made = sizes(math.prod(axes.values()) if gpus is None else gpus, **axes)
    if made.processes > MOST_GPUS:
        settings = ", ".join(f"parallel.{axis}={size}" for axis, size in axes.items())
        raise ValueError(f"{settings} need {made.processes:,} GPUs, and an estimate is of at most {MOST_GPUS:,}")
    return made


def key(override: str) -> str:
    """Return the key of an override: `optim` of `optim=adamw`, `optim.lr` of `++optim.lr=1`."""
    return override.partition("=")[0].lstrip("+~")


def check_step(run: RunConfig, overrides: Sequence[str], gpus: int | None = None) -> str:
    """Return why the run's step is not a whole number of micro-batches; "" if it is. So layouts can be tried without a
    number of tokens. Raises ValueError, as a run does, if an override sets tokens_per_step.
    """
    ranges.check(run)
    over = grid(run.parallel, gpus)
    if any(key(override) == "tokens_per_step" for override in overrides):
        checks.batch(run, over)
    checks.sequence(run)
    return checks.uneven_step(run, over)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run on a number of GPUs, in one phase of its precision schedule. Raises ValueError, with the numbers, for a
    layout that does not fit.
    """

    run: RunConfig
    gpus: int | None = None
    phase: int = 0
    group: MetaGroup = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", MetaGroup(self.sizes.tp))
        checks.choices(self.run.parallel)
        check_nodes(self.sizes, self.run.comm.get("node_size"))
        checks.sequence(self.run)
        chosen = build.choices(self.run, self.laid_out)
        chosen.check_memory(self.sizes, on_gpu=True)
        chosen.check_graph()

    @cached_property
    def sizes(self) -> Sizes:
        """Number of processes along each axis."""
        return grid(self.run.parallel, self.gpus)

    @property
    def seq_len(self) -> int:
        return self.run.data["seq_len"]

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch."""
        return self.run.micro_batch * self.seq_len

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step on each rank."""
        return self.run.micro_batches(self.sizes.dp)

    @property
    def compiled(self) -> bool:
        return self.run.compile is not Compile.off

    @cached_property
    def _codecs(self) -> Codecs:
        return build_optimizer.codecs(self.run)

    @cached_property
    def laid_out(self) -> MetaModel:
        """The unsharded model on the meta device, with its recipes. Raises ValueError if a library computes a part of
        it: what a library saves is not known.
        """
        if self.run.model.norm_backend != "own":
            raise ValueError(
                f"model.norm_backend={self.run.model.norm_backend} computes the norms, and the memory that it saves is "
                "not known; use model.norm_backend=own"
            )
        laid_out = build.layout(self.run)
        for backend in filter(None, (phase.backend for phase in laid_out.phases)):
            raise ValueError(f"{backend} runs the linear layers, and the memory that it saves is not known")
        return laid_out

    @property
    def recipes(self) -> Mapping[str, LinearRecipe]:
        """The recipe of each linear layer in the phase."""
        return self.laid_out.phases[self.phase].recipes

    @cached_property
    def plans(self) -> Plans:
        """The plan of each linear layer of the unsharded model in the phase."""
        return self.laid_out.plans(META)[self.phase]

    @cached_property
    def recompute(self) -> tuple[str, ...]:
        """What each block recomputes: "none", "norms", "selective" or "full"."""
        return architecture(self.run.model).recompute_by_block

    def model(self, recompute: str | None = None) -> Transformer:
        """Return one rank's model, with the recipes of the phase, draws, and all-gathered weights.

        recompute: of all blocks, instead of the run's choice.
        """
        made, _ = self._cut(recompute)
        named = dict(made.named_parameters())
        for weight in self.weights:
            named[weight.name].data = named[weight.name].data.to(DTYPES[self.value_size(weight)])
            format = self.gather_format(weight)
            if format is not None:
                linear = made.get_submodule(weight.name.removesuffix(".weight"))
                assert isinstance(linear, Linear)
                linear.gathered = all_gathered(linear, format)
        return made

    def loss(self, model: Transformer, batch: int) -> Tensor:
        """Run the forward pass and the loss on `batch` sequences on the meta device."""
        tokens = torch.empty(batch, self.seq_len, dtype=torch.int64, device=META)
        return model.loss(tokens, tokens, 1.0, tokens if self.run.data.get("document_mask") else None)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters, in the model's order."""
        _, cuts = self._cut(None)
        whole = self.laid_out.model
        indexed = {f"{name}.weight" for name, module in whole.named_modules() if isinstance(module, nn.Embedding)}
        named = dict(whole.named_parameters())
        alone = {"embedding.weight"} if "head.weight" in named else set()
        return tuple(
            Weight(
                name=name,
                shape=tuple(p.shape),
                cut=cuts.get(name),
                indexed=name in indexed,
                forward_only=name in alone,
            )
            for name, p in named.items()
        )

    def codecs_of(self, weight: Weight) -> StateCodecs:
        """Return the codecs of a weight and its moments."""
        rule, adamw = build_optimizer.rules(self.run)
        inside = weight.matrix and not weight.indexed and weight.unit != "head"
        taken = adamw if rule.hidden_matrices_only and not inside else rule
        return self._codecs.of(taken, matrix=weight.matrix, indexed=weight.indexed)

    def value_size(self, weight: Weight) -> int:
        """Return the bytes per element of a parameter in computation, and of its gradient from autograd."""
        return self.codecs_of(weight).master.parameter_dtype.itemsize

    def gradient_size(self, weight: Weight, codec: GradCodec) -> int:
        """Return the bytes per element of a gradient from autograd: BF16 of a BF16 GEMM, or if it suffices for what
        `codec` sends (`data.grad_dtype`), else that of the parameter.
        """
        recipe = self.recipes.get(weight.name.removesuffix(".weight"))
        if recipe is None or self.gather_format(weight) is None:
            return self.value_size(weight)
        reduced = self.run.parallel.grad_reduce
        dtype = grad_dtype(codec, grad_reduce=reduced, micro_batches=self.micro_batches)
        return BF16 if recipe.takes_values or dtype is not None else self.value_size(weight)

    def stored_size(self, weight: Weight) -> int:
        """Return the bytes per element of a stored parameter: that of its values, but for sharded embeddings FP32."""
        of_root = not weight.unit.startswith("blocks.") and weight.unit != "head"
        return FP32 if self.sizes.dp > 1 and of_root else self.value_size(weight)

    def rounded_bytes(self, weight: Weight) -> int:
        """Return the bytes of this rank's shard as it waits for all-gathers; 0 if it is sent as it is stored."""
        format = self.gather_format(weight)
        if format is None:
            return 0
        as_stored = format.quantizer is None and format.dtype.itemsize == self.stored_size(weight)
        return 0 if as_stored and format.rows == weight.mine(self.sizes)[0] else format.bytes

    def gather_format(self, weight: Weight) -> AllGatherFormat | None:
        """Return the all-gather format of a linear layer's weight; None if it is gathered as it is stored."""
        recipe = self.recipes.get(weight.name.removesuffix(".weight"))
        gather = self.run.parallel.param_all_gather if self.sizes.dp > 1 else "fp32"
        rows, columns = (*weight.part(self.sizes.tp), 1)[:2]
        found = all_gather_format(
            recipe, (rows, columns), shards=self.sizes.dp_shard, param_all_gather=gather, split=weight.cut
        )
        return None if gather == "fp32" or recipe is None or not weight.matrix else found

    def gathered_twice(self, weight: Weight) -> bool:
        """Return whether a weight is gathered again for the backward pass."""
        return self.run.parallel.reshard_after_forward and weight.unit.startswith("blocks.")

    def sent_bytes(self, weight: Weight) -> int:
        """Return the bytes that this rank sends to each other rank in the all-gather of a weight."""
        format = self.gather_format(weight)
        return self.value_size(weight) * math.prod(weight.mine(self.sizes)) if format is None else format.bytes

    def gathered_bytes(self, weight: Weight) -> int:
        """Return the bytes of an all-gathered weight (a tensor-parallel shard); E2M1 codes are also stored unpacked."""
        format, elements = self.gather_format(weight), math.prod(weight.part(self.sizes.tp))
        if format is None:
            return self.value_size(weight) * elements
        return self.sizes.dp_shard * format.bytes + (elements if format.packed else 0)

    def _cut(self, recompute: str | None) -> tuple[Transformer, dict[str, int]]:
        alone = replace(self.run.model, offload=False)
        if recompute is not None:
            alone = replace(alone, recompute=recompute, recompute_layers=None, full_recompute_layers=0)
        laid_out = build.layout(replace(self.run, model=alone))
        model, cuts = laid_out.model, {}
        if self.sizes.tp > 1:
            recipes = [phase.recipes for phase in laid_out.phases]
            tensor.check(model, self.sizes.tp, tokens=self.tokens, recipes=recipes)
            cuts = dict(tensor.apply(model, self.group))
        PrecisionSchedule(laid_out.phases).begin(model, laid_out.phases[self.phase].first_step)
        policy.attach_draws(model, SeedTable(0, policy.count_linears(model), META).at(0, 0))
        return model, cuts

    def kinds(self) -> list[int]:
        """Return, for each block, the index of the first block with equal plans."""
        plans = self.plans
        seen: dict[tuple[object, ...], int] = {}
        blocks = (f"blocks.{index}." for index in range(len(self.laid_out.model.blocks)))
        alike = (tuple(plan for name, plan in plans.items() if name.startswith(block)) for block in blocks)
        return [seen.setdefault(plan, index) for index, plan in enumerate(alike)]


def all_gathered(linear: Linear, format: AllGatherFormat) -> AllGatheredWeight:
    """Return the weight that `parallel.quantized_all_gather` gives to a layer, on the meta device."""
    shape = linear.weight.shape
    leaf = torch.zeros((), dtype=linear.weight.dtype, device=META).expand(shape).requires_grad_()
    values = torch.empty(shape, dtype=format.dtype, device=META, requires_grad=linear.recipe.takes_values)
    if format.quantizer is None:
        return AllGatheredWeight(leaf=leaf, coded=False, tensors=(values,))
    codes = format.quantizer(values)
    return AllGatheredWeight(leaf=leaf, coded=True, tensors=(codes.codes, *(codes.parts.values() or (codes.scale,))))
