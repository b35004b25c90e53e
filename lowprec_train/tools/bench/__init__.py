"""Benchmarks: `lowprec bench kernels`, `gemm`, `step` and others measure; `report` rewrites a table from its JSON.

Every figure is a median within one run on one machine, and what is compared is measured in that run: hosts are shared,
so a time of one run says nothing about a time of another. docs/benchmarks.md has the questions that each one answers.
"""
