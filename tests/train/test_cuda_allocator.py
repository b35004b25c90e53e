"""Segments grow unless the environment says something else, and the advice for fragmented memory follows it."""

import os

import pytest

from lowprec_train.train.cuda_allocator import expand_segments, expandable

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
ON = "expandable_segments:True"


@pytest.mark.parametrize(
    ("before", "after", "grows"),
    [
        ({}, {NEW: ON}, True),
        ({NEW: "expandable_segments:False"}, {NEW: "expandable_segments:False"}, False),
        ({NEW: "max_split_size_mb:128"}, {NEW: "max_split_size_mb:128"}, False),
        ({OLD: "backend:cudaMallocAsync"}, {OLD: "backend:cudaMallocAsync"}, False),
        ({OLD: "max_split_size_mb:128, expandable_segments: true"}, None, True),
    ],
)
def test_the_environment_decides_if_it_says_anything(before, after, grows, monkeypatch):
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    expand_segments()
    assert {name: os.environ[name] for name in (NEW, OLD) if name in os.environ} == (after or before)
    assert expandable() == grows
