"""Overrides of runs of a second."""

import pytest

from tests.launches import write_modules


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small llama_tiny on a corpus of its own."""
    root = tmp_path_factory.mktemp("sources")
    write_modules(root)
    return (
        *("model.layers=2", "model.ffn=128", "model.heads=2", "model.kv_heads=2", "model.max_seq_len=128"),
        *("model.vocab_size=320", "data.vocab_size=320", f"+data.root={root}", f"data.cache={root.parent / 'cache'}"),
        *("data.seq_len=128", "micro_batch=1", "tokens_per_step=128", "steps=40", "eval_batches=1"),
        *("checkpoint_interval=5", "checkpoint_async=false"),
    )
