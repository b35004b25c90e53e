"""A fork is a run that began with the state of another one."""

import json
import os
from dataclasses import replace

import pytest

from lowprec_train.tools.study import definition, forking, plan
from tests.launches import training
from tests.test_kill import numbers

CLIPPED = ("optim.in_backward=true", "max_grad_norm=1")


def trained(run, out, small):
    command = training(out / f"{run.name}.output", *run.command(out), "device=cpu")
    assert command.wait(120) == 0, command.output.read_text()
    return out / run.name


def test_a_fork_of_its_own_trunk_is_that_run(small, tmp_path):
    """Bit-equal state, then equal steps; another arm has the first steps of the trunk and then its own."""
    file = tmp_path / "branch.yaml"
    file.write_text(
        "name: branch\noverrides: [optim=adamw, comm=fp32, optim/schedule=wsd, logger=none]\narms: {bf16: , fp8: }\n"
        "blocks: [{purpose: estimate, seeds: [3], fork: {arm: bf16, step: 20}}]\n"
    )
    study = definition.load(file).with_overrides(small)
    planned = plan.runs(study)
    assert [run.name for run in planned] == ["bf16-trunk20-s3", "bf16-from20-s3", "fp8-from20-s3"]
    assert [(run.repeat, run.cell) for run in planned] == [
        (each, "from step 20 of bf16") for each in (True, False, False)
    ]
    plan.check(study, planned)
    in_backward = replace(study, arms={**study.arms, "fp8": replace(study.arms["fp8"], overrides=CLIPPED)})
    with pytest.raises(
        ValueError, match="clips by the norms of the step before, which bf16, from which it forks, does not"
    ):
        plan.check(in_backward, plan.runs(in_backward))
    trunk = trained(planned[0], tmp_path, small)
    for run in planned[1:]:
        forking.fork(trunk, tmp_path / run.name, 20, plan.plain(plan.configuration(run, tmp_path)))
    manifest = (trunk / "checkpoints" / "step-20" / "manifest.json").read_bytes()
    same, other = (tmp_path / run.name for run in planned[1:])
    for each in (same, other):
        assert (each / "checkpoints" / "step-20" / "manifest.json").read_bytes() == manifest
    assert os.stat(trunk / "checkpoints" / "step-20" / "manifest.json").st_nlink == 3  # links, not copies
    same, other = (trained(run, tmp_path, small) for run in planned[1:])
    assert numbers(same) == numbers(trunk)
    assert numbers(other)[:20] == numbers(trunk)[:20] and numbers(other)[20] != numbers(trunk)[20]

    states = {each.name: forking.start_state(each) for each in (trunk, same, other)}
    assert states[trunk.name] == {} and states[same.name]["step"] == 20
    forking.check_start(states)
    start = json.loads((other / "fork.json").read_text())
    (other / "fork.json").write_text(json.dumps(start | {"checkpoint": "0"}))
    states[other.name] = forking.start_state(other)
    with pytest.raises(ValueError, match="did not begin with the same state of bf16-trunk20-s3"):
        forking.check_start(states)
    with pytest.raises(ValueError, match="has no checkpoint step-21 to fork from"):
        forking.fork(trunk, tmp_path / "new", 21, {})


@pytest.mark.parametrize("content", [{"a": 1}, {"trunk": "t", "step": "1", "checkpoint": "a"}])
def test_a_damaged_fork_file_is_one_error(tmp_path, content):
    (tmp_path / "fork.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"fork\.json is .*, not \{\} or an object with a text `trunk`"):
        forking.start_state(tmp_path)
