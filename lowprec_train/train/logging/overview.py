"""The messages of a run at its start, about ten lines. The run directory has the details; verbose=true prints them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from lowprec_train.data.loader import Dataset
from lowprec_train.train import describe
from lowprec_train.train.describe import Linears


def short(plain: Mapping[str, Any], linears: Linears, facts: Mapping[str, Any], directory: str) -> list[str]:
    """Return the lines before data is read. plain: the configuration; linears: as from `describe.effective`."""
    later = [f"{paths(phase['linears'])} from step {phase['first_step']} on" for phase in facts["schedule"]]
    return [
        describe.first_line(facts),
        f"  layout     {_layout(plain, facts)}",
        f"  GEMMs      {paths(linears)}",
        *([f"  library    {facts['backend']}"] if "backend" in facts else []),
        *(f"             {each}" for each in later),
        f"  saves      {saved(facts['saved'])}",
        f"  kernels    {kernels(facts['kernels'])}",
        f"  optimizer  {_optimizer(plain['optim'])}; gradients in {plain['comm'].get('format', 'FP32')}",
        f"  saved in   {directory}: config.yaml (every key), recipe.json (each layer), run.json, checkpoints",
    ]


def data(facts: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Return the line about the corpus and the part of it that the run reads."""
    tokens = plain["steps"] * plain["tokens_per_step"]
    return (
        f"  data       {facts['corpus']}: {facts['train_tokens']:,} tokens, {facts['valid_tokens']:,} held out; "
        f"{plain['steps']:,} steps of {plain['tokens_per_step']:,} are {tokens:,}"
    )


def repeated_validation(plain: Mapping[str, Any], valid: Dataset) -> str:
    """Return a warning if an evaluation reads a held-out sequence twice; else ""."""
    if not valid.repeats(plain["eval_batches"] * plain["micro_batch"]):
        return ""
    return (
        f"an evaluation reads eval_batches={plain['eval_batches']} of {plain['micro_batch']} sequences, more than are "
        "held out: some are counted more than once"
    )


def verbose(plain: Mapping[str, Any], linears: Linears, facts: Mapping[str, Any]) -> list[str]:
    """Return the whole configuration, every layer's GEMMs and every kernel."""
    lines = [OmegaConf.to_yaml(OmegaConf.create(dict(plain)))]
    lines += [f"linear layers, and the execution path of each GEMM:\n{describe.summary(linears)}"]
    lines += [f"saved for backward: {saved(facts['saved'])}"]
    lines += [f"from step {each['first_step']} on:\n{describe.summary(each['linears'])}" for each in facts["schedule"]]
    return [*lines, "kernels: " + ", ".join(f"{op}: {kernel}" for op, kernel in facts["kernels"].items())]


def paths(linears: Linears) -> str:
    """Return the number of GEMMs per execution path: `fp8_tensor 48, bf16 3`."""
    taken = Counter(path for layer in linears.values() for path in layer["execution"].values())
    return ", ".join(f"{path} {count}" for path, count in taken.most_common())


def saved(facts: Mapping[str, str]) -> str:
    """Return what norms and activations save for the backward pass."""
    return ", ".join(f"by {role}s {what}" for role, what in facts.items())


def kernels(live: Mapping[str, str]) -> str:
    """Return the number of ops per kernel library: `C++ 15, reference 14 ops`."""
    served = Counter(live.values())
    return ", ".join(f"{library} {count}" for library, count in served.most_common()) + " ops"


def _layout(plain: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    sizes = facts["processes"]
    count = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"]
    axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    batch = f"micro-batches of {plain['micro_batch']} x {plain['data']['seq_len']} tokens"
    return f"{count} process{'es' if count > 1 else ''}{f' ({axes})' if axes else ''}, {batch}"


def _optimizer(optim: Mapping[str, Any]) -> str:
    def stored(part: str) -> str:
        return str(optim[part].get("format"))

    adamw = ("StableAdamW" if optim["clip_updates"] else "AdamW") + (" by apex" if optim["backend"] == "apex" else "")
    name = optim["rule"]["_target_"].rsplit(".", 1)[-1] if optim.get("rule") else adamw
    schedule = optim["schedule"]["_target_"].rsplit(".", 1)[-1]
    rule: Any = get_class(optim["rule"]["_target_"]) if optim.get("rule") else None
    second = rule is None or len(rule.moments) > 1 or rule.hidden_matrices_only
    moments = f"m {stored('first_moment')}" + (f", v {stored('second_moment')}" if second else "")
    states = f"{moments}, weights {stored('master')}"
    return f"{name}, lr {optim['lr']:g} by {schedule}, {states}"
