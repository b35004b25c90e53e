"""Custom ops `torch.ops.lowprec.*`: each has one schema, and a definition in plain PyTorch."""

from lowprec_train.ops import library

__all__ = ["library"]
