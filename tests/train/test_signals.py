"""Signals leave a request behind, children are not protected, and the old handlers come back."""

import os
import signal

import pytest

from lowprec_train.train import signals


@pytest.mark.parametrize("number", signals.HANDLED)
def test_a_signal_is_a_request(number):
    before = signal.signal(number, signal.SIG_DFL)  # the suite may run under `nohup`
    try:
        with signals.listen() as stop:
            assert not stop() and stop.signal_name is None
            os.kill(os.getpid(), number)
            assert stop() and stop.signal_name == signal.Signals(number).name
    finally:
        signal.signal(number, before)


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listen() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop() and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_remembered():
    with signals.listen() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGUSR1"


def test_a_second_interrupt_aborts():
    with pytest.raises(KeyboardInterrupt), signals.listen():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_earlier_handlers_come_back():
    before = [signal.getsignal(number) for number in signals.HANDLED]
    with signals.listen():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in signals.HANDLED] == before


def test_a_forked_child_dies_of_the_signal_and_the_parent_hears_nothing():
    with signals.listen() as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
        assert not stop()
