"""The tables of docs/parallelism.md: bytes of a recipe per parameter and token, and memory and traffic of layouts."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_train.config import choices
from lowprec_train.tools.estimate.memory import SUM, parameters, states
from lowprec_train.tools.estimate.report import GB, GIB, Estimate, estimate
from lowprec_train.tools.estimate.saved import Counter
from lowprec_train.tools.estimate.subject import Subject, check_step
from lowprec_train.tools.markdown import number, table
from lowprec_train.train import build
from lowprec_train.train.compose import composed

WORK = ("model=llama_7b", "micro_batch=1", "data.seq_len=2048", "tokens_per_step=4194304")
EACH = ("parallel.dp_shard=8", "parallel.grad_reduce=every_microbatch")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "shard 8": ("parallel.dp_shard=8",),
    "shard 8, every micro-batch": EACH,
    "shard 8, every micro-batch, ZeRO-2": (*EACH, "parallel.reshard_after_forward=false"),
    "shard 8, every micro-batch, quantized all-gather": (*EACH, "parallel.param_all_gather=quantized"),
    "shard 8, every micro-batch, full recompute": (*EACH, "model.recompute=full"),
    "replicate 8, shard 8, every micro-batch": (*EACH, "parallel.dp_replicate=8"),
    "shard 4, tp 2, every micro-batch": ("parallel.dp_shard=4", "parallel.tp=2", EACH[1]),
    "replicate 16, shard 8, tp 8": ("parallel.dp_replicate=16", "parallel.dp_shard=8", "parallel.tp=8"),
}
"""Name -> overrides. `every micro-batch`: when gradients are reduced."""
RECIPES = ("bf16", "coat", "fp4")
KINDS = ("parameters", "gradients", "tensor parallel")  # prefixes of the keys of `traffic`


def markdown(overrides: Sequence[str] = ()) -> str:
    """Return both tables. overrides: changes to their model and batch."""
    for axes in LAYOUTS.values():
        check_step(composed(*WORK, *overrides, *axes), overrides)
    return "\n".join([*_recipes(overrides), "", *_layouts(overrides)])


def _recipes(overrides: Sequence[str]) -> list[str]:
    """Return the table of recipes: bytes per parameter of a model on one GPU, and bytes per token and block."""
    stored, saved = ("weights", "gradients", "states"), ("saved of weights", "saved a token")
    header = ("recipe", *stored, *saved)
    return table(header, (_of_recipe(recipe, overrides) for recipe in choices("recipe") if _without_library(recipe)))


def _without_library(recipe: str) -> bool:
    """Return whether no library runs layers of the recipe: the memory of a library is not known."""
    made = build.recipes(composed(f"+recipe={recipe}").precision.policy, {})
    return all(each.backend is None for each in made.values())


def _of_recipe(recipe: str, overrides: Sequence[str]) -> list[object]:
    subject = Subject(run=composed(f"+recipe={recipe}", *WORK, *overrides, "parallel.dp_shard=1"))
    block = Counter(subject, "none").block(0)
    model = subject.laid_out.model
    count, of_block = (sum(p.numel() for p in each.parameters()) for each in (model, model.blocks[0]))
    each = (parameters(subject) / count, SUM, states(subject) / count, block.fixed / of_block)
    return [f"`{recipe}`", *(number(value) for value in each), number(block.token, 0)]


def _layouts(overrides: Sequence[str]) -> list[str]:
    gib, gb = ("standing", "gathered", "saved", "largest sum"), ("weights", "gradients", "tensor parallel")
    header, rows = ("layout", "recipe", *gib, *gb, "a token"), []
    for layout, axes in LAYOUTS.items():
        for recipe in RECIPES:
            found = estimate(composed(f"+recipe={recipe}", *WORK, *overrides, *axes))
            rows.append([layout, f"`{recipe}`", *_of_layout(found)])
    return table(header, rows)


def _of_layout(found: Estimate) -> list[str]:
    """Return GiB on a GPU, GB that it sends per step, and kB per token of its micro-batches."""
    memory, sent = found["memory"], found["traffic"]
    standing = sum(memory[what] for what in ("parameters", "optimizer states", "gradients"))
    saved = memory["saved by blocks"] + memory.get("embedding, head and logits", 0)
    gib = (standing, memory["weights gathered"], saved, memory["total"])
    gb = (sum(size for what, size in sent.items() if what.startswith(kind)) for kind in KINDS)
    tokens = found["micro_batch_tokens"] * found["micro_batches"]
    return [
        *(number(each / GIB, 1) for each in gib),
        *(number(each / GB, 0) for each in gb),
        number(sent["total"] / tokens / 1e3, 0),
    ]
