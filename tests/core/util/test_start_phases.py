"""The parts of a start and their sum."""

import time
from threading import Event

import pytest

from hookline.core.util.start_phases import StartPhases, process_age_s


def test_parts_of_one_name_are_added_and_the_rest_makes_up_the_sum(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 3.5, 4.0, 4.0, 5.0, 5.0, 5.01, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    phases = StartPhases()
    for name in ("weights", "graphs", "weights", "short"):
        with phases.part(name):
            pass
    phases.notes.append("kernels compiled 2 in 1.5 s")
    phases.end()
    assert phases.seconds == {"weights": 3.0, "graphs": 0.5, "short": pytest.approx(0.01), "rest": pytest.approx(6.49)}
    assert str(phases) == "10.0 s = weights 3.0 + graphs 0.5 + rest 6.5; kernels compiled 2 in 1.5 s"


def test_a_part_inside_another_counts_for_itself_alone(monkeypatch):
    now = iter([0.0, 1.0, 2.0, 5.0, 6.0, 8.0, 9.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    phases = StartPhases()
    with phases.part("graphs"):
        for _ in range(2):
            with phases.part("kernels"):
                pass
    phases.end()
    assert phases.seconds == {"graphs": 3.0, "kernels": 5.0, "rest": 2.0}


def test_a_part_that_fails_keeps_its_time():
    phases = StartPhases()
    with pytest.raises(ValueError), phases.part("weights"):
        raise ValueError
    assert phases.seconds["weights"] > 0


def test_what_came_before_counts_from_the_start_of_the_process():
    phases = StartPhases("imports")
    phases.end()
    assert 0 < phases.seconds["imports"] <= process_age_s() and sum(phases.seconds.values()) <= process_age_s() + 0.1


def test_each_part_is_logged_as_it_ends_and_while_it_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("hookline.core.util.start_phases.TELL_S", 0.05)
    monkeypatch.setattr("hookline.core.util.start_phases.SHORT_S", 0.0)
    is_told = Event()
    with caplog.at_level("INFO", "hookline.start"):
        phases = StartPhases()

        def _progress() -> str:
            is_told.set()
            return "1 of 3 GB"

        with phases.part("weights"), phases.counting(_progress):
            assert is_told.wait(30)
            with phases.part("kernels"):  # inside another: no line of its own
                pass
        with phases.part("graphs"):
            pass
        with StartPhases(is_told=False).part("another rank's"):
            pass
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("weights: 0 s so far (1 of 3 GB)")
    assert [line.partition(":")[0] for line in lines if "so far" not in line] == ["weights", "graphs"]
