"""What the recipe machinery costs when it is not used: BF16 steps beside plain PyTorch, interleaved, on one GPU.

    ours        the trainer's model and optimizer, compiled
    nn.Linear   the same model with every Linear replaced by torch.nn.Linear under autocast
    plain       a LLaMA of the same shape written with nothing but torch.nn, autocast, compiled blocks and loss

All three have FP32 parameters, BF16 GEMMs, torch's fused AdamW and the same batches. Prints medians and ratios, and
writes them as JSON and Markdown:

    python scripts/bench_bf16.py --model llama_130m --batch 16 --seq-len 2048 --out bench_bf16.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec_train.config import directory
from lowprec_train.model.transformer import Transformer
from lowprec_train.optim.adamw import AdamW, parameter_groups
from lowprec_train.precision.linear import Linear

DEVICE = torch.device("cuda")


class PlainBlock(nn.Module):
    """Pre-norm LLaMA block."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * ffn, bias=False), nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (_rotate(each, cos, sin) for each in (q, k))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Plain(nn.Module):
    """LLaMA with nothing but torch.nn."""

    def __init__(self, *, vocab_size: int, dim: int, layers: int, heads: int, ffn: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, ffn) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab_size, bias=False)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(seq_len), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, tokens: Tensor, targets: Tensor, normalizer: float) -> Tensor:
        """Mean cross-entropy."""
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.tail(x, targets) / normalizer

    def tail(self, x: Tensor, targets: Tensor) -> Tensor:
        """Last norm, head and loss."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def ours(sizes: dict) -> nn.Module:
    """The trainer's model."""
    with torch.device("meta"):
        model = Transformer(**sizes)
    model.to_empty(device=DEVICE)
    model.init_weights(0)
    model.compile_blocks()
    return model


def with_plain_linears(sizes: dict) -> nn.Module:
    """The trainer's model with torch.nn.Linear in the place of every Linear."""
    model = Transformer(**sizes).to(DEVICE)
    model.init_weights(0)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device=DEVICE)
                plain.load_state_dict(child.state_dict())
                setattr(parent, name, plain)
    model.compile_blocks()
    return model


def plain(sizes: dict, seq_len: int) -> nn.Module:
    """The yardstick, compiled block by block, its tail too."""
    keys = ("vocab_size", "dim", "layers", "heads", "ffn")
    model = Plain(**{key: sizes[key] for key in keys}, seq_len=seq_len).to(DEVICE)
    for block in model.blocks:
        block.compile(fullgraph=True)
    model.tail = torch.compile(model.tail, fullgraph=True)  # type: ignore[method-assign]
    return model


def stepper(model: Any, tokens: Tensor, autocast: bool) -> Callable[[], Tensor]:
    """One forward, backward and optimizer step."""
    optimizer = AdamW(parameter_groups(model, 0.1), lr=1e-4)
    targets = tokens.roll(-1, 1)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model.loss(tokens, targets, float(tokens.numel()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def interleaved(steps: dict[str, Callable[[], Tensor]], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Milliseconds of each step, the variants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warm_up + rounds):
        for name, step in steps.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            if turn >= warm_up:
                times[name].append(begin.elapsed_time(end))
    return times


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [f"| {name} | {ms:.2f} |" for name, ms in result["median_ms"].items()]
    ratios = ", ".join(f"{ratio:.4f} of {name}" for name, ratio in result["ours_over"].items())
    head = (
        f"{result['model']}, {result['tokens_per_step']:,} tokens a step, {result['device']}, torch {result['torch']}"
    )
    return "\n".join([head, "", "| BF16 step | median ms |", "|---|---|", *rows, "", f"ours takes {ratios}.", ""])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama_130m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("bench_bf16.json"))
    options = parser.parse_args()
    sizes = OmegaConf.to_container(OmegaConf.load(directory() / "model" / f"{options.model}.yaml"))
    assert isinstance(sizes, dict)
    sizes = {key: value for key, value in sizes.items() if key != "name"} | {"max_seq_len": options.seq_len}
    torch.manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], (options.batch, options.seq_len), device=DEVICE)
    steps = {
        "ours": stepper(ours(sizes), tokens, autocast=False),
        "nn.Linear": stepper(with_plain_linears(sizes), tokens, autocast=True),
        "plain": stepper(plain(sizes, options.seq_len), tokens, autocast=True),
    }
    times = interleaved(steps, options.rounds, warm_up=5)
    medians = {name: statistics.median(each) for name, each in times.items()}
    result = {
        "model": options.model,
        "tokens_per_step": tokens.numel(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "median_ms": medians,
        "ours_over": {name: medians["ours"] / medians[name] for name in ("nn.Linear", "plain")},
        "loss": {name: float(step()) for name, step in steps.items()},
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
