"""What ends a rank's waits: writes that reach the GPU through every queue, and aborts that wait for each other."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.core.distributed import aborts as aborts_module
from hookline.core.distributed.aborts import NUM_QUEUES, Aborts, Releases, on_every_queue
from hookline.core.errors import RankError

CPU = torch.device("cpu")


class Gpu:
    """Streams that share a few queues in turn. A queue does what is put into it, unless something waits in it."""

    def __init__(self, num_queues: int) -> None:
        self.queues: list[deque[int]] = [deque() for _ in range(num_queues)]
        """The numbers of the streams whose work is held up; -1 for a wait."""
        self.num_done = 0
        self.num_streams, self.current = 0, -1

    def stream(self, device: Any, priority: int) -> Any:
        number = self.num_streams
        self.num_streams += 1
        return SimpleNamespace(number=number, query=lambda: all(number not in queue for queue in self.queues))

    @contextmanager
    def on(self, stream: Any) -> Any:
        before, self.current = self.current, stream.number
        yield
        self.current = before

    def write(self) -> None:
        queue = self.queues[self.current % len(self.queues)]
        if queue:
            queue.append(self.current)
        else:
            self.num_done += 1


@pytest.mark.parametrize("num_queues", (1, 8, 32))
def test_writes_get_past_waits_in_all_queues_but_one_and_a_queue_that_is_held_up_does_not_fill(
    monkeypatch: pytest.MonkeyPatch, num_queues: int
) -> None:
    gpu = Gpu(num_queues)
    monkeypatch.setattr("torch.cuda.Stream", gpu.stream)
    monkeypatch.setattr("torch.cuda.stream", gpu.on)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    let_go = on_every_queue(gpu.write, gpu.write, CPU)
    assert gpu.num_streams == gpu.num_done == NUM_QUEUES
    for free in range(num_queues):
        for number, queue in enumerate(gpu.queues):
            queue.clear()
            if number != free:
                queue.append(-1)
        gpu.num_done = 0
        for _ in range(100):
            let_go()
        assert gpu.num_done == 100 * NUM_QUEUES // num_queues
        assert max(map(len, gpu.queues)) <= 1 + NUM_QUEUES // num_queues, "one write of each stream waits"


def test_each_release_is_tried_until_their_memory_is_freed(caplog: pytest.LogCaptureFixture) -> None:
    releases, calls = Releases(), list[str]()

    def fail() -> None:
        raise RuntimeError("no such device")

    releases.add(fail)
    releases.add(lambda: calls.append("by the GPU"))
    releases.add(lambda: calls.append("by the host"), by_host=True)
    releases()
    releases()
    assert calls == ["by the host", "by the GPU"] * 2
    assert caplog.text.count("no such device") == 1, "and not at each look"
    releases.clear()
    releases()
    assert len(calls) == 4


def test_aborts_of_groups_that_wait_for_each_other_all_begin() -> None:
    """As nccl's do if the work of one group is queued behind that of the other."""
    aborts, begun = Aborts(), [Event(), Event()]

    def abort(index: int) -> None:
        begun[index].set()
        assert begun[1 - index].wait(60)

    aborts.begin([SimpleNamespace(abort=lambda index=index: abort(index)) for index in range(2)])
    assert aborts.join(60)


def test_a_group_is_aborted_once_and_an_error_of_one_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    aborts, calls = Aborts(), list[str]()

    def fail() -> None:
        calls.append("first")
        raise RuntimeError("no such device")

    groups = [SimpleNamespace(abort=fail), SimpleNamespace(abort=lambda: calls.append("second"))]
    for _ in range(3):
        aborts.begin(groups)
        assert aborts.join(60)
    assert sorted(calls) == ["first", "second"] and "no such device" in caplog.text


def test_an_abort_waits_for_a_collective_that_is_being_started_and_none_starts_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aborts_module, "STARTING_S", 60.0)
    aborts, inside, go_on, calls = Aborts(), Event(), Event(), list[str]()

    def collective() -> None:
        with aborts.starting():
            inside.set()
            go_on.wait(60)
            calls.append("started")

    thread = Thread(target=collective)
    thread.start()
    inside.wait(60)
    aborts.begin([SimpleNamespace(abort=lambda: calls.append("aborted"))])
    assert not aborts.join(0.05)
    go_on.set()
    assert aborts.join(60) and calls == ["started", "aborted"]
    thread.join()
    with pytest.raises(RankError, match="aborted"), aborts.starting():
        raise AssertionError


def test_a_collective_whose_start_does_not_end_is_aborted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first one of a group, which connects."""
    monkeypatch.setattr(aborts_module, "STARTING_S", 0.05)
    aborts, inside, aborted = Aborts(), Event(), Event()

    def collective() -> None:
        with aborts.starting():
            inside.set()
            assert aborted.wait(60)

    thread = Thread(target=collective)
    thread.start()
    inside.wait(60)
    aborts.begin([SimpleNamespace(abort=aborted.set)])
    thread.join(60)
    assert not thread.is_alive() and aborts.join(60)
