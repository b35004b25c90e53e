"""What the machine does: `torch.ops.lowprec.*`, each op declared once, with plain PyTorch as its meaning."""

from lowprec_train.ops import library

__all__ = ["library"]
