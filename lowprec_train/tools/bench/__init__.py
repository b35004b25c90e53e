"""Benchmarks: `lowprec bench kernels`, `gemm`, `step` and others measure; `report` rewrites a table from its JSON.

Every number is a median of one run on one machine. Compare only numbers of the same run: hosts are shared, so times of
different runs are not comparable. docs/benchmarks.md lists the questions that each benchmark answers.
"""
