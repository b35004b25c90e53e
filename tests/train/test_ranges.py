"""Every number of a configuration has a range, and what lies outside is one error that names key and value."""

import dataclasses
import math
import re

import pytest
from omegaconf import OmegaConf

from lowprec_train.config import RunConfig
from lowprec_train.train import ranges
from lowprec_train.train.compose import composed
from lowprec_train.train.ranges import NODES, RANGES

NO_RANGE = {  # key -> who says what is wrong with it
    "seed": "any number is one",
    **{f"parallel.{key}": "parallel.mesh" for key in ("dp_replicate", "dp_shard", "tp")},
}


def numbers(kind, prefix=""):
    """Dotted keys of a configuration's numbers."""
    for each in dataclasses.fields(kind):
        if each.type in (int, float):
            yield prefix + each.name
        elif dataclasses.is_dataclass(each.type):
            yield from numbers(each.type, f"{prefix}{each.name}.")


def outside():
    for key, allowed in RANGES.items():
        values = [allowed.low - 1, -1]
        values += [] if math.isinf(allowed.high) else [allowed.high * 2]
        values += [] if (allowed.low == 0 and not allowed.above) else [0]
        values = [value for value in values if value or not allowed.or_zero]
        is_float = not (isinstance(allowed.low, int) and key not in FLOATS)
        values += [math.nan, math.inf, -math.inf] if is_float else []
        yield from ((key, value) for value in dict.fromkeys(values))


FLOATS = {"max_grad_norm", "model.rope_theta", "model.norm_eps", "parallel.timeout_minutes"}
FLOATS |= {f"optim.{key}" for key in ("lr", "beta1", "beta2", "eps", "weight_decay")}


@pytest.fixture(scope="module")
def run():
    return OmegaConf.structured(composed())


def changed(run, key, value):
    run = run.copy()
    OmegaConf.update(run, key, value)
    made = OmegaConf.to_object(run)
    assert isinstance(made, RunConfig)
    return made


def test_every_number_has_a_range():
    assert set(numbers(RunConfig)) == set(RANGES) | set(NO_RANGE)


@pytest.mark.parametrize(("key", "value"), list(outside()))
def test_outside(run, key, value):
    with pytest.raises(ValueError) as error:
        ranges.check(changed(run, key, value))
    shown = f"{key}={float(value) if key in FLOATS else value} must be "
    assert str(error.value).startswith(shown) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_grad_norm", 0),
        ("telemetry_interval", 0),
        ("optim.beta1", 0),
        ("optim.weight_decay", 0),
        ("optim.eps", 1e-15),
        ("optim.lr", 1e30),
        ("model.rope_theta", 500_000),
    ],
)
def test_inside(run, key, value):
    ranges.check(changed(run, key, value))


@pytest.fixture(scope="module")
def with_nodes():
    """Every node of `NODES` is there."""
    return OmegaConf.structured(composed("optim=adamw_coat", "optim/schedule=wsd", "logger=console"))


@pytest.mark.parametrize("value", [math.nan, math.inf, "many", -(2**70), True])
@pytest.mark.parametrize("key", NODES)
def test_numbers_of_nodes(with_nodes, key, value):
    ranges.check(OmegaConf.to_object(with_nodes))
    with pytest.raises(ValueError, match=re.escape(f"{key}={value} must be ")):
        ranges.check(changed(with_nodes, key, value))
    ranges.check(changed(with_nodes, key, None))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1.5])
def test_the_tail_of_a_schedule(value):
    from lowprec_train.optim.schedule import WarmupStableDecay

    with pytest.raises(ValueError, match=r"decay_fraction must lie in \(0, 1\]"):
        WarmupStableDecay(peak=1.0, steps=10, decay_fraction=value)
