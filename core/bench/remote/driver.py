"""Sends a load to a server, each request when it is due, and records the responses and their times.

Open loop: a request is sent when the load says so, however far behind the server is. One thread, one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

from hookline.core.bench.driver import record_of
from hookline.core.bench.recorder import Recording
from hookline.core.bench.remote.answer import Answer
from hookline.core.bench.remote.body import Bodies, Said
from hookline.core.bench.remote.connection import ConnectionPool
from hookline.core.bench.remote.recording import recording_of
from hookline.core.bench.workload import Load
from hookline.core.errors import RequestError

LEAD_S = 0.05
"""Seconds from the call to the load's start, in which the first requests are prepared."""


async def drive(pool: ConnectionPool, bodies: Bodies, load: Load) -> Recording:
    """Send a whole load to the server and return the measurements; times are seconds after the load's start.

    A request that fails is recorded with its error, and so are the turns that would have followed it.
    """
    return await _Drive(pool, bodies, load).run()


class _Drive:
    def __init__(self, pool: ConnectionPool, bodies: Bodies, load: Load) -> None:
        self.pool, self.bodies, self.load = pool, bodies, load
        self.records = [record_of(request) for request in load.requests]
        self.answers: list[Answer | None] = [None] * len(load.requests)
        self.next_turns: dict[int, list[int]] = defaultdict(list)
        self.num_open = len(load.requests)

    async def run(self) -> Recording:
        """Serve the load; see `drive`."""
        self.loop = asyncio.get_running_loop()
        self.done = self.loop.create_future()
        self.loop.set_exception_handler(self._broke)
        self.started_s, started = time.perf_counter() + LEAD_S, self.loop.time() + LEAD_S
        for place, request in enumerate(self.load.requests):
            if request.follows is None:
                self.loop.call_at(started + request.arrival_s, self._send, place, None)
            else:
                self.next_turns[request.follows].append(place)
        try:
            await self.done
        finally:
            self.loop.set_exception_handler(None)
        return recording_of(self.records, self.answers)

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the benchmark after an error in a callback, which would otherwise wait for ever."""
        if not self.done.done():
            self.done.set_exception(context.get("exception") or RuntimeError(context["message"]))

    def _now(self) -> float:
        return time.perf_counter() - self.started_s

    def _send(self, place: int, said: Said | None) -> None:
        request, record = self.load.requests[place], self.records[place]
        early_s = record.arrival_s - self._now()
        if early_s > 0:  # the loop's timers are only exact to a millisecond
            self.loop.call_later(early_s, self._send, place, said)
            return
        try:
            body = self.bodies.make(place, request, said)
        except RequestError as error:
            self._fail(place, str(error))
            return
        record.arrive(record.arrival_s, self.bodies.num_prompt_tokens(place, request))
        timeout_s = self.bodies.config.timeout_s
        answer = Answer(self._now, lambda: self._ended(place, timer), keeps_text=bool(self.next_turns[place]))
        self.answers[place] = answer
        timer = self.loop.call_later(timeout_s, answer.on_failure, f"no end within client.timeout_s={timeout_s:g}")
        record.start(self._now())
        self.pool.send(self.pool.request("POST", self.bodies.path, body), answer)

    def _ended(self, place: int, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        answer, record = self.answers[place], self.records[place]
        assert answer is not None
        if answer.error is not None:
            self._fail(place, answer.error)
            return
        record.arrive(record.arrival_s, answer.usage.get("prompt_tokens") or record.prompt_tokens)
        num_cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        record.finish(answer.finish_reason, sum(answer.counts), num_cached)
        record.note_times(answer.times_s[0], answer.times_s[-1])
        for turn in self.next_turns[place]:
            pause_s = self.load.requests[turn].arrival_s
            self.records[turn].arrive(self._now() + pause_s, self.records[turn].prompt_tokens)
            self.loop.call_later(pause_s, self._send, turn, answer.said)
        self._one_less()

    def _fail(self, place: int, error: str) -> None:
        self.records[place].fail(error)
        for turn in self.next_turns[place]:
            self._fail(turn, "not sent: the turn before failed")
        self._one_less()

    def _one_less(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self.done.set_result(None)
