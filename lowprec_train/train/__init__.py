"""The training engine: trainer, checkpoints, metrics, and the building of a run."""
