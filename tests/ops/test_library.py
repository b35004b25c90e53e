"""How ops reach their reference."""

import torch

from lowprec_train.ops import library, reference


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
