"""Python code that does not end is broken off in the main thread and in others, and nothing is left behind."""

import os
import signal
import sys
import threading
import time

import pytest

from hookline.core.errors import Interrupted
from hookline.core.util.interrupt import SIGNAL, Interrupter, limits


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


def break_off_soon(interrupter):
    """From another thread, a moment after the region was entered."""

    def run():
        while interrupter._inside is None:
            time.sleep(0.001)
        time.sleep(0.05)
        assert interrupter.break_off()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("code", [loop_stubbornly, sleep_long, wait_for_nobody])
def test_the_main_thread_is_broken_off_whatever_it_does_in_python(code):
    interrupter, before = Interrupter(), signal.getsignal(SIGNAL)
    other = break_off_soon(interrupter)
    with pytest.raises(Interrupted), interrupter.region():
        code()
    other.join()
    assert signal.getsignal(SIGNAL) is before


def test_another_thread_is_broken_off_while_it_runs_python():
    interrupter, ends = Interrupter(), []

    def run():
        try:
            with interrupter.region():
                loop_stubbornly()
        except Interrupted:
            ends.append("broken off")

    thread = threading.Thread(target=run)
    thread.start()
    while interrupter._inside is None:
        time.sleep(0.001)
    interrupter.break_off()
    thread.join(60)
    assert ends == ["broken off"]


def test_outside_of_the_region_nothing_is_raised_and_a_second_demand_does_nothing():
    interrupter = Interrupter()
    interrupter.break_off()
    with interrupter.region():
        pass
    interrupter.break_off()
    with pytest.raises(Interrupted), interrupter.region():
        interrupter.break_off()
        time.sleep(10)
    with interrupter.region():
        interrupter.break_off()
        assert sum(range(100_000)) > 0


def test_somebody_elses_signal_breaks_nothing_off_and_goes_where_it_went_before():
    came, interrupter = [], Interrupter()
    before = signal.signal(SIGNAL, lambda number, frame: came.append(number))
    try:
        with interrupter.region():
            os.kill(os.getpid(), SIGNAL)
            assert sum(range(1000)) > 0
        assert came == [SIGNAL]
        with pytest.raises(Interrupted), interrupter.region():
            interrupter.break_off()
            time.sleep(10)
        assert came == [SIGNAL]
    finally:
        signal.signal(SIGNAL, before)
    with interrupter.region():
        os.kill(os.getpid(), SIGNAL)
        assert sum(range(1000)) > 0


def test_an_outer_region_is_broken_off_from_within_an_inner_one_of_another_engine():
    outer, inner = Interrupter(), Interrupter()
    with pytest.raises(Interrupted), outer.region():
        with inner.region():
            assert outer.break_off()
            time.sleep(10)
    assert not outer.break_off()


class Endless:
    """Its end takes for ever, and Python drops what is raised in it."""

    def __del__(self):
        loop_stubbornly()


@pytest.mark.parametrize("in_main", [True, False], ids=["the main thread", "another thread"])
def test_code_at_its_limit_is_broken_off_again_when_a_destructor_lost_the_first_time(in_main, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)  # pytest's own takes so long that it could be struck
    ends = []

    def run():
        try:
            with limits(0.05, 2**40):
                Endless()
                loop_stubbornly()
        except TimeoutError as error:
            ends.append(str(error))

    if in_main:
        run()
    else:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(60)
    assert ends == ["not done after 0.05 s"]


@pytest.mark.parametrize("in_main", [True, False])
def test_a_region_whose_end_was_struck_is_left_all_the_same(in_main, monkeypatch) -> None:
    made, region = [], Interrupter.region

    class Struck:
        """A region that an interruption keeps from being left, at the first instruction of its end."""

        def __init__(self, interrupter: Interrupter) -> None:
            made.append(interrupter)
            self._region = region(interrupter)

        def __enter__(self) -> None:
            self._region.__enter__()

        def __exit__(self, *error) -> None:
            raise Interrupted

    def run() -> None:
        before = signal.getsignal(SIGNAL)
        with pytest.raises(TimeoutError), limits(0.01, 2**40):
            while True:
                pass
        found.append((made[0].break_off(again=True), signal.getsignal(SIGNAL) == before))

    found: list[tuple[bool, bool]] = []
    monkeypatch.setattr(Interrupter, "region", lambda interrupter: Struck(interrupter))
    if in_main:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [(False, True)]
