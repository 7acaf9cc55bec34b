"""A part of the server that ends is started again, but not without end: around processes that are made up."""

from __future__ import annotations

import asyncio
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from hookline.core.serve.processes import engine_replica, supervisor
from hookline.core.serve.processes.server_process import MAX_ENDS, WITHIN_S, Restarts, StartError
from hookline.core.serve.processes.shares import Share
from hookline.core.serve.settings import ServeConfig

MAX_STARTS = 20
"""Of a fake process, after which a supervisor counts as one that never gives up."""


class EndingProcess:
    """A ServerProcess that was ready for `served_s` seconds and has ended."""

    served_s = 10.0
    num_started = 0
    is_ready = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        self.ready, self.ended = loop.create_future(), loop.create_future()
        if self.is_ready:
            self.ready.set_result({"facts": {}})
        self.ended.set_result(1)
        self.has_ended, self.reason = True, "a kernel failed"
        type(self).num_started += 1
        assert self.num_started < MAX_STARTS, "it is started without end"

    def how_it_ended(self) -> str:
        return "ended with exit code 1"

    def tell(self, message: dict[str, Any]) -> None:
        pass

    async def wait_until_ready(self, what: str) -> dict[str, Any]:
        if not self.is_ready:
            raise StartError("no memory")
        return self.ready.result()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a supervisor waited; the processes that it starts are made up."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(supervisor.asyncio, "sleep", sleep)
    monkeypatch.setattr(EndingProcess, "num_started", 0)
    for module in (engine_replica, supervisor):
        monkeypatch.setattr(module, "ServerProcess", EndingProcess)
    return found


def watched(num_replicas: int = 1) -> tuple[Any, Any]:
    """A supervisor of engines that end, and the first of them, watched until that gives up."""
    run: Any = SimpleNamespace(serve=ServeConfig(restart=True, replicas=num_replicas), tree={})
    made = supervisor.Supervisor(run, [], print, "nobody:main")
    for number in range(num_replicas):
        replica = engine_replica.EngineReplica(number, run, "nobody:main", Share(), made._folder, made._context)
        made._replicas.append(replica)
    return made, made._replicas[0]


def closed(made: Any) -> None:
    made._context.destroy(linger=0)
    shutil.rmtree(made._folder)


@pytest.mark.parametrize("is_ready", [True, False], ids=["ten seconds after each start", "while starting"])
def test_an_engine_that_ends_again_and_again_ends_the_server_with_one_line(
    is_ready: bool, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndingProcess, "is_ready", is_ready)
    monkeypatch.setattr(EndingProcess, "served_s", 10.0 * is_ready)

    async def watch() -> None:
        made, replica = watched()
        try:
            await made._watch_replica(replica)
        finally:
            closed(made)

    told = "the engine has ended 5 times within 300 s of service, and is not started again: a kernel failed"
    with pytest.raises(StartError) as found:
        asyncio.run(watch())
    assert str(found.value) == told
    assert EndingProcess.num_started == MAX_ENDS and slept == [0.0, 1.0, 2.0, 4.0]


def test_a_replica_that_ends_again_and_again_stays_dead_while_another_lives(
    slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def watch() -> None:
        made, replica = watched(2)
        task = asyncio.ensure_future(made._watch_replica(replica))
        while not replica.has_given_up and not task.done():
            await asyncio.wait({task}, timeout=0.001)
        assert not task.done()
        task.cancel()
        closed(made)

    asyncio.run(watch())
    assert caplog.messages[-1] == (
        "the engine of replica 0 has ended 5 times within 300 s of service, and is not started again: a kernel failed"
    )


def test_a_front_end_that_ends_again_and_again_ends_the_server_with_one_line(slept: list[float]) -> None:
    async def watch() -> None:
        made, _ = watched()
        made._sockets = [SimpleNamespace(fileno=lambda: 0)]
        made._replicas = []
        made._start_front(0)
        try:
            await made._watch_front(0)
        finally:
            closed(made)

    told = "front end 0 has ended 5 times within 300 s of service, and is not started again: it ended with exit code 1"
    with pytest.raises(StartError) as found:
        asyncio.run(watch())
    assert str(found.value) == told


def test_ends_far_apart_are_forgotten_and_slow_starts_do_not_count() -> None:
    restarts = Restarts()
    assert [restarts.delay_s(one) for one in (0, 0, 0, 0)] == [0, 1, 2, 4]
    assert restarts.delay_s(WITHIN_S) == 0
    assert [restarts.delay_s(WITHIN_S / 4) for _ in range(8)] == [1, 2, 4, 4, 4, 4, 4, 4]
    assert restarts.delay_s(1.0) is None


def test_one_engine_of_a_server_tells_of_its_observers_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[dict[str, Any]] = []
    monkeypatch.setattr(engine_replica, "ServerProcess", lambda target, task, **options: tasks.append(task))
    made, first = watched(3)
    first.start()
    closed(made)
    assert [task["tells_of_metrics"] for task in tasks] == [True, False, False, False]
