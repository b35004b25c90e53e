"""One step's gradients times 100, while a small LLaMA learns to copy: AdamW's loss jumps, StableAdamW's does not.

Update clipping (arXiv 2304.13013) divides the rate of the step at which the gradient outgrows its second moment. What
the spike has left in the first moment is not clipped: with beta1=0.9 it moves the weights for ten more steps, and only
the step of the spike itself is saved.
"""

from __future__ import annotations

import pytest

from tests.copy_task import batches, step
from tests.recipes import system

AT = 40


def losses(optimizer, beta1, after):
    """Up to `after` steps past the spike."""
    seen = []
    trained = system(
        "bf16", "llama_tiny", f"optim={optimizer}", "max_grad_norm=0", f"optim.beta1={beta1}", "optim.beta2=0.999"
    )
    for index, batch in zip(range(AT + 1 + after), batches(), strict=False):
        at = [p.register_hook(lambda g: 100 * g) for p in trained.model.parameters() if index == AT]
        seen.append(step(trained, index, batch))
        for hook in at:
            hook.remove()
    return seen


def jump(seen):
    """How far the loss rises above the four steps that end with the spike's batch."""
    return max(seen[AT + 1 :]) - max(seen[AT - 3 : AT + 1])


def test_without_momentum_the_spike_is_one_step():
    assert jump(losses("adamw", 0.0, 3)) > 0.5
    assert jump(losses("stable_adamw", 0.0, 3)) < 0


@pytest.mark.nightly
def test_with_momentum_the_step_of_the_spike_is_saved_and_no_more():
    plain, clipped = losses("adamw", 0.9, 5), losses("stable_adamw", 0.9, 5)
    assert plain[AT + 1] > plain[AT] + 0.2 and clipped[AT + 1] < clipped[AT]
    assert jump(plain) > 0.5 and jump(clipped) > 0.5
