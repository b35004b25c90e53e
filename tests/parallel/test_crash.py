"""Two ranks save together: a crash of one loses nothing, a full disk of one is told by both, training goes on."""

import signal

import pytest

from tests.distributed import run_until_exit
from tests.parallel.crashes import RANKS, STAGES, beside, damaged, fitting, resumed, struck


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_killed_rank_loses_no_checkpoint(tmp_path, stage, asynchronous):
    target, latest = STAGES[stage]
    codes, said = run_until_exit(struck, RANKS, tmp_path, stage, target, asynchronous)
    survivor = 1 - target
    assert codes[target] == -signal.SIGKILL and codes[survivor] == 0
    assert "checkpoint of step 2 could not be written" in said[survivor]["error"]
    assert f"step-{latest} is intact" in said[survivor]["error"]
    assert said[survivor]["seconds"] < 20
    codes, said = run_until_exit(resumed, RANKS, tmp_path, latest)
    assert codes == [0, 0]
    assert said == [{"left": [], "found": latest, "correct": True, "again": (2, True)}] * RANKS


@pytest.mark.parametrize(("stage", "target"), [("full disk", 0), ("full disk", 1), ("full disk at last", 0)])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_of_one_rank_is_the_error_of_both(tmp_path, stage, target, asynchronous):
    codes, said = run_until_exit(struck, RANKS, tmp_path, stage, target, asynchronous)
    assert codes == [0, 0]
    assert said[0]["error"] == said[1]["error"]
    cause = (
        f"rank {target}: [Errno 27] File too large" if stage == "full disk" else "[Errno 28] No space left on device"
    )
    assert f"checkpoint of step 2 could not be written to {tmp_path}/run: {cause}; " in said[0]["error"]
    assert f"{tmp_path}/run/step-1 is intact.\nFree disk space" in said[0]["error"]
    assert all(each["seconds"] < 20 and each["latest"] == 1 and each["after"] == 3 for each in said)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-3"]


def test_what_one_rank_finds_damaged_is_damaged_for_both(tmp_path):
    codes, said = run_until_exit(damaged, RANKS, tmp_path)
    assert codes == [0, 0] and said[0] == said[1]
    assert [said[0][f"found {owner}"] for owner in range(RANKS)] == [(1, True, [1])] * RANKS
    assert "step-1 is damaged: __1_0.distcp is not as it was written" in said[0]["error"]
    assert "No checkpoint in" in said[0]["error"] and "nothing was changed" in said[0]["error"]


def test_training_goes_on_beside_a_save(tmp_path):
    codes, said = run_until_exit(beside, RANKS, tmp_path)
    assert codes == [0, 0]
    for each in said:
        assert each.pop("stall") < 0.9
        assert each == {"written": None, "total": 3.0 * 2**19, "found": 1, "correct": True}


def test_a_run_ends_on_all_ranks_at_the_step_in_which_they_agree_that_a_save_failed(tmp_path):
    codes, said = run_until_exit(fitting, RANKS, tmp_path)
    assert codes == [0, 0] and said[0] == said[1]
    assert "rank 1: [Errno 27] File too large" in said[0]["error"] and 2 < said[0]["steps"] < 1000
