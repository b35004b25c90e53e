"""Evaluation of trained models: perplexity, bits per byte and lm-evaluation-harness tasks, under any recipe."""
