"""Run directories of a study, with losses that the test chose."""

import json

import yaml

from lowprec_train.tools.study import definition, plan
from tests.tools.conftest import write

STEPS, TOKENS_PER_STEP, PARAMETERS = 400, 4096, 500_000


def study(folder, **tree):
    """(study, its runs, its file)."""
    file = folder / "study.yaml"
    file.write_text(
        yaml.safe_dump(
            {"name": "synthetic", "baseline": "bf16", "overrides": [f"steps={STEPS}"]} | tree, sort_keys=False
        )
    )
    made = definition.load(file)
    return made, plan.runs(made), file


def run(
    out,
    planned,
    loss,
    weights=None,
    *,
    steps=STEPS,
    parameters=PARAMETERS,
    diverged=False,
    rate=1000.0,
    sharpness=None,
    **more,
):
    """One finished run: a curve that ends at `loss`, evaluations at each eighth, and final losses."""
    curve = [loss + 3.0 * (1 - i / steps) for i in range(1, steps + 1)]
    valid = {i: curve[i - 1] for i in range(steps // 8, steps + 1, steps // 8)}
    config = plan.saved_form(planned, out)
    assert (config["steps"], config["tokens_per_step"]) == (steps, TOKENS_PER_STEP)
    table = config["model"]["vocab_size"] * config["model"]["dim"] * (1 if config["model"]["tied"] else 2)
    directory = write(
        out / planned.name,
        curve[: steps // 2] if diverged else curve,
        valid=valid,
        done=not diverged,
        rate=rate,
        parameters=parameters + table,
        recipe=planned.arm,
        **more,
    )
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    if diverged:
        (directory / "DIVERGED").write_text('{"step": 200}')
        return directory
    (directory / "DONE").write_text(json.dumps({"step": steps}))
    losses = {"run": loss, "bf16": loss if weights is None else weights}
    found = {"step": steps, "corpus_hash": "c0ffee", "loss": losses}
    found |= {} if sharpness is None else {"sharpness": {"run": sharpness, "bf16": 0.0}}
    (directory / "evaluation.json").write_text(json.dumps(found))
    return directory
