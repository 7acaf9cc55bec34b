"""Where the time of a step goes: its parts on the host, its times on the device, and what both come to."""

import itertools

import numpy as np
import pytest
import torch

from hookline.core.bench.metrics import time_lines, times_by_kind
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.timing import DeviceTime
from hookline.core.testing.fakes import FakeClock, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.worker import device_clock as step_clock
from hookline.core.worker.device_clock import StepClock

PARTS = ("plan_s", "dispatch_s", "launch_s", "wait_s", "commit_s")


def stepped(overlap, *, is_timed):
    """The statistics of each step of a short run."""
    engine = fake_engine(PlainScheduler(), overlap=overlap)
    if is_timed:
        engine.time_steps()
    engine.add([1, 2, 3], SamplingParams(max_tokens=4, seed=1))
    seen = []
    while engine.has_work:
        engine.step()
        if engine.last_stats is not None and engine.last_stats not in seen:
            seen.append(engine.last_stats)
    return engine, seen


@pytest.mark.parametrize("overlap", [False, True])
def test_the_parts_of_a_step_on_the_host_add_up(overlap):
    _, seen = stepped(overlap, is_timed=False)
    assert len(seen) == 4
    for stats in seen:
        assert all(getattr(stats, part) > 0 for part in PARTS)
        work = sum(getattr(stats, part) for part in PARTS) - stats.wait_s
        assert stats.host_s == pytest.approx(work)
        assert stats.device_s is None and stats.idle_s is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_timed_engine_reads_one_time_for_each_step(overlap):
    engine, seen = stepped(overlap, is_timed=True)
    assert [(stats.device_s, stats.idle_s) for stats in seen] == [(1.0, 0.25)] * 4
    assert all(stats.host_s > 0 for stats in seen), "a device's time is no work of the host"
    assert engine.executor.clock.num_unread == 0


def test_where_the_host_is_the_device_its_time_is_no_work_of_the_host(monkeypatch):
    monkeypatch.setattr(FakeClock, "read", lambda self: DeviceTime(1.0, 0.25, on_host=True))
    _, seen = stepped(overlap=False, is_timed=True)
    for stats in seen:
        work = sum(getattr(stats, part) for part in PARTS) - stats.wait_s
        assert stats.host_s == pytest.approx(work - 1.0)


def test_a_step_that_breaks_off_leaves_no_time_behind():
    engine = fake_engine(PlainScheduler(), overlap=True)
    engine.time_steps()
    engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    engine.executor.collect = lambda handle: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.executor.clock.num_unread == 0


def test_on_a_cpu_the_hosts_clock_tells_work_from_waiting(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: {0: 10.0, 1: 12.0, 2: 15.0, 3: 19.0}[next(ticks)])
    clock = StepClock(torch.device("cpu"))
    for _ in range(2):
        clock.begin()
        clock.end()
    first, second = clock.read(), clock.read()
    assert (first.device_s, first.idle_s, first.on_host) == (2.0, 0.0, True)
    assert (second.device_s, second.idle_s) == (4.0, 3.0)
    assert clock.read() is None


def columns(**given):
    return {name: np.array(values, dtype=float) for name, values in given.items()}


def test_times_are_means_by_kind_of_step_and_idle_counts_between_decodes_alone():
    steps = columns(
        prefill_tokens=[8, 0, 0, 5, 0, 0],
        decode_rows=[0, 2, 2, 2, 3, 3],
        host_s=[0.004, 0.001, 0.003, 0.005, 0.001, 0.001],
        device_s=[0.010, 0.002, 0.002, 0.020, 0.002, 0.003],
        idle_s=[9.0, 0.001, 0.001, 0.5, 0.5, 0.003],
    )
    times = times_by_kind(steps)
    assert times["prefill"] == {"steps": 1, "host_ms": 4.0, "device_ms": 10.0, "idle_ms": 9000.0}
    assert times["mixed"]["steps"] == 1 and times["decode"]["steps"] == 4
    assert times["decode"]["host_ms"] == 1.5
    assert times["decode_idle_percent"] == 44.44  # (1 + 3) / (1 + 3 + 2 + 3)
    assert [line.split()[0] for line in time_lines(times)] == ["decode", "prefill", "mixed", "device"]


def test_without_two_decodes_in_a_row_there_is_no_idle_share():
    zeros = [0.0, 0.0]
    steps = columns(prefill_tokens=[8, 0], decode_rows=[0, 1], host_s=zeros, device_s=zeros, idle_s=zeros)
    times = times_by_kind(steps)
    assert times["decode_idle_percent"] is None and "mixed" not in times
    assert len(time_lines(times)) == 2
