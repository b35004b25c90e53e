"""Pretraining of LLaMA and GPT models in BF16, FP8, FP4 and MXFP4, where precision is a value."""

__version__ = "0.1.0"
