"""Parallelism over processes: mesh, tensor parallelism, data parallelism by `fully_shard`, placements."""
