"""Checkpoints of every optimizer's state, written at one layout of processes and read at another.

The layouts follow each other, each in processes of its own; each reads what earlier ones wrote and writes for later
ones. What every tensor should be is known from one process that has the whole, and each rank cuts its own part of it
here, by torch.chunk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lowprec_train import config
from lowprec_train.comm.process_group import DistributedGroup, GroupProduct
from lowprec_train.config import RunConfig
from lowprec_train.group import Group
from lowprec_train.optim.optimizer import CodedOptimizer, parameter_groups
from lowprec_train.parallel.mesh import Mesh, Sizes
from lowprec_train.parallel.placement import Placed, Placements
from lowprec_train.train import build_optimizer
from lowprec_train.train.checkpoint import Checkpointer, ModelState, OptimizerState
from tests.distributed import run_distributed
from tests.recipes import composed

Runs = dict[str, RunConfig]  # of every case
STEP = 7
CASES = {name: (f"optim={name}",) for name in config.choices("optim")}
CASES["muon e4m3"] = ("optim=muon", "optim/moment@optim.first_moment=e4m3")
CASES["coat and bf16"] = ("optim=adamw_coat", "optim/master=bf16", "optim/moment@optim.first_moment=e5m2_expanded")
LAYOUTS = {
    "2x2": Sizes(dp_shard=2, tp=2),
    "replicated": Sizes(dp_replicate=2, dp_shard=2),
    "3x2": Sizes(dp_shard=3, tp=2),
    "4x1": Sizes(dp_shard=4),
    "1x4": Sizes(tp=4),
    "2x1": Sizes(dp_shard=2),
}
READS = {
    "2x2": ("alone",),
    "replicated": ("2x2",),
    "3x2": ("2x2",),
    "4x1": ("2x2", "alone"),
    "1x4": ("2x2", "3x2", "alone"),
    "2x1": ("2x2", "replicated"),
    "alone": ("2x2", "replicated", "3x2"),
}
WRITERS = ("2x2", "replicated", "3x2")
# Dimension that is cut over tp. Rows of 8 segments of 43 or 172 columns have groups of their own in each; 6, 3 and 1
# rows leave ranks with fewer or none, and the 4 of a tensor-parallel part too over 3 ranks.
TP = {
    "embedding.weight": 0,
    "column.weight": 0,
    "column.bias": 0,
    "row.weight": 1,
    "row.bias": None,
    "short.weight": None,
    "thin.weight": None,
    "norm.weight": None,
}


class Net(nn.Module):
    """One of each kind of parameter, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.column = nn.Linear(344, 8)
        self.row = nn.Linear(1376, 6)
        self.short = nn.Linear(8, 3, bias=False)
        self.thin = nn.Linear(5, 1, bias=False)
        self.norm = nn.LayerNorm(16, bias=False)
        self.register_buffer("counter", torch.tensor([3, 4]))


class Scalars:
    """What is no tensor, and a counter. Only rank 0 has something to remember."""

    def __init__(self, step: int, remembered: str, skipped: int) -> None:
        self.step, self.remembered, self.skipped = step, remembered, torch.tensor(skipped)

    def state_dict(self) -> dict:
        return {"step": self.step, "remembered": json.dumps(self.remembered), "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.remembered = state["step"], json.loads(state["remembered"])


@dataclass
class Whole:
    """A model and its optimizer on one process."""

    run: RunConfig
    net: Net
    optimizer: CodedOptimizer
    scalars: Scalars

    @property
    def parts(self) -> dict:
        return {
            "model": ModelState(self.net),
            "optimizer": OptimizerState(self.net, self.optimizer),
            "scalars": self.scalars,
        }


@dataclass
class Cut:
    """One rank's parts of a model and of its optimizer's state. `optimizer` stands for an AdamW of such parts."""

    model: nn.Module
    placements: Placements
    twins: CodedOptimizer
    scalars: Scalars
    state: dict[nn.Parameter, dict[str, Tensor]] = field(default_factory=dict)
    twin: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def synchronize(self) -> None:
        """Nothing of it is on its way from a GPU."""

    def value_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.twins.value_dtype(self.twin[parameter])

    def along(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return self.twins.along(self.twin[parameter], shape)

    @property
    def parts(self) -> dict:
        return {
            "model": ModelState(self.model, self.placements, self),
            "optimizer": OptimizerState(self.model, self, self.placements),
            "scalars": self.scalars,
        }


def whole(run: RunConfig, *, steps: int = 2) -> Whole:
    """A model after `steps` updates; with 0 of them, of other first weights too."""
    torch.manual_seed(steps)
    net = Net()
    groups = parameter_groups(net, 0.1, *build_optimizer.rules(run))
    optimizer = CodedOptimizer(groups, codecs=build_optimizer.codecs(run), lr=0.1, seed=5)
    for _ in range(steps):
        for parameter in net.parameters():
            magnitudes = torch.logspace(-3, 1, parameter.numel())[torch.randperm(parameter.numel())]
            parameter.grad = (torch.randn(parameter.shape) * magnitudes.view(parameter.shape)).float()
        optimizer.step()
    return Whole(run, net, optimizer, Scalars(STEP, "of rank 0", 9) if steps else Scalars(0, "", 0))


def is_cut(case: str, key: str) -> bool:
    """Whether a state tensor is cut like its parameter: codes are, and of the rest only numbers of groups."""
    return key in ("exp_avg", "exp_avg_sq", "master", "momentum") or (key.startswith("exp_avg") and "coat" in case)


def is_matrix(name: str) -> bool:
    return name.endswith(".weight") and name != "norm.weight"


def is_sharded(mesh: Mesh, shape: tuple[int, ...]) -> bool:
    """Whether FSDP2 has a parameter. It keeps FP32, also of one whose values are rounded to BF16."""
    return len(shape) == 2 and mesh.sizes.dp > 1


def part(mesh: Mesh, name: str, x: Tensor) -> Tensor:
    """This rank's part of a tensor that lies along parameter `name`."""
    if TP[name] is not None:
        x = x.chunk(mesh.sizes.tp, TP[name])[mesh.tp_rank]
    if is_matrix(name):
        rows = x.chunk(mesh.sizes.dp_shard)
        x = rows[mesh.shard_rank] if mesh.shard_rank < len(rows) else x[:0]
    return x.contiguous()


def expected(mesh: Mesh, case: str, full: Whole) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """This rank's parts of the parameters, and of the states."""
    named = dict(full.net.named_parameters())
    states = {
        name: {
            key: part(mesh, name, value) if is_cut(case, key) else value
            for key, value in full.optimizer.state[parameter].items()
        }
        for name, parameter in named.items()
    }
    return {name: part(mesh, name, parameter.detach()) for name, parameter in named.items()}, states


def cut(mesh: Mesh, case: str, full: Whole, *, filled: bool) -> Cut:
    """Parts with the values of `full`, or with zeros to read into."""
    parameters, states = expected(mesh, case, full)
    shapes = {name: tuple(parameter.shape) for name, parameter in full.net.named_parameters()}
    placed = {
        name: Placed(shape=shape, tp=TP[name] if mesh.sizes.tp > 1 else None, sharded=is_sharded(mesh, shape))
        for name, shape in shapes.items()
    }
    scalars = Scalars(STEP, "of rank 0" if mesh.rank == 0 else "of another", 9) if filled else Scalars(0, "", 0)
    made = Cut(nn.Module(), Placements(mesh, placed), full.optimizer, scalars)
    made.model.register_buffer("counter", full.net.counter.clone() if filled else torch.zeros(2, dtype=torch.int64))
    for name, local in parameters.items():
        value = local.clone() if filled else torch.zeros_like(local)
        module, leaf = name.split(".")
        if not hasattr(made.model, module):
            made.model.add_module(module, nn.Module())
        parameter = nn.Parameter(_as_fsdp(mesh, name, value.float(), shapes[name]) if placed[name].sharded else value)
        getattr(made.model, module).register_parameter(leaf, parameter)
        made.state[parameter] = {
            key: value.clone() if filled else torch.zeros_like(value) for key, value in states[name].items()
        }
        made.twin[parameter] = full.net.get_parameter(name)
    return made


def _as_fsdp(mesh: Mesh, name: str, local: Tensor, shape: tuple[int, ...]) -> DTensor:
    """As FSDP2 leaves a matrix: a DTensor over dp_shard, of the tensor-parallel part."""
    sizes = list(shape)
    if TP[name] is not None:
        sizes[TP[name]] //= mesh.sizes.tp
    stride = torch.empty(sizes, device="meta").stride()
    return DTensor.from_local(local, mesh.axis("dp_shard"), [Shard(0)], shape=torch.Size(sizes), stride=stride)


def bits(x: Tensor) -> Tensor:
    return _local(x).contiguous().flatten().view(torch.uint8)


def differing(mesh: Mesh, case: str, full: Whole, read: Cut) -> list[str]:
    """What was read otherwise than it should be."""
    parameters, states = expected(mesh, case, full)
    named = dict(read.model.named_parameters())
    wrong = [
        name for name, value in parameters.items() if not torch.equal(_local(named[name]), value.to(named[name].dtype))
    ]
    wrong += [
        f"{name}.{key}"
        for name, wanted in states.items()
        for key, value in wanted.items()
        if not torch.equal(bits(read.state[named[name]][key]), bits(value))
    ]
    if not torch.equal(read.model.counter, full.net.counter):
        wrong.append("counter")
    return wrong + _wrong_scalars(read.scalars)


def _wrong_scalars(scalars: Scalars) -> list[str]:
    found = (scalars.step, scalars.remembered, int(scalars.skipped))
    return [] if found == (STEP, "of rank 0", 9) else [str(found)]


def alone(directory: Path, runs: Runs) -> dict[str, list[str]]:
    """One process, its whole model and a true AdamW: reads what the layouts wrote."""
    results = {}
    for case, run in runs.items():
        full = whole(run)
        for writer in READS["alone"]:
            read = whole(run, steps=0)
            keeper(directory, case, writer).load(read.parts)
            held, wanted = (
                {k: v for n in ("model", "optimizer") for k, v in w.parts[n].state_dict().items()} for w in (read, full)
            )
            wrong = [key for key, value in wanted.items() if not torch.equal(bits(held[key]), bits(value))]
            results[f"{case} from {writer}"] = wrong + _wrong_scalars(read.scalars)
    return results


def keeper(directory: Path, case: str, writer: str, group: dist.ProcessGroup | None = None) -> Checkpointer:
    return Checkpointer(directory / case / writer, interval=1, keep=1, process_group=group)


def refused(mesh: Mesh, directory: Path, group: dist.ProcessGroup, full: Whole) -> str:
    """What a model of another shape is told."""
    other = cut(mesh, "adamw", full, filled=False)
    placed = other.placements.parameters | {"norm.weight": Placed(shape=(17,), tp=None, sharded=False)}
    other.model.norm.weight = nn.Parameter(torch.zeros(17))
    parts = {"model": ModelState(other.model, Placements(mesh, placed))}
    try:
        keeper(directory, "adamw", "2x2", group).load(parts)
    except ValueError as error:
        untouched = not any(bits(parameter).any() for parameter in other.model.parameters())
        return f"{error}" if untouched else "changed"
    return "taken"


def otherwise_made(mesh: Mesh, case: str, full: Whole) -> list[str]:
    """State tensors to which AdamW over this rank's parts gives another form than they are cut to here."""
    parts = cut(mesh, case, full, filled=True)
    named = {name: _unrounded(parameter) for name, parameter in parts.model.named_parameters()}
    shards = {parameter: parts.placements.shard(name, _group(mesh, name)) for name, parameter in named.items()}
    rule, others = build_optimizer.rules(full.run)
    inside = [name for name in named if rule.hidden_matrices_only and is_matrix(name) and name != "embedding.weight"]
    left = [name for name in named if name not in inside]
    groups = [{"params": [named[name] for name in inside], "rule": rule}] if inside else []
    groups += [{"params": [named[name] for name in left], "indexed": [left.index("embedding.weight")], "rule": others}]
    optimizer = CodedOptimizer(groups, codecs=build_optimizer.codecs(full.run), shards=shards, seed=5)
    _, states = expected(mesh, case, full)
    return [
        f"{name}: {forms(made)} for {forms(states[name])}"
        for name, parameter in named.items()
        if forms(made := optimizer.state[parameter]) != forms(states[name])
        or optimizer.value_dtype(parameter) != full.net.get_parameter(name).dtype
    ]


def forms(state: dict[str, Tensor]) -> dict[str, str]:
    return {key: f"{tuple(tensor.shape)} {tensor.dtype} {type(tensor).__name__}" for key, tensor in state.items()}


def _unrounded(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float())


def _group(mesh: Mesh, name: str) -> Group | None:
    """Of the parts of one parameter."""
    sizes = mesh.sizes
    cuts = {"tp": TP[name] is not None and sizes.tp > 1, "dp_shard": is_matrix(name) and sizes.dp_shard > 1}
    groups = [DistributedGroup.of(mesh.group(axis)) for axis, cuts_it in cuts.items() if cuts_it]
    return GroupProduct(*groups) if groups else None


def after_a_forward_pass(mesh: Mesh) -> list[str]:
    """What FSDP2's own parameters are called while whole matrices stand in their place, and where they are not live."""
    model = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))
    placed = {
        name: Placed(shape=tuple(parameter.shape), tp=None, sharded=parameter.ndim == 2)
        for name, parameter in model.named_parameters()
    }
    vectors = {parameter for parameter in model.parameters() if parameter.ndim < 2}
    fully_shard(model, mesh=mesh.axis("dp_shard"), reshard_after_forward=False, ignored_params=vectors)
    parts, twins = dict(model.named_parameters()), CodedOptimizer([nn.Parameter(torch.zeros(2, 2))])
    held = Cut(model, Placements(mesh, placed), twins, Scalars(0, "", 0))
    for parameter in parts.values():
        held.state[parameter] = {"exp_avg": torch.zeros_like(_local(parameter))}
        held.twin[parameter] = twins.param_groups[0]["params"][0]
    model(torch.zeros(2, 8))
    assert dict(model.named_parameters())["0.weight"] is not parts["0.weight"]
    found = {name: held.parts[name].state_dict() for name in ("model", "optimizer")}
    live = [name for name, part in parts.items() if _local(found["model"][name]).data_ptr() == _local(part).data_ptr()]
    return [*live, *(f"{name} {tuple(value.shape)}" for name, value in found["optimizer"].items())]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x.detach()


def work(rank: int, directory: Path, layout: str, runs: Runs) -> dict[str, list[str] | str]:
    mesh, group = Mesh(LAYOUTS[layout], "cpu"), dist.new_group(backend="gloo")
    results: dict[str, list[str] | str] = {}
    for case, run in runs.items():
        full = whole(run)
        results[f"made of {case}"] = otherwise_made(mesh, case, full)
        for writer in READS[layout]:
            read = cut(mesh, case, full, filled=False)
            assert keeper(directory, case, writer, group).load(read.parts) == STEP
            results[f"{case} from {writer}"] = differing(mesh, case, full, read)
        if layout in WRITERS:
            saver = keeper(directory, case, layout, group)
            saver.save(cut(mesh, case, full, filled=True).parts, STEP, wait=True)
    if layout == "4x1":
        results["refused"] = refused(mesh, directory, group, whole(runs["adamw"]))
    if layout == "2x1":
        results["after a forward pass"] = after_a_forward_pass(mesh)
    return results


def launched(directory: Path) -> dict[str, list[dict[str, list[str] | str]]]:
    """What each rank of each layout found."""
    runs = {case: composed(*overrides) for case, overrides in CASES.items()}
    for case, run in runs.items():
        keeper(directory, case, "alone").save(whole(run).parts, STEP, wait=True)
    found = {layout: run_distributed(work, sizes, directory, layout, runs) for layout, sizes in LAYOUTS.items()}
    return found | {"alone": [alone(directory, runs)]}
