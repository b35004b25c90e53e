"""Keys and values held: the logits and tokens of a model that reads everything anew, and no trace in training."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowprec_train.model.generation import Sampling, generate, nucleus

BOTH = pytest.mark.parametrize("family", ["llama", "gpt"])
SPLITS = [(1,) * 24, (24,), (7, 1, 9, 7), (23, 1)]


@BOTH
@pytest.mark.parametrize("split", SPLITS, ids=str)
@torch.no_grad()
def test_a_sequence_read_in_parts_has_the_logits_of_the_whole(build, batch, family, split):
    model, (tokens, _) = build(family, dtype=torch.float32), batch()
    cache = model.new_cache(batch=3, tokens=24)
    parts = [model.head(model.hidden(part, cache=cache)) for part in tokens.split(split, dim=1)]
    assert cache.length == 24 == cache.room
    torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), rtol=1e-4, atol=2e-5)


@BOTH
@torch.no_grad()
def test_in_bf16_it_differs_by_rounding(build, batch, family):
    model, (tokens, _) = build(family), batch()
    exact, whole = build(family, dtype=torch.float32).logits(tokens), model.logits(tokens).float()
    cache = model.new_cache(batch=3, tokens=32)
    parts = torch.cat([model.head(model.hidden(part, cache=cache)) for part in tokens.split(5, dim=1)], dim=1).float()
    assert (parts - exact).norm() <= 1.2 * (whole - exact).norm()
    assert cache.keys.dtype is torch.bfloat16


@BOTH
@torch.no_grad()
def test_greedy_tokens_are_those_without_a_cache(build, family):
    model, prompt = build(family, dtype=torch.float32), [30, 40, 50]
    expected = list(prompt)
    for _ in range(20):
        expected.append(int(model.logits(torch.tensor([expected]))[0, -1].argmax()))
    assert list(generate(model, prompt, max_tokens=20, sampling=Sampling())) == expected[3:]
    assert len(set(expected[3:])) > 1


@torch.no_grad()
def test_work_for_a_token_does_not_grow_with_those_before_it(build, monkeypatch):
    model = build("llama", dtype=torch.float32)
    rows: list[int] = []
    model.blocks[0].mlp.gate_up.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
    list(generate(model, [1] * 7, max_tokens=5, sampling=Sampling()))
    assert rows == [7, 1, 1, 1, 1]


def test_generation_stops_at_the_closing_token_and_leaves_it_out(build):
    model = build("llama", dtype=torch.float32)
    free = list(generate(model, [1, 2], max_tokens=12, sampling=Sampling()))
    stop = free[3]
    assert list(generate(model, [1, 2], max_tokens=12, sampling=Sampling(), stop=stop)) == free[: free.index(stop)]


def test_a_seed_chooses_again_what_it_chose(build):
    model = build("gpt", dtype=torch.float32)

    def drawn(seed):
        return tuple(generate(model, [1, 2], max_tokens=10, sampling=Sampling(temperature=1.5, seed=seed)))

    assert drawn(1) == drawn(1) and len({drawn(seed) for seed in range(4)}) == 4
    tokens = generate(model, [1, 2], max_tokens=10, sampling=Sampling(temperature=1.5, top_p=1e-6))
    assert list(tokens) == list(generate(model, [1, 2], max_tokens=10, sampling=Sampling()))


def test_the_nucleus_is_the_smallest_set_that_holds_the_probability():
    probability = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    kept = {0.3: [1], 0.4: [1], 0.41: [1, 3], 0.7: [1, 3], 0.8: [1, 3, 4], 1.0: [0, 1, 2, 3, 4]}
    for top_p, words in kept.items():
        expected = torch.zeros(5)
        expected[words] = probability[words]
        assert torch.equal(nucleus(probability, top_p), expected), top_p


def test_choices_have_the_probabilities_of_the_temperature():
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(3)
    sampling, count = Sampling(temperature=0.5), 4000
    drawn = torch.bincount(torch.tensor([sampling.choose(logits, generator) for _ in range(count)])) / count
    torch.testing.assert_close(drawn, (logits / 0.5).softmax(0), rtol=0, atol=0.03)  # four standard errors


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1e-300}, {"temperature": 3e-39}, {"temperature": 1.2e-38}, {"temperature": 1.0, "top_p": 1e-46}],
)
def test_tiny_temperatures_and_nuclei_choose_the_likeliest(sampling):
    logits, generator = torch.tensor([-40.0, 90.0, 3.0, 90.5]), torch.Generator().manual_seed(0)
    assert {Sampling(**sampling).choose(logits, generator) for _ in range(5)} == {3}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -1.0}, "-1.0"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_p": 0.0}, "0.0"),
        ({"top_p": 2.0}, "2.0"),
    ],
)
def test_refusals_of_sampling(change, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**change)


def test_refusals_of_lengths(build):
    model = build("llama")
    with pytest.raises(ValueError, match=r"a prompt of 30 tokens and 3 to generate are 33; .* 32"):
        next(generate(model, [1] * 30, max_tokens=3, sampling=Sampling()))
    with pytest.raises(ValueError, match="0 tokens"):
        next(generate(model, [], max_tokens=3, sampling=Sampling()))
    cache = model.new_cache(batch=1, tokens=40)
    with torch.no_grad(), pytest.raises(ValueError, match="33 tokens is longer than max_seq_len 32"):
        for _ in itertools.repeat(0, 2):
            model.hidden(torch.zeros(1, 20 if not cache.length else 13, dtype=torch.int64), cache=cache)
