"""Format results as Markdown tables. All tables come from JSON, so they can be reproduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowprec_train.tools.markdown import number, table

Result = Mapping[str, Any]
GIB = 2**30


def markdown(result: Result) -> str:
    """Return the tables of a result, after a line about the environment."""
    return "\n".join([heading(result), "", *TABLES[result["bench"]](result)]).rstrip() + "\n"


def heading(result: Result) -> str:
    """Return machine, versions and command."""
    about = dict(result["environment"])
    command = about.pop("command", "")
    gpu, *rest = (f"{value}" if name == "gpu" else f"{name} {value}" for name, value in about.items())
    return f"{', '.join([gpu, *rest])}.\n\n    {command}"


def kernels(result: Result) -> list[str]:
    """Return a table with one row per case and shape."""
    lines = [
        f"A copy within the device moves {number(result['copy_gbs'], 0)} GB/s, read and written, in this run. Bytes "
        "are those that must move.",
        "",
    ]
    return lines + table(
        ("op", "case", "shape", "kernel", "ms", "GB/s", "of copy"), (_kernel(row) for row in result["rows"])
    )


def _kernel(row: Mapping[str, Any]) -> list[object]:
    about = [row["op"], row["case"], "x".join(map(str, row["shape"])), row["kernel"]]
    if "error" in row:
        return [*about, row["error"], "", ""]
    return [*about, number(row["ms"], 3), number(row["gbs"], 0), f"{row['of_copy']:.0%}"]


def gemm(result: Result) -> list[str]:
    """Return a table of kinds by shapes, then exactness."""
    shapes = result["rows"]
    names = dict.fromkeys(name for row in shapes for name in (*row["tflops"], *row["errors"]))
    header = ("TFLOP/s", *("x".join(map(str, row["shape"])) for row in shapes))
    lines = table(header, ([name, *(_tflops(row, name) for row in shapes)] for name in names))
    errors = {f"{name}: {error}" for row in shapes for name, error in row["errors"].items()}
    lines += ["", "Shapes are m x k x n of a[m, k] b[n, k]^T.", *(f"- {each}" for each in sorted(errors)), ""]
    if not result["exactness"]:
        return lines
    header = ("error against FP64 on the same codes", "K", "fast", "split", "of rounding the output")
    return lines + table(header, (_exact(row) for row in result["exactness"]))


def _tflops(row: Mapping[str, Any], name: str) -> str:
    return number(row["tflops"][name], 0) if name in row["tflops"] else "error" if name in row["errors"] else ""


def _exact(row: Mapping[str, Any]) -> list[object]:
    if "error" in row:
        return [row["case"], row["k"], row["error"], "", ""]
    return [row["case"], row["k"], *(f"{row[name]:.2e}" if row[name] else "0" for name in ("fast", "split", "output"))]


def linear(result: Result) -> list[str]:
    """Return a table with one row per recipe, with times and ratios by shape."""
    rows = result["rows"]
    names = dict.fromkeys(name for row in rows for name in (*row["ms"], *row["errors"]))
    header = ("ms, x BF16, x fp8", *(f"{row['shape'][0]} to {row['shape'][1]}" for row in rows))
    lines = [f"A linear layer, forward and backward, on {result['tokens']:,} tokens; medians of interleaved calls.", ""]
    return lines + table(header, ([name, *(_linear(row, name) for row in rows)] for name in names))


def _linear(row: Mapping[str, Any], name: str) -> str:
    ms = row["ms"]
    if name not in ms:
        return str(row["errors"].get(name, ""))
    ratios = (f"{ms[other] / ms[name]:.2f}x" for other in ("bf16", "fp8") if other in ms)
    return ", ".join((number(ms[name], 3), *ratios))


def _order(result: Result) -> str:
    return "took turns within a group" if result.get("interleaved") else "ran one after another"


def step(result: Result) -> list[str]:
    """Return a table with one row per contestant, the baseline once per group; then profiles."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    lines = [f"{sizes}; {result['tokens_per_step']:,} tokens a step. Contestants {_order(result)}; medians.", ""]
    header = ("step", "group", "ms", "tokens/s", "x BF16 beside it", "x fastest BF16", "peak GiB", "loss")
    lines += table(header, (_step(row) for row in result["rows"]))
    slow = [row["name"] for row in result["rows"] if row.get("device_allocations")]
    if slow:
        lines += ["", f"Memory was taken from the device within timed steps, which slows them: {', '.join(slow)}."]
    apart = [row["name"] for row in result["rows"] if row.get("apart")]
    if apart:
        lines += ["", f"In a process of its own, a step at a time in turn with the others: {', '.join(apart)}."]
    attention = {row["attention"]: row["name"] for row in reversed(result["rows"]) if row.get("attention")}
    if attention:
        lines += ["", *(f"- attention of {name}: `{kernel}`" for kernel, name in reversed(attention.items()))]
    return lines + _profiles(result)


def _profiles(result: Result) -> list[str]:
    lines: list[str] = []
    for name, profile in result["profiles"].items():
        if not profile["longest"]:
            continue
        lines += ["", f"{name}: {number(profile['total_ms'], 1)} ms of kernels a step", ""]
        lines += table(("class", "ms", "share"), _classes(profile))
        longest = ([each["kernel"], each["class"], number(each["ms"])] for each in profile["longest"])
        lines += ["", *table(("longest kernels", "class", "ms"), longest)]
    return lines


def _step(row: Mapping[str, Any]) -> list[object]:
    if "ms" not in row:
        return [row["name"], row.get("group", ""), row.get("error", ""), "", "", "", "", ""]
    ratios = (number(row.get(name), 3) for name in ("of_group", "of_fastest"))
    rate, peak = number(row["tokens_per_s"], 0), number(row.get("peak_gib"), 1)
    loss = " to ".join(f"{value:.2f}" for value in row["loss"])
    return [row["name"], row["group"], number(row["ms"], 1), rate, *ratios, peak, loss]


def _classes(profile: Mapping[str, Any]) -> Iterable[Sequence[object]]:
    total = profile["total_ms"]
    return ([name, number(ms, 1), f"{ms / total:.0%}"] for name, ms in profile["ms"].items())


def dry(result: Result) -> str:
    """Return the result of a dry run as text."""
    lines = [f"{name} {value}" for name, value in result["sizes"].items()]
    need = f"estimated GiB: {result['resident_gib']:.1f} a model between steps, {result['step_gib']:.1f} in a step"
    groups = [f"group {index}: {', '.join(group)}" for index, group in enumerate(result["groups"])]
    rows = ([row["name"], row.get("error") or f"{row['parameters'] / 1e6:,.1f} M"] for row in result["rows"])
    return "\n".join([", ".join(lines), need, *groups, "", *table(("contestant", "parameters"), rows)])


def comm(result: Result) -> list[str]:
    """Return a table with one row per collective and codec."""
    recorded = ", recorded as CUDA graphs" if result.get("cuda_graph") else ""
    given = result.get("gradients", "FP32")
    lines = [
        f"{result['ranks']} ranks over {result['backend']}; {result['elements']:,} {given} gradients; medians of "
        f"{result['rounds']} calls, of the slowest rank each{recorded}. Sent: by a rank. `library` is "
        f"{result['backend']}'s own sum, with its casts to or from {'FP32' if given == 'BF16' else 'BF16'}.",
        "",
    ]
    header = ("collective", "payload", "ms", "MB sent", "GB/s", "x library BF16", "SQNR dB")
    return lines + table(header, (_reduction(row) for row in result["rows"]))


def _reduction(row: Mapping[str, Any]) -> list[object]:
    about = [row["kind"], row["name"]]
    if "error" in row:
        return [*about, row["error"], "", "", "", ""]
    ms, sent, gbs = number(row["ms"], 3), number(row["sent"] / 1e6, 1), number(row["gbs"], 1)
    return [*about, ms, sent, gbs, number(row.get("of_library"), 2), number(row["sqnr_db"], 1) or "exact"]


def parallel(result: Result) -> list[str]:
    """Return a table with one row per contestant, the baseline once per group; then profiles."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    lines = [
        f"{result['gpus']} GPUs; {sizes}; {result['tokens_per_step']:,} tokens a GPU and step. Contestants "
        f"{_order(result)}; medians of the slowest rank. Host: until the host has launched the step. Exposed: "
        "communication beside which no kernel runs; idle: no kernel runs; both in a profile of rank 0. Limit: the same "
        "work without communication.",
        "",
    ]
    header = ["run", "group", "ms", "tokens/s/GPU", "x BF16 beside it", "of its limit", "host ms", "exposed ms"]
    header += ["idle ms", "peak GiB", "estimated", "GB sent", "loss"]
    return lines + table(header, (_sharded(row) for row in result["rows"])) + _profiles(result)


def _sharded(row: Mapping[str, Any]) -> list[object]:
    if "ms" not in row:
        return [row["name"], row.get("group", ""), row.get("error", ""), *[""] * 10]
    rates = [number(row["ms"], 1), number(row["tokens_per_s"], 0)]
    rates += [number(row.get(name), 3) for name in ("of_group", "of_limit")]
    rates.append(number(max(row["host_ms"]), 1) if "host_ms" in row else "")
    rest = [number(row.get(name), 1) for name in ("exposed_ms", "idle_ms", "peak_gib", "estimated_gib")]
    loss = " to ".join(f"{value:.2f}" for value in row["loss"])
    return [row["name"], row["group"], *rates, *rest, number(row.get("sent_gb"), 2), loss]


def memory(result: Result) -> list[str]:
    """Return a table with one row per contestant: the columns of COAT's table 7, and the estimated peak."""
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    shape = f"micro-batches of {result['batches'][0]} x {result['seq_len']:,} tokens"
    peaks = " and ".join(map(str, result["batches"]))
    lines = [
        f"{sizes}; {shape}, one a step; GiB. Activations: at the loss. Largest: sequences of a micro-batch in 90 % of "
        f"{result['limit'] / GIB:,.1f} GiB, by the line through the peaks at {peaks}. Contestants ran one after "
        "another.",
        "",
    ]
    header = ("run", "parameters", "optimizer states", "gradients", "activations", "peak", "BF16 / peak", "reserved")
    return lines + table((*header, "estimated", "largest", "tokens/s"), (_memory_row(row) for row in result["rows"]))


def _memory_row(row: Mapping[str, Any]) -> list[object]:
    if "peak" not in row:
        return [row["name"], row.get("error", ""), *[""] * 9]
    sizes = ("parameters", "optimizer states", "gradients", "activations", "peak")
    gib = [number(row[name] / GIB) for name in sizes]
    more = [number(row[name] / GIB) if row.get(name) is not None else "" for name in ("reserved", "estimated")]
    rate = number(row.get("tokens_per_s"), 0)
    return [row["name"], *gib, number(row["of_baseline"]), *more, number(row["largest"], 0), rate]


TABLES: dict[str, Callable[[Result], list[str]]] = {
    "kernels": kernels,
    "gemm": gemm,
    "linear": linear,
    "step": step,
    "comm": comm,
    "parallel": parallel,
    "memory": memory,
}
