"""One step's gradients times 100, while a small LLaMA learns to copy: AdamW's loss jumps, StableAdamW's does not.

Update clipping (arXiv 2304.13013) divides the rate of the step at which the gradient outgrows its second moment. What
the spike has left in the first moment is not clipped: with beta1=0.9 it moves the weights for ten more steps, and only
the step of the spike itself is saved.
"""

from __future__ import annotations

import pytest

from tests.copy_task import batches, step
from tests.recipes import system

LEARNED = 2.5  # nat; a loss below it for three steps: the model learns the task


def losses(optimizer, beta1, after):
    """Losses from three steps before the spike to `after` steps past it. The spike is at the first step that finds the
    task learned: how many steps that takes depends on the CPU's rounding."""
    seen, spike = [], None
    trained = system(
        "bf16", "llama_tiny", f"optim={optimizer}", "max_grad_norm=0", f"optim.beta1={beta1}", "optim.beta2=0.999"
    )
    for index, batch in zip(range(200), batches(), strict=False):
        if spike is None and len(seen) >= 3 and max(seen[-3:]) < LEARNED:
            spike = index
        hooks = [p.register_hook(lambda g: 100 * g) for p in trained.model.parameters() if index == spike]
        seen.append(step(trained, index, batch))
        for hook in hooks:
            hook.remove()
        if spike is not None and index == spike + after:
            return seen[spike - 3 :]
    raise AssertionError(f"the task was not learned in {len(seen)} steps: {seen[-3:]}")


def jump(seen):
    """How far the loss rises above the four steps that end with the spike's batch."""
    return max(seen[4:]) - max(seen[:4])


def test_without_momentum_the_spike_is_one_step():
    assert jump(losses("adamw", 0.0, 3)) > 1.5
    assert jump(losses("stable_adamw", 0.0, 3)) < 0.3


@pytest.mark.nightly
def test_with_momentum_the_step_of_the_spike_is_saved_and_no_more():
    plain, clipped = losses("adamw", 0.9, 5), losses("stable_adamw", 0.9, 5)
    assert plain[4] > plain[3] + 0.2 and clipped[4] < clipped[3]
    assert jump(plain) > 0.5 and jump(clipped) > 0.5
