"""The typed configuration of a run. Hydra checks every configuration against these types.

`configs/train.yaml` and its groups give the values; the dataclasses here give their names and types, so Hydra refuses
an unknown key or a wrong type before anything is built. Two parts are open: nodes that name their class (`data`,
`comm`, `optim.schedule` and the codecs beside it, the entries of `precision.policy` and `logger`: a `_target_` and its
keyword arguments), and `precision.override`, a free tree of changes to the recipe, so that
`precision.override.dgrad.a.format=E4M3` needs no `+`. `phase` checks the phases of `precision.schedule` after Hydra.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

MODEL_FILE = "model.yaml"  # in the directory of an imported model
LAUNCH_FACTS: dict[str, str] = {
    "name": "a label of the run",
    "run_root": "where the run is stored",
    "resume": "what to do with an earlier run of that name",
    "device": "a requeued job may run on another machine",
    "compile": "compiled and eager draw the same bits and differ by rounding only",
    "cuda_graph": "recorded kernels are the same kernels",
    "debug": "how errors are shown",
    "verbose": "what is printed",
    "logger": "where metrics are written",
    "log_interval": "how often metrics are written",
    "telemetry_interval": "observing does not change training",
    "log_update_rms": "the same",
    "profile": "the same",
    "eval_interval": "evaluation has its own draws and batches and does not change training",
    "eval_batches": "the same",
    "checkpoint_interval": "saving does not change training",
    "checkpoint_async": "the same",
    "checkpoint_verify": "the same",
    "checkpoint_keep": "the same",
    "max_nonfinite_steps": "when to stop, not how to train",
    "gc_interval": "when Python frees objects",
    "model.recompute": "recomputed activations have the same bits",
    "model.recompute_layers": "the same",
    "model.full_recompute_layers": "the same",
    "optim.offload": "a copy of a state has the same bits",
    "model.offload": "a copy of an activation has the same bits",
    "model.loss_chunk": "the head's gradient differs by the order of a sum",
    "data.cache": "where prepared data is stored; the corpus hash identifies it",
    "precision.deviations": "a note for readers",
    "lint_allow": "a permission; run.json records what was waived",
    "parallel": "layouts compute the same codes and draws and differ by the order of sums",
}
"""Keys that do not change the result of training, with the reason. All others are training keys, the run's identity.

`steps` is a training key: the learning rate of every step depends on it, so a longer run is another run, unless
resume=extend is given.
`micro_batch` is a training key: a scale per tensor spans a micro-batch.
"""
LAUNCHED: dict[str, Any] = {
    "recompute": "none",
    "recompute_layers": None,
    "full_recompute_layers": 0,
    "offload": False,
    "loss_chunk": None,
}
"""Fields of `model` that are no sizes."""
PLACES = ("data.train", "data.valid", "data.root", "data.tokenizer")
"""Keys with the paths of data. The corpus hash identifies the data, and a run continues wherever the data is stored.
The default name depends on the last part of these paths.
"""


class Resume(Enum):
    """What a launch does with an earlier run of its name: `resume=` auto, never, extend or step-N."""

    auto = "auto"  # continues it
    never = "never"  # moves it aside to `<name>.1`, `.2`, ... and starts again
    extend = "extend"  # continues it with more steps
    step = "step-N"  # goes back to one of its checkpoints, possibly with other steps


def parse_resume(text: str) -> tuple[Resume, int | None]:
    """Parse `resume=`: the choice and, for step-N, the step. Raises ValueError for anything else."""
    if named := re.fullmatch(r"step-(\d+)", text):
        return Resume.step, int(named[1])
    if text not in (Resume.auto.value, Resume.never.value, Resume.extend.value):
        raise ValueError(f"resume={text} is not one of {', '.join(choice.value for choice in Resume)}")
    return Resume(text), None


class Compile(Enum):
    """`auto` compiles on CUDA only. In YAML files quote "on" and "off": bare, YAML reads them as booleans."""

    auto = "auto"
    on = "on"
    off = "off"


@dataclass(kw_only=True)
class ModelConfig:
    """Fields of `lowprec_train.model.architecture.Architecture`, and a name."""

    name: str = MISSING
    vocab_size: int = MISSING
    dim: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING
    ffn: int = MISSING
    max_seq_len: int = MISSING
    norm: str = MISSING
    activation: str = MISSING
    positions: str = MISSING
    attention: str = "causal"
    norm_placement: str = "pre"
    norm_backend: str = "own"
    bias: bool = MISSING
    qkv_bias: bool | None = None
    tied: bool = MISSING
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Any = None  # a mapping, or null; Hydra cannot override null in a typed one
    norm_eps: float = 1e-5
    recompute: str = "none"
    recompute_layers: int | None = None
    full_recompute_layers: int = 0
    offload: bool = False
    loss_chunk: int | None = None


@dataclass(kw_only=True)
class PhaseConfig:
    """A later part of the run with its own policy; policy and saved_activations as in `PrecisionConfig`."""

    at: float = MISSING  # fraction of the run's steps after which it begins, in (0, 1)
    forward_only: bool = False  # only the forward GEMMs change; backward GEMMs and saved activations stay
    policy: dict[str, Any] = field(default_factory=dict)
    saved_activations: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PrecisionConfig:
    """How linear layers compute, and what is saved for the backward pass.

    policy: pattern over module names -> `_target_` of a recipe and its options; first match wins.
    saved_activations: `_target_` of what norms and activation functions save for the backward pass; empty: inputs.
    override: changes to every recipe of the policies that quantises, e.g. `{dgrad: {a: {format: E4M3}}}`.
    """

    name: str = MISSING
    policy: dict[str, Any] = field(default_factory=dict)
    saved_activations: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)  # later phases of the run, by name: `PhaseConfig`
    override: dict[str, Any] = field(default_factory=dict)
    deviations: list[str] = field(default_factory=list)  # parts of the published scheme that are not implemented

    def __post_init__(self) -> None:
        self.schedule = {name: OmegaConf.to_object(phase(name, given)) for name, given in self.schedule.items()}


def phase(name: str, given: Any) -> DictConfig:
    """Return a phase of the precision schedule with its types and all its keys. Raises ValueError for an unknown key, a
    wrong type, and a phase without `at` or `policy`.

    Hydra composes phases without types, because OmegaConf refuses a mapping as a new element of dict[str, PhaseConfig],
    and `+precision.schedule.late={at: 0.5, ...}` adds one.
    """
    key, known = f"precision.schedule.{name}", [each.name for each in fields(PhaseConfig)]
    given = vars(given) if isinstance(given, PhaseConfig) else given
    if not isinstance(given, Mapping):
        raise ValueError(f"{key}={'null' if given is None else given} must be a mapping with {', '.join(known)}")
    for each in given:
        if each not in known:
            raise ValueError(f"{key}.{each}={given[each]}: there is no such key; there are {', '.join(known)}")
    for each in ("at", "policy"):
        if given.get(each) in (None, MISSING, {}):
            raise ValueError(f"{key}.{each} must be given: {key}.{each}=...")
    flag = given.get("forward_only")
    if type(flag) in (int, float) and flag not in (0, 1):
        raise ValueError(f"{key}.forward_only={flag}: {flag} is neither true nor false")
    try:
        made = OmegaConf.merge(OmegaConf.structured(PhaseConfig), given)
    except OmegaConfBaseException as error:
        raise ValueError(f"{key}.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(made, DictConfig)
    return made


@dataclass(kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate.

    rule: `_target_` of an update rule other than AdamW (`ops.updates.Rule`); empty: AdamW. beta1, beta2, eps: AdamW's,
        also for the parameters that another rule does not update.
    schedule: `_target_` of a class of `lowprec_train.optim.schedule`.
    first_moment, second_moment: `_target_` of the codecs that store the moments of matrices (`optim.codecs`).
    master: `_target_` of the codec of the weights that updates are added to.
    clip_updates: StableAdamW's update clipping.
    grad_accumulation: `_target_` of the codec that stores gradients of matrices between micro-batches and until the
        update; empty: FP32.
    in_backward: update each parameter during the backward pass, when its gradient is complete, and free the gradient.
        Clipping is then by norms of earlier steps (`optim.in_backward`).
    backend: the implementation of the update: "own", or "apex", NVIDIA's library.
    offload: keep optimizer states of matrices in pinned host memory between updates.
    """

    lr: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING
    weight_decay: float = MISSING
    schedule: dict[str, Any] = MISSING
    first_moment: dict[str, Any] = MISSING
    second_moment: dict[str, Any] = MISSING
    master: dict[str, Any] = MISSING
    clip_updates: bool = MISSING
    in_backward: bool = False
    offload: bool = False
    grad_accumulation: dict[str, Any] = field(default_factory=dict)
    backend: str = "own"
    rule: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ParallelConfig:
    """Layout of the processes and their communication. Values and their meaning: `configs/parallel`."""

    dp_replicate: int = MISSING
    dp_shard: int = MISSING
    tp: int = MISSING
    reshard_after_forward: bool = MISSING
    blocks_per_unit: int = MISSING
    grad_reduce: str = MISSING
    param_all_gather: str = MISSING
    symmetric_memory: bool = MISSING
    timeout_minutes: float = MISSING


@dataclass(kw_only=True)
class ProfileConfig:
    """Profiling of a launch. Values and their meaning: `configs/train.yaml`."""

    first: int = MISSING
    steps: int = MISSING
    ranks: list[int] = MISSING
    shapes: bool = MISSING
    stacks: bool = MISSING
    memory: bool = MISSING
    allocations: int = MISSING


@dataclass(kw_only=True)
class RunConfig:
    """One run. Values and their meaning: `configs/train.yaml`."""

    name: str | None = MISSING
    seed: int = MISSING
    steps: int = MISSING
    tokens_per_step: int = MISSING
    micro_batch: int = MISSING
    max_grad_norm: float = MISSING
    weights: str | None = MISSING
    max_nonfinite_steps: int = MISSING

    run_root: str = MISSING
    resume: str = MISSING
    device: str = MISSING
    compile: Compile = MISSING
    cuda_graph: bool = MISSING
    debug: bool = MISSING
    verbose: bool = False

    eval_interval: int = MISSING
    eval_batches: int = MISSING
    checkpoint_interval: int = MISSING
    checkpoint_async: bool = MISSING
    checkpoint_verify: bool = MISSING
    checkpoint_keep: int = MISSING
    log_interval: int = MISSING
    gc_interval: int = MISSING
    telemetry_interval: int = MISSING
    log_update_rms: bool = MISSING
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    lint_allow: list[str] = field(default_factory=list)

    model: ModelConfig = field(default_factory=ModelConfig)
    data: dict[str, Any] = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    comm: dict[str, Any] = MISSING
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logger: dict[str, Any] = MISSING

    def micro_batches(self, dp: int) -> int:
        """Return the number of micro-batches per step on each of `dp` data-parallel ranks."""
        return max(1, -(-self.tokens_per_step // (self.micro_batch * self.data["seq_len"] * dp)))


def is_launch_fact(key: str) -> bool:
    """Return whether a key, or a group that contains it, is one of `LAUNCH_FACTS`."""
    return any(key == fact or key.startswith(f"{fact}.") for fact in LAUNCH_FACTS)


def directory() -> Path:
    """Return the directory of the shipped configuration: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def choices(group: str) -> list[str]:
    """Return the names of the shipped files of a configuration group, e.g. `recipe`."""
    return sorted(path.stem for path in (directory() / group).glob("*.yaml"))


def run_and_step(path: Path) -> tuple[Path, int | None]:
    """Split a path that may name one checkpoint of a run, `<run>/checkpoints/step-N`, into the run and its step."""
    named = re.fullmatch(r"step-(\d+)", path.name)
    return (path.parents[1], int(named[1])) if named and path.parent.name == "checkpoints" else (path, None)


def read_object(file: Path, *, advice: str = "restore it") -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file. Raises ValueError, with the path, for any other content."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); {advice}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {str(content)[:80]!r}, not a JSON object; {advice}")
    return content


def read_yaml(path: Path) -> DictConfig:
    """Read the settings of a YAML file. Raises ValueError, with the path, if there are none."""
    try:
        found = OmegaConf.load(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is not YAML: {_fault(error)}") from error
    if not isinstance(found, DictConfig) or not found:
        raise ValueError(f"{path} holds no settings; it is empty or was cut off")
    return found


def _fault(error: Exception) -> str:
    """Return the fault and its line; PyYAML's first line names only what it was reading."""
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return str(error).splitlines()[0]


def model_of(path: Path) -> ModelConfig:
    """Return the sizes of a trained model, from a run directory, one of its checkpoints, or an imported directory.

    Raises ValueError for another directory, and if its file does not describe a model.
    """
    directory, _ = run_and_step(path)
    source = directory / "config.yaml"
    of_run = source.is_file()
    if not of_run and not (source := directory / MODEL_FILE).is_file():
        remedy = (
            f"; import it first: lowprec import-hf {path} --out DIR" if (directory / "config.json").is_file() else ""
        )
        raise ValueError(f"{path} is neither a run (no config.yaml) nor an imported model (no {MODEL_FILE}){remedy}")
    try:
        sizes = read_yaml(source).model if of_run else read_yaml(source)
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), sizes))
    except (OmegaConfBaseException, AttributeError, ValueError) as error:
        raise ValueError(f"{source} does not describe a model: {str(error).splitlines()[0]}") from error
    assert isinstance(model, ModelConfig)
    return model


def _of_checkpoint(key: str, *, _root_: DictConfig) -> Any:
    """Return the value of `${of_checkpoint:dim}` under `model=from_checkpoint`."""
    if _root_.weights is None:
        raise ValueError("model=from_checkpoint takes its sizes from weights=..., which is null")
    return getattr(model_of(Path(_root_.weights).expanduser()), key)


@cache
def register() -> None:
    """Register the schema of `train.yaml`, and the model `from_checkpoint`, whose sizes are those of `weights`. Once in
    a process.
    """
    OmegaConf.register_new_resolver("of_checkpoint", _of_checkpoint, replace=True)
    schema = OmegaConf.structured(RunConfig)
    for open_part in (schema.precision.override, schema.precision.schedule):
        OmegaConf.set_struct(open_part, False)
    ConfigStore.instance().store(name="schema", node=schema)
    sizes = {each.name: f"${{of_checkpoint:{each.name}}}" for each in fields(ModelConfig)} | LAUNCHED
    ConfigStore.instance().store(group="model", name="from_checkpoint", node=sizes)
