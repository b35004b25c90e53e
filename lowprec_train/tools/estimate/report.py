"""Compute an estimate as a value, and print it as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lowprec_train.comm.fsdp import Reduction
from lowprec_train.config import RunConfig
from lowprec_train.tools.estimate import offload
from lowprec_train.tools.estimate.device import DEVICES, Device
from lowprec_train.tools.estimate.memory import Memory, memory
from lowprec_train.tools.estimate.step_time import step_time
from lowprec_train.tools.estimate.subject import Subject
from lowprec_train.tools.estimate.traffic import between_nodes, node_size, traffic
from lowprec_train.train import build, checks
from lowprec_train.train.logging import metrics

GIB, GB = 2**30, 1e9
Estimate = dict[str, Any]


def estimate(run: RunConfig, gpus: int | None = None, device: Device | None = None) -> Estimate:
    """Return the estimate of a run, with the time of a step if `device` is given. Memory is that of the phase of the
    precision schedule that needs the most; the rest is of the first phase. Raises ValueError for a configuration that
    cannot run.
    """
    subject = Subject(run=run, gpus=gpus)
    reduction: Reduction = build.construct(run.comm, "comm")
    checks.symmetric_memory(run, subject.sizes, reduction.codec, "cuda", node_size(reduction))
    (first_step, needed), sent = _largest(subject, reduction), traffic(subject, reduction)
    nic = between_nodes(subject, reduction)
    moment, peak = needed.peak
    total = sum(p.numel() for p in subject.laid_out.model.parameters())
    step_tokens = subject.tokens * subject.micro_batches * subject.sizes.dp
    return {
        "model": run.model.name,
        "precision": run.precision.name,
        "comm": str(reduction.codec),
        "recompute": run.model.recompute,
        "recompute_layers": run.model.recompute_layers,
        "full_recompute_layers": run.model.full_recompute_layers,
        "compiled": subject.compiled,
        "sizes": asdict(subject.sizes) | {"gpus": subject.sizes.processes},
        "reshard_after_forward": run.parallel.reshard_after_forward,
        "blocks_per_unit": run.parallel.blocks_per_unit,
        "grad_reduce": run.parallel.grad_reduce,
        "parameters": total,
        "micro_batch_tokens": subject.tokens,
        "micro_batches": subject.micro_batches,
        "tokens_per_step": step_tokens,
        "memory": {"at": moment, **peak, "total": needed.bytes},
        "memory_from_step": first_step,
        "moments": needed.moments,
        "host": {"pinned": offload.host_bytes(subject), "link_each_way": offload.link_bytes(subject)},
        "saved_per_token": needed.saved.total(subject.tokens) / subject.tokens,
        "traffic": sent | {"total": sum(sent.values())},
        "node_size": node_size(reduction),
        "traffic_nic": nic | {"total": sum(nic.values())},
        "flops_per_token": flops(subject),
        "time": None if device is None else _time(subject, reduction, device, step_tokens),
    }


def _largest(subject: Subject, reduction: Reduction) -> tuple[int, Memory]:
    """Return the first step of the phase that needs the most memory, of several the earliest, and its memory."""
    phases = subject.laid_out.phases
    found = [(each.first_step, memory(replace(subject, phase=index), reduction)) for index, each in enumerate(phases)]
    return max(found, key=lambda each: each[1].bytes)


def _time(subject: Subject, reduction: Reduction, device: Device, step_tokens: int) -> dict[str, Any]:
    """Return the seconds of a step by class and in total, tokens per second and GPU, and the MFU of the BF16 peak."""
    seconds = step_time(subject, reduction, device)
    total = sum(seconds.values())
    rate = step_tokens / total / subject.sizes.processes
    peak = metrics.peak_flops(device.name)["bf16"]
    mfu = rate * sum(flops(subject).values()) / peak
    return {"device": device.name, "seconds": seconds, "step": total, "tokens_per_s": rate, "mfu_bf16peak": mfu}


def flops(subject: Subject) -> dict[str, float]:
    """Return forward and backward FLOPs per token, by the kind of tensor core on compute capability 9.0."""
    model, plans = subject.laid_out.model, subject.plans
    return metrics.flops_per_token(
        model,
        kinds={name: plan.peaks() for name, plan in plans.items()},
        attention_flops=model.attention_flops_per_token(subject.seq_len),
    )


def _later(first_step: int) -> str:
    return f", from step {first_step:,} on (precision.schedule)" if first_step else ""


def text(found: Estimate) -> str:
    """Return the estimate as lines of text."""
    sizes = found["sizes"]
    axes = ", ".join(f"{axis} {sizes[axis]}" for axis in ("dp_replicate", "dp_shard", "tp"))
    lines = [
        f"{found['model']}, {found['parameters'] / 1e9:.2f} B parameters, precision {found['precision']}, gradients "
        f"{found['comm']}, recompute {found['recompute']}{_blocks(found)}",
        f"{sizes['gpus']} GPUs: {axes}; {found['micro_batches']} micro-batches of {found['micro_batch_tokens']:,} "
        f"tokens a step and rank, {found['tokens_per_step']:,} tokens a step",
        "",
        f"memory of a GPU, most at: {found['memory']['at']}{_later(found['memory_from_step'])}",
        *_rows(found["memory"], GIB, "GiB"),
        *_host(found["host"]),
        "",
        "sent by a GPU in a step",
        *(_rows(found["traffic"], GB, "GB")),
        "",
        f"of these through its NIC, to other nodes of {found['node_size']} GPUs (comm.node_size); the rest by NVLink",
        *(_rows(found["traffic_nic"], GB, "GB")),
        "",
        "FLOPs a token, forward and backward",
        *_rows(found["flops_per_token"], GB, "GFLOP"),
        "",
        *_time_lines(found["time"]),
    ]
    return "\n".join(lines)


def _time_lines(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return [f"--device NAME adds the time of a step; measured rates: {', '.join(DEVICES)}"]
    ordered = dict(sorted(found["seconds"].items(), key=lambda item: -item[1]))
    return [
        f"time of a step on {found['device']}: {found['step'] * 1e3:,.1f} ms, {found['tokens_per_s']:,.0f} tokens/s "
        f"and GPU, {found['mfu_bf16peak']:.0%} of the BF16 peak",
        *_rows(ordered, 1e-3, "ms"),
    ]


def _host(found: Mapping[str, int]) -> list[str]:
    if not found["pinned"]:
        return []
    pinned, link = found["pinned"] / GIB, found["link_each_way"] / GB
    return [f"  pinned memory of the host: {pinned:,.3f} GiB; {link:,.3f} GB a step cross the link in each direction"]


def _blocks(found: Mapping[str, Any]) -> str:
    some, whole = found["recompute_layers"], found["full_recompute_layers"]
    text = "" if some is None else f" in the first {some} blocks"
    return text + (f" (full in the first {whole} blocks)" if whole else "")


def _rows(values: Mapping[str, Any], unit: float, name: str) -> list[str]:
    numbers = {what: value for what, value in values.items() if not isinstance(value, str)}
    return [f"  {what:<34} {value / unit:>12,.3f} {name}" for what, value in numbers.items()]
