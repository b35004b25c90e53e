"""How ops reach their reference."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowprec_train.ops import activations, cases, library, reference
from lowprec_train.ops.schema import SCHEMAS, matrices


def test_the_reference_on_a_gpu_has_the_defaults_of_its_schema(monkeypatch):
    """torch leaves arguments out of a call that have the values of the schema's defaults."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    library._compiled.cache_clear()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    arguments = (x, [1, 16], 1.0, "nearest", None, None)
    for got, want in zip(
        library._on_cuda("quantize_nvfp4", *arguments), reference.quantize_nvfp4(*arguments), strict=True
    ):
        assert torch.equal(got.float(), want.float())
    library._compiled.cache_clear()


@pytest.mark.parametrize("op", [op for op in SCHEMAS if matrices(op) and op != "scaled_mm"])
def test_a_tensor_that_is_no_matrix_is_refused(op):
    """Not rounded in part: compiled kernels and references use the first two dimensions only."""
    case = next(iter(cases.cases(op).values()))
    overloads = getattr(torch.ops.lowprec, op)
    for place in matrices(op):
        arguments = [each[None] if index == place else each for index, each in enumerate(case)]
        for name in overloads.overloads():
            with pytest.raises((ValueError, RuntimeError)):
                getattr(overloads, name)(*arguments)
        with FakeTensorMode() as mode, pytest.raises(ValueError, match="is a matrix, not a tensor of shape"):
            overloads.default(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments])


def test_norms_and_activations_are_compared_within_a_bound():
    """Their exponentials and sums have other bits on a GPU; the ops that return codes alone have none."""
    computed = {op for op in SCHEMAS if hasattr(activations, op)}
    assert computed - {"group_codes"} == cases.BOUNDED and "gelu_of_codes" in computed
