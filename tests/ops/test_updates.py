"""The op's reference of AdamW's step: the bits of the optimizer's own path, which goes by codecs instead of strings."""

import pytest
import torch

from lowprec_train.ops import library
from tests.optim.cases import MASTERS, MOMENTS, equal, fill, system, tensors


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("moments", [(first, "fp16") for first in MOMENTS] + [("fp32", second) for second in MOMENTS])
def test_the_op_means_what_the_optimizer_does(moments, master, clip, monkeypatch):
    """Three steps, the second one skipped, gradients divided."""
    ours, optimizer = system((*moments, master), fused=False, clip_updates=clip)
    theirs, reference = system((*moments, master), fused=False, clip_updates=clip)
    for step, found in enumerate((0.0, 1.0, 0.0)):
        fill(ours, step), fill(theirs, step)
        scalars = {"grad_scale": torch.tensor(3.0), "found_inf": torch.tensor(found)}
        with monkeypatch.context() as patch:
            patch.setitem(library.SERVED, "cpu", library.SERVED["cpu"] | {"adamw"})
            optimizer.step(**scalars)
        reference.step(**scalars, observer=lambda *_: None)
        assert equal(tensors(ours, optimizer), tensors(theirs, reference))
