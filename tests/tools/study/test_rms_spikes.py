"""Spikes behind large updates, on curves with known ones, and the metric on steps of a model."""

import json

import numpy as np
import pytest
import torch

from lowprec_train.tools.study import measure, report, results
from tests.recipes import system
from tests.tools.study import synthetic

STEPS = 400
EVENTS = (100, 101, 200, 300)  # 100 and 101 are one
SPIKES = (105, 209, 350)  # the first alone follows an event by at most 8 steps


def test_events_spikes_and_chance(tmp_path):
    made, planned, _ = synthetic.study(
        tmp_path, arms=dict.fromkeys(["bf16", "fp8"]), blocks=[{"purpose": "estimate", "seeds": [1, 2]}]
    )
    for run in planned:
        directory = synthetic.run(tmp_path / "runs", run, 4.0)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if run.name != "fp8-s2":
                line["optim/update_rms"] = 5.0 if line["step"] in EVENTS and run.arm == "bf16" else 2.3
            line["train/loss"] += 2.0 * (line["step"] in SPIKES) + 0.01 * np.sin(7.0 * line["step"])
        (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    measured = measure.measure(made, *results.read(planned, tmp_path / "runs"))
    bf16, fp8 = measured.cells[0].arms
    assert (bf16.spikes, fp8.spikes, fp8.rms_spikes) == (6, 6, None)  # a run of fp8 has logged none
    found = bf16.rms_spikes
    assert (found.events, found.spikes, found.preceded) == (6, 6, 2)
    assert found.chance == pytest.approx((9 + 8 + 8) / STEPS)
    assert "| 2 of 6, 6 events, chance 6 % |" in report.to_markdown(measured, made, figure="figure.svg")


def test_the_metric_is_that_of_the_definition():
    """Largest matrix and embedding, from gradients and moments in FP64; about 3 where a steady gradient grows threefold
    and the second moment has seen little of it."""
    trained = system("bf16", "llama_tiny", "max_grad_norm=0")
    model, optimizer = trained.model, trained.optimizer
    b2, eps, v = trained.run.optim.beta2, trained.run.optim.eps, {}
    generator = torch.Generator().manual_seed(3)
    for count in range(1, 31):
        for name, parameter in model.named_parameters():
            size = 3.0 if count == 30 else 1.0
            parameter.grad = size * torch.randn(parameter.shape, generator=generator)
            g = parameter.grad.double() / 2
            v[name] = b2 * v.get(name, 0.0) + (1 - b2) * g * g
        rms = {
            name: float(
                (parameter.grad.double() / 2).square().div((v[name] / (1 - b2**count)).clamp_min(eps**2)).mean()
            )
            for name, parameter in model.named_parameters()
        }
        before = [parameter.detach().clone() for parameter in model.parameters()]
        found = optimizer.update_rms(grad_scale=torch.tensor(2.0))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        for name, parameter in model.named_parameters():
            assert found[parameter].item() == pytest.approx(rms[name] ** 0.5, rel=1e-5)
        optimizer.step(grad_scale=torch.tensor(2.0))
    assert 2.0 < found[model.head.weight].item() < 3.0
