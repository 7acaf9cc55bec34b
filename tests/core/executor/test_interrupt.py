"""Python code that does not end is broken off in the main thread and in others, and nothing is left behind."""

import os
import signal
import threading
import time

import pytest

from hookline.core.errors import BrokenOff
from hookline.core.executor.interrupt import SIGNAL, Breaker


def loop_stubbornly():
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def sleep_long():
    time.sleep(3600)


def wait_for_nobody():
    threading.Event().wait(3600)


def break_off_soon(breaker):
    thread = threading.Timer(0.1, breaker.break_off)
    thread.start()
    return thread


@pytest.mark.parametrize("code", [loop_stubbornly, sleep_long, wait_for_nobody])
def test_the_main_thread_is_broken_off_whatever_it_does_in_python(code):
    breaker, before = Breaker(), signal.getsignal(SIGNAL)
    timer = break_off_soon(breaker)
    with pytest.raises(BrokenOff), breaker.region():
        code()
    timer.join()
    assert signal.getsignal(SIGNAL) is before


def test_another_thread_is_broken_off_while_it_runs_python():
    breaker, ends = Breaker(), []

    def run():
        try:
            with breaker.region():
                loop_stubbornly()
        except BrokenOff:
            ends.append("broken off")

    thread = threading.Thread(target=run)
    thread.start()
    while breaker._inside is None:
        time.sleep(0.001)
    breaker.break_off()
    thread.join(60)
    assert ends == ["broken off"]


def test_outside_of_the_region_nothing_is_raised_and_a_second_demand_does_nothing():
    breaker = Breaker()
    breaker.break_off()
    with breaker.region():
        pass
    breaker.break_off()
    with pytest.raises(BrokenOff), breaker.region():
        breaker.break_off()
        time.sleep(10)
    with breaker.region():
        breaker.break_off()
        assert sum(range(100_000)) > 0


def test_somebody_elses_signal_breaks_nothing_off_and_goes_where_it_went_before():
    came, breaker = [], Breaker()
    before = signal.signal(SIGNAL, lambda number, frame: came.append(number))
    try:
        with breaker.region():
            os.kill(os.getpid(), SIGNAL)
            assert sum(range(1000)) > 0
        assert came == [SIGNAL]
        with pytest.raises(BrokenOff), breaker.region():
            breaker.break_off()
            time.sleep(10)
        assert came == [SIGNAL]
    finally:
        signal.signal(SIGNAL, before)
    with breaker.region():
        os.kill(os.getpid(), SIGNAL)
        assert sum(range(1000)) > 0


def test_an_outer_region_is_broken_off_from_within_an_inner_one_of_another_engine():
    outer, inner = Breaker(), Breaker()
    with pytest.raises(BrokenOff), outer.region():
        with inner.region():
            assert outer.break_off()
            time.sleep(10)
    assert not outer.break_off()
