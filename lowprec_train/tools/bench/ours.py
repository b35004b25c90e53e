"""Contestants of this package: a recipe as `train.py +recipe=...` composes it, with its policy, saved activations,
draws and compiled blocks.

With BF16 parameters the optimizer is torch's fused AdamW, as for the peers. With FP32 parameters, and for recipes given
as `NAME+own`, it is the optimizer of the recipe, with its codecs and master weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lowprec_train.config import RunConfig, choices
from lowprec_train.model.layers import Rotary
from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import Draws, SeedTable
from lowprec_train.optim.norm import clip_divisor
from lowprec_train.precision.linear import Linear, NormInput
from lowprec_train.precision.schedule import PrecisionSchedule
from lowprec_train.tools.bench.contestant import (
    Built,
    Contestant,
    Update,
    Work,
    cast_matrices,
    first_values,
    fused_adamw,
)
from lowprec_train.train import build, build_optimizer
from lowprec_train.train.compose import composed

BASELINE, LIBRARY = "bf16", "te_fp8"
FP8_HEAD = "fp8"  # the recipe whose GEMMs `+head` gives to the output projection


@dataclass(frozen=True)
class Ours:
    """A recipe with its modifiers: `fp8`, `coat+own` (own optimizer), `fp8+head` (an FP8 head), `w4a8+norms`
    (model.recompute=norms), `te_fp8+current`.
    """

    recipe: str
    own: bool = False
    head: str | None = None
    scaling: str | None = None
    norms: bool = False

    @classmethod
    def parse(cls, text: str, *, head: str | None = None, own: bool = False) -> Ours:
        """Parse a recipe with modifiers. Raises ValueError for an unknown recipe or modifier."""
        recipe, *modifiers = text.split("+")
        if recipe not in choices("recipe"):
            raise ValueError(f"no recipe {recipe!r}; there are {', '.join(choices('recipe'))}")
        scalings = [each for each in modifiers if each in choices("precision/scaling")] if recipe == LIBRARY else []
        if (unknown := set(modifiers) - {"own", "head", "norms", *scalings}) or len(scalings) > 1:
            wrong = ", ".join(sorted(unknown)) or " and ".join(scalings)
            raise ValueError(
                f"{text}: {wrong}: a recipe takes +own, +head and +norms, and {LIBRARY} one of its scalings"
            )
        head = head or (FP8_HEAD if "head" in modifiers else None)
        scaling = scalings[0] if scalings else None
        own, head = own or "own" in modifiers, None if recipe == BASELINE else head
        return cls(recipe, own, head, scaling, "norms" in modifiers)

    @property
    def contestant(self) -> Contestant:
        """The contestant, whose name has the modifiers. A library's recipe is `apart`: it may not load with others."""
        changes = [
            *([self.scaling] if self.scaling else []),
            *([f"{self.head} head"] if self.head else []),
            *(["own optimizer"] if self.own else []),
            *(["norms recomputed"] if self.norms else []),
        ]
        name = f"{self.recipe} ({', '.join(changes)})" if changes else self.recipe
        made = Contestant(name=name, build=self.build, update=self.update, baseline=self.recipe == BASELINE)
        return replace(made, needs="transformer_engine", apart=True) if self.recipe == LIBRARY else made

    def run(self, work: Work) -> RunConfig:
        """Return the configuration of its run."""
        chosen = [f"+precision/scaling={self.scaling}"] if self.scaling else []
        chosen += ["model.recompute=norms"] if self.norms else []
        work = work.baseline if self.recipe == BASELINE else work
        run = composed(*work.hydra, f"+recipe={self.recipe}", *chosen)
        if self.head:
            run.precision.policy["head"] = composed(f"+recipe={self.head}").precision.policy["blocks.*"]
        return run

    def build(self, work: Work) -> Built:
        """Build the model of the run, in the precision of its first step."""
        run = self.run(work)
        laid_out = build.layout(run)
        model, precision = laid_out.model, PrecisionSchedule(laid_out.phases)
        if work.device.type != "meta":
            build.choices(run, laid_out).check_libraries(work.device)
        seeds = materialise(model, work.device, run.seed)
        precision.begin(model, 0)
        if not self.owns(work):
            cast_matrices(model, work.dtype)
        if work.compiled:
            model.compile_blocks(fullgraph=precision.one_graph)
        steps = itertools.count()  # with one micro-batch each

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            with precision.around_pass(model):
                return model.loss(tokens, targets, float(tokens.numel()), draws=seeds.at(next(steps), 0))

        return Built(module=model, loss=loss)

    def owns(self, work: Work) -> bool:
        """Return whether the optimizer is that of the recipe, with FP32 weights."""
        return self.own or work.parameters == "fp32"

    def update(self, work: Work, module: nn.Module) -> Update:
        """Return the update of its optimizer."""
        return own_adamw(self.run(work), module) if self.owns(work) else fused_adamw(work, module)


def contestants(texts: Iterable[str], *, head: str | None = None, own: bool = False) -> list[Contestant]:
    """Return contestants for recipes with modifiers; BF16 is always the first."""
    parsed = [Ours.parse(text, head=head, own=own and text != BASELINE) for text in texts]
    return [each.contestant for each in dict.fromkeys([Ours(BASELINE), *parsed])]


def check_precision(texts: Iterable[str], work: Work) -> None:
    """Raise ValueError for an override of `precision` that a recipe does not take."""
    for precision in (Ours.parse(text).run(work).precision for text in texts):
        build.recipes(precision.policy, precision.override)


def own_adamw(run: RunConfig, module: nn.Module) -> Update:
    """Return the update by the configured optimizer, with clipping as in the trainer."""
    optimizer = build_optimizer.optimizer(run, module, dp=1)

    def update() -> None:
        grad_scale, found_inf = None, None
        if run.max_grad_norm:
            norm = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
            grad_scale, found_inf = clip_divisor(norm, run.max_grad_norm), (~norm.isfinite()).float()
        optimizer.step(grad_scale=grad_scale, found_inf=found_inf)
        optimizer.zero_grad(set_to_none=True)

    return update


def materialise(model: Transformer, device: torch.device, seed: int) -> SeedTable:
    """Allocate the model, draw random weights on the device, and return seeds: `train.build.weights` without its
    initialisation.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    first_values((p for p in model.parameters() if p.ndim >= 2), seed)
    if isinstance(model.position, Rotary):
        model.position.reset()
    return SeedTable(seed, model.number_sites(), device)


def with_torch_linears(work: Work) -> Built:
    """Build the trainer's model with torch.nn.Linear under autocast, which shows the overhead of `Linear`."""
    run = composed(*work.baseline.hydra, f"+recipe={BASELINE}")
    model = build.layout(run).model
    materialise(model, work.device, run.seed)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                setattr(parent, name, _torch_linear(child))
    cast_matrices(model, work.dtype)
    if work.compiled:
        model.compile_blocks()

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(work.device.type, torch.bfloat16):
            return model.loss(tokens, targets, float(tokens.numel()))

    return Built(module=model, loss=loss)


class TorchLinear(nn.Linear):
    """torch.nn.Linear with the interface of `Linear`: it ignores amax and draws, and asks nothing of the op that
    computes dY.
    """

    def forward(
        self, x: Tensor, amax: Tensor | None = None, draws: Draws | None = None, norm_input: NormInput | None = None
    ) -> Tensor:
        return super().forward(x)

    def with_grad_amax(
        self, x: Tensor, draws: Draws | None = None, norm_input: NormInput | None = None
    ) -> tuple[Tensor, None]:
        """As `Linear.with_grad_amax`."""
        return self(x), None

    with_grad_codes = with_grad_codes_or_amax = with_grad_amax


def _torch_linear(linear: Linear) -> TorchLinear:
    made = TorchLinear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made


LINEAR = Contestant(name="bf16 (torch.nn.Linear)", build=with_torch_linears, baseline=True)
