"""Imported last by the server of tests/launches.py: its children need no garbage collection of what it has imported."""

import gc

gc.collect()
gc.freeze()
