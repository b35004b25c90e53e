"""Short runs that gather weights in each form, and what every rank sees:

{(case, form): {"loss": [...], "valid": [...], "gradients": ..., ...}}
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
import torch._dynamo
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lowprec_train.comm.process_group import all_gather_each
from lowprec_train.config import RunConfig
from lowprec_train.parallel import in_place_all_gather
from lowprec_train.parallel.mesh import Sizes
from lowprec_train.train.launch import World
from tests.distributed import run_distributed
from tests.groups import Recorded
from tests.parallel.runs import LATER, LAYOUTS, MICRO, SEQ, VOCAB, built
from tests.recipes import BY_NIGHT, SYSTEMS, composed

FORMS = ("fp32", "bf16", "quantized")  # "auto" is one of the last two
STEPS = 3
TINY = ("model=llama_tiny", "model.layers=2", f"model.max_seq_len={SEQ}", f"data.seq_len={SEQ}", "eval_batches=2")
TINY += (f"micro_batch={MICRO}", f"steps={STEPS}", f"model.vocab_size={VOCAB}", "comm=fp32", "max_grad_norm=0")
CASES = {name: (f"+recipe={name}", *([LATER] if name == "fp4_mixed" else [])) for name in SYSTEMS}
VARIANTS = {
    "straight": ("+recipe=fp4", "precision.override.estimator=null"),
    "residual": ("+recipe=fp4", "precision.override.fprop.outliers.variant=residual"),
    "fp8 gpt": ("+recipe=fp8", "model=gpt_tiny"),
    "int8 gpt": ("+recipe=int8_switchback", "model=gpt_tiny"),
    "zero2": ("+recipe=fp4_mixed", LATER, "parallel.reshard_after_forward=false"),
    "each": ("+recipe=fp8", "parallel.grad_reduce=every_microbatch"),
    "pairs": ("+recipe=fp8", "parallel.blocks_per_unit=2", "model.recompute=selective"),
    "each fp4": ("+recipe=fp4", "parallel.grad_reduce=every_microbatch"),
    "full": ("+recipe=nvfp4", "model.recompute=full"),
    "selective": ("+recipe=fp8", "model.recompute=selective"),
    "uneven": ("+recipe=fp8", f"model.vocab_size={VOCAB + 1}"),
    "watched": ("+recipe=fp8", "telemetry_interval=2"),
    "replicated": ("+recipe=fp8",),
}
CASES |= VARIANTS
CASES |= {"compiled": ("+recipe=fp8",), "compiled fp4": ("+recipe=fp4",)}
ESTIMATED = ("fp4", "each fp4", "compiled fp4")  # codes go with a slope that is applied to the sum
PARTS = ("fp8", "fp4", "nvfp4")
NIGHT = (
    "mxfp8",  # these two in BF16, as mxfp4 by day
    "fp4_fold",
    "coat",  # as fp8 by day
    "mxfp4_fp8",
    "fp8_lm",
    "residual",
    "fp8 gpt",
    "int8 gpt",
    "each fp4",
    "full",
    "selective",
    "replicated",
    "compiled",
    "compiled fp4",
    *BY_NIGHT,
)
AT = {"dp2": tuple(case for case in CASES if case not in NIGHT), "dp2-tp2": PARTS, "dp2 night": NIGHT}


class Spy:
    """All-gathers, FSDP2's and those in place, counted: bytes that a rank puts in, by dtype."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.bytes: dict[torch.dtype, int] = {}
        in_place_all_gather.all_gather_each = self.gather_each
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None and not isinstance(group._all_gather_comm, in_place_all_gather.UnitAllGather):
                unit.set_custom_all_gather(self)

    def gather_each(self, pairs, group):
        for _, shard in pairs:
            self._count(shard)
        all_gather_each(pairs, group)

    def _count(self, x):
        self.bytes[x.dtype] = self.bytes.get(x.dtype, 0) + x.nbytes

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self._count(input_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def described(case: str, gather: str, sizes: Sizes) -> RunConfig:
    """Of a case and the form in which its weights are gathered."""
    sizes = Sizes(dp_replicate=2) if case == "replicated" else sizes
    grid = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp, "param_all_gather": gather}
    layout = [f"parallel.{key}={value}" for key, value in grid.items()]
    tokens = f"tokens_per_step={2 * MICRO * SEQ * sizes.dp}"
    return composed(*TINY, *CASES[case], tokens, *layout)


def trained(case: str, run: RunConfig, world: World) -> dict:
    """STEPS steps of two micro-batches, an evaluation after each but the first."""
    trainer = built(run, world, torch.bfloat16)
    if case.startswith("compiled"):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        trainer.model.compile_blocks(backend="aot_eager")
    seen = Seen(trainer)
    for step in range(STEPS):
        with saved_tensors_hooks(seen.keep, lambda x: x):
            seen.loss.append(float(trainer.step()["train/loss"]))
        if step:
            seen.valid.append(trainer.evaluate()["valid/loss"])
    rows = {(row["site"], row["gemm"], row["operand"]) for row in trainer.telemetry.read(2) if "site" in row}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return vars(seen) | {"rows": rows, "graphs": graphs}


class Seen:
    """What is kept of a run."""

    def __init__(self, trainer) -> None:
        self.loss: list[float] = []
        self.valid: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.dtypes: set[torch.dtype] = set()
        self.sent: list[dict[torch.dtype, int]] = []
        self.agreements: list[tuple] = []
        self.saved: set[tuple[torch.dtype, torch.Size]] = set()  # by autograd
        self.first = {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}
        spy, step = Spy(trainer.model), trainer.optimizer.step

        def watched(**given):
            parameters = dict(trainer.model.named_parameters())
            self.gradients.append({name: whole(p.grad) for name, p in parameters.items()})
            self.dtypes |= {p.grad.dtype for p in parameters.values()}
            self.sent.append(dict(spy.bytes))
            spy.bytes.clear()
            step(**given)

        trainer.optimizer.step = watched
        gathering = trainer.data_parallel._all_gather
        self.wires = {} if gathering is None else {name: each.bytes for name, each in gathering.formats().items()}
        self.gathered = trainer.data_parallel.all_gather_formats()
        self.given: dict[str, torch.dtype] = {}
        self.rounded: dict[str, int] = {}  # how often a weight's shard was rounded to what is sent
        for name, weight in {} if gathering is None else gathering.weights.items():
            coded = gathering.formats()[name].quantizer is not None
            self.rounded[name] = 0
            self._count(name, weight, "round", lambda *given, coded=coded: not coded or given[-1] is not None)
            self._count(name, weight, "_codes", lambda *_: True)
            self._watch(name, weight)
        if gathering is not None:
            gathering._groups = {name: Recorded(group, self.agreements) for name, group in gathering._groups.items()}

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        self.saved.add((x.dtype, x.shape))
        return x

    def _watch(self, name: str, weight) -> None:
        """The dtype in which FSDP2 is given the gradient."""
        original = weight._accumulate_grad

        def watched(_, leaf):
            original(leaf)
            if weight.linear.weight.grad is not None:
                self.given[name] = weight.linear.weight.grad.dtype

        weight._accumulate_grad = MethodType(watched, weight)

    def _count(self, name: str, weight, method: str, rounds: Callable[..., bool]) -> None:
        """Count calls in which the shard is rounded. `round` gets codes if all weights were quantised together."""
        original = getattr(weight, method)

        def counted(*given):
            self.rounded[name] += rounds(*given)
            return original(*given)

        setattr(weight, method, counted)


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def sizes_of(layout: str) -> Sizes:
    return LAYOUTS[layout.removesuffix(" night")]


def work(rank: int, runs: dict[tuple[str, str], RunConfig], processes: int) -> dict[tuple[str, str], dict]:
    world = World(rank, processes, rank)
    return {(case, form): trained(case, run, world) for (case, form), run in runs.items()}


def launched(layout: str) -> list[dict[tuple[str, str], dict]]:
    """What each rank saw."""
    sizes = sizes_of(layout)
    runs = {(case, form): described(case, form, sizes) for case in AT[layout] for form in FORMS}
    return run_distributed(work, sizes, runs, sizes.processes, timeout=900)
