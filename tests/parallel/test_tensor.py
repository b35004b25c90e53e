"""A model cut over tensor-parallel ranks against the whole one: the same codes, so in FP32 the same numbers up to the
order of sums. Ranks are threads (tests/groups.py); real process groups run in test_layouts.py.
"""

from __future__ import annotations

import pytest
import torch

from lowprec_train.model.architecture import Architecture
from lowprec_train.model.transformer import Transformer
from lowprec_train.numerics.draws import SeedTable
from lowprec_train.numerics.formats import E4M3
from lowprec_train.numerics.quantizer import Quantizer, ScaleRule
from lowprec_train.parallel import tensor
from lowprec_train.precision.policy import apply_policy
from lowprec_train.precision.saved_activations import SavedActivationPolicy
from lowprec_train.recipes import bf16
from tests.groups import among
from tests.recipes import GPT, LLAMA, RECIPES, build, by_day

SIZES = {"vocab_size": 64, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 512, "max_seq_len": 64}
FAMILIES = {"llama": LLAMA, "gpt": GPT}
BATCH, SEQ = 4, 32
# A sum in another order moves a value by a few of FP32's last bits; where that tips a rounding, a code moves by a step:
# one code in some ten thousand, each worth up to an eighth of its value.
SMOOTH, TIPPED = 2e-5, 5e-2
# A rotation in half precision makes 2^-11 of a value of such a last bit, once in some thousand elements, so more codes
# tip: 1e-7 of all weights of a whole model moves its gradients by up to .15. A wrong sum shows in the slope.
HALF, SLOPE = 0.25, 0.03


def batch():
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, 64, (2, BATCH, SEQ), generator=generator)
    targets[0, :5] = -100
    return tokens, targets


def whole(recipe, family, documents, **sizes):
    model, seeds = build(RECIPES[recipe], family, **(SIZES | sizes))
    tokens, targets = batch()
    loss = model.loss(tokens, targets, 100.0, documents, seeds.at(3, 8))
    loss.backward()
    return model, loss.item()


def parts(recipe, family, count, documents, shapes, dtype=torch.bfloat16, **sizes):
    """Loss, gradients by name, cut dimensions and summed names of every rank."""

    def body(group):
        with torch.device("meta"):
            model = Transformer(Architecture(**{**SIZES, **family, **sizes}), dtype=dtype)
        cuts = tensor.apply(model, group)
        model.to_empty(device="cpu")

        def fill(name, parameter, first_value):
            value = first_value(shapes[name])
            parameter.copy_(value.chunk(count, cuts[name])[group.rank] if name in cuts else value)

        model.init_weights(0, fill)
        apply_policy(model, {"blocks.*": RECIPES[recipe], "*": bf16.recipe()})
        draws = SeedTable(0, model.number_sites()).at(3, 8)
        tokens, targets = batch()
        loss = model.loss(tokens, targets, 100.0, documents, draws)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return loss.item(), gradients, cuts, tensor.summed_over_tp(model)

    return among(count, body)


def joined(name, found):
    """The gradient of the whole parameter, from those of the ranks."""
    (_, _, cuts, summed), gradients = found[0], [each[1][name] for each in found]
    if name in cuts:
        return torch.cat(gradients, cuts[name])
    if name in summed:
        return torch.stack(gradients).sum(0)
    assert all(torch.equal(gradients[0], each) for each in gradients), name
    return gradients[0]


def compare(recipe, family, count, bound, *, documents=None, **sizes):
    model, loss = whole(recipe, family, documents, **sizes)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = parts(recipe, family, count, documents, shapes, **sizes)
    assert len({each[0] for each in found}) == 1, "the loss is the same bits on all ranks"
    assert found[0][0] == pytest.approx(loss, rel=min(bound, TIPPED) / 10)
    for name, parameter in model.named_parameters():
        gradient, want = joined(name, found), parameter.grad
        error = (gradient - want).norm() / want.norm()
        assert error <= bound, (name, float(error))
        assert (gradient * want).sum() / want.square().sum() == pytest.approx(1.0, abs=min(bound, SLOPE)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", by_day(name for name in RECIPES if name != "fp4_mixed"))
def test_two_ranks(recipe, family):
    rotation = RECIPES[recipe].dgrad.rotation
    bound = SMOOTH if recipe == "bf16" else HALF if rotation is not None and rotation.half else TIPPED
    compare(recipe, FAMILIES[family], 2, bound, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "variant",
    [
        {"documents": (torch.arange(SEQ) // 9).expand(BATCH, SEQ)},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"kv_heads": 4, "heads": 8},
    ],
    ids=["documents", "full", "selective", "grouped"],
)
def test_four_ranks(family, variant):
    compare("bf16", FAMILIES[family], 4, SMOOTH, dtype=torch.float32, **variant)


def test_in_bf16():
    """Partial sums are rounded to the stream's dtype before they are added: half a unit of 2^-8 a rank."""
    compare("bf16", LLAMA, 4, 4 * 2**-8)


@pytest.mark.parametrize(
    ("sizes", "parts", "tokens", "message"),
    [
        ({"vocab_size": 66}, 4, 256, "parallel.tp=4 does not divide model.vocab_size=66"),
        ({"kv_heads": 2}, 4, 256, "parallel.tp=4 does not divide model.kv_heads=2"),
        ({"ffn": 510, "vocab_size": 63}, 4, 256, "model.vocab_size=63, model.ffn=510"),
        ({}, 4, 48, "48 tokens of a micro-batch"),
        ({"vocab_size": 16}, 4, 256, "gives a rank 4 of embedding"),
        (
            {"attention": "full_qk_norm"},
            4,
            256,
            r"parallel.tp=4 divides heads, and blocks.0.attention \(FullQKNorm\) needs all heads of a token",
        ),
        ({}, 4, 256, r"a rank's part of blocks\.0\.attention\.qkv.*a 128x128 tile does not divide a 192x256 matrix"),
    ],
)
def test_what_cannot_be_cut(sizes, parts, tokens, message):
    with torch.device("meta"):
        model = Transformer(Architecture(**{**SIZES, **LLAMA, **sizes}))
    linears = [name for name in model.tensor_plan() if name.startswith("blocks")]
    table = dict.fromkeys(linears, RECIPES["fp8_block"]) | {"head": bf16.recipe()}
    with pytest.raises(ValueError, match=message):
        tensor.check(model, parts, tokens=tokens, recipes=[table])


@pytest.mark.parametrize(("group", "width"), [(256, 256), (-1, 512)])
def test_kept_groups_lie_within_a_part(group, width):
    """A scale over channels of two ranks would be another one on each."""
    with torch.device("meta"):
        model = Transformer(Architecture(**{**SIZES, **LLAMA}))
    table = dict.fromkeys((name for name in model.tensor_plan() if name != "embedding"), RECIPES["fp8"])
    keep = SavedActivationPolicy(activation=Quantizer(E4M3, tile=(1, group), scale=ScaleRule.POW2))
    how = {"tokens": 256, "recipes": [table], "saved_activations": [SavedActivationPolicy(), keep]}
    tensor.check(model, 512 // width, **how)
    says = rf"gives a rank 128 of model.ffn=512.*groups of {width} channels"
    with pytest.raises(ValueError, match=says):
        tensor.check(model, 4, **how)
