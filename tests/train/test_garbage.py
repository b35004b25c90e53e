"""Python's garbage is collected at chosen steps, and automatic collection is back afterwards."""

import gc
import weakref

import pytest

from lowprec_train.train.garbage import collected_every


class Cycle:
    def __init__(self):
        self.own = self


def test_cycles_are_freed_before_every_third_step_and_not_in_between():
    freed = []
    with collected_every(3) as begin_step:
        assert not gc.isenabled()
        for step in range(1, 8):
            cycle = weakref.ref(Cycle())
            begin_step(step)
            freed.append(cycle() is None)
    assert gc.isenabled()
    assert freed == [False, False, True, False, False, True, False]


def test_with_an_interval_of_0_python_collects_when_it_wants_to():
    with collected_every(0) as begin_step:
        assert gc.isenabled()
        begin_step(1)
    assert gc.isenabled()


def test_automatic_collection_is_back_after_an_error():
    with pytest.raises(ValueError), collected_every(2):
        raise ValueError
    assert gc.isenabled()


def test_a_caller_who_has_switched_it_off_keeps_it_off():
    gc.disable()
    try:
        with collected_every(2):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
