"""Hooks on complete gradients that do not keep their owner alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor


def after_gradient(tensor: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call the bound method `method` with `tensor` when a backward pass has accumulated the tensor's gradient.

    The hook holds the method's object weakly. Python's garbage collector does not see what torch's hooks hold, so an
    owner of the tensor in such a hook, and with it the whole model, would never be freed.
    """
    weak = weakref.WeakMethod(method)

    def hook(accumulated: Tensor) -> None:
        if (found := weak()) is not None:
            found(accumulated)

    tensor.register_post_accumulate_grad_hook(hook)
