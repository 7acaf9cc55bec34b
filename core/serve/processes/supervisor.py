"""The process that a server is started with: it starts the engine's process and the front ends, replaces what ends, and
ends all of them in order. It holds the port and the folder of the sockets, and serves nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq

from hookline.core.errors import HooklineError
from hookline.core.serve.futures import first_of
from hookline.core.serve.processes.child_process import Child
from hookline.core.serve.processes.messages import Gone, Message, Stop, encode
from hookline.core.serve.settings import ServeRun

FRONT = "hookline.core.serve.processes.front_main:main"
CLOSE_S = 10.0
"""For a process to end once it was told to, beyond what it has to do."""
QUICK_S = 5.0
"""A process that ends sooner than this after its start has a fault that starting it again does not heal."""
MAX_QUICK_ENDS = 3
LOOK_S = 0.5
"""Between two looks at whether a process is stopped."""
STOPPED_LOOKS = 8
"""Looks in a row that find a process stopped, as by SIGSTOP, after which it is killed: nobody would hear of it else."""
MAX_FOLDER = 60
"""Characters of the folder for temporary files: a socket's name has at most 107 in all."""
_log = logging.getLogger("hookline")


class StartError(HooklineError):
    """A process of the server that ended before it was ready."""


class _Process:
    """A child with what it said: that it is ready, and why it cannot go on."""

    def __init__(self, target: str, task: dict[str, Any], pass_fds: tuple[int, ...] = ()) -> None:
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.reason: str | None = None
        self.name = ""
        """What the engine's process knows a front end by."""
        self.started_s = time.monotonic()
        self.child = Child(target, task, self._hear, pass_fds)
        self._num_stopped = 0

    def _hear(self, news: dict[str, Any]) -> None:
        self.reason = news.get("failed") or news.get("dead") or self.reason
        if "ready" in news and not self.ready.done():
            self.ready.set_result(news)

    def look(self) -> None:
        """Kill it if it has been stopped for long. One that computes or waits, for however long, is not stopped."""
        self._num_stopped = self._num_stopped + 1 if self.child.is_stopped else 0
        if self._num_stopped == STOPPED_LOOKS:
            self.reason = f"its process was stopped for {STOPPED_LOOKS * LOOK_S:g} s, as by SIGSTOP"
            self.child.kill()

    async def wait_until_ready(self, what: str) -> dict[str, Any]:
        """What it said when it was ready.

        Raises: StartError if it ended instead.
        """
        await first_of(self.ready, self.child.ended)
        if not self.ready.done():
            await asyncio.shield(self.child.ended)
            raise StartError(self.reason or f"{what} {self.child.how_it_ended()} while starting")
        return self.ready.result()


class Supervisor:
    """Runs a server. sockets: one for each front end, bound. announce: called once all are ready.

    engine: what the engine's process runs, as "module:function".
    """

    def __init__(
        self, run: ServeRun, sockets: list[socket.socket], announce: Callable[[dict[str, Any]], None], engine: str
    ) -> None:
        self._run, self._sockets, self._announce, self._engine_target = run, sockets, announce, engine
        is_long = len(tempfile.gettempdir()) > MAX_FOLDER
        self._folder = Path(tempfile.mkdtemp(prefix="hookline-", dir="/tmp" if is_long else None))
        self._context = zmq.Context()
        self._engine: _Process
        self._orders: zmq.Socket[bytes] | None = None
        self._fronts: dict[int, _Process] = {}
        self._num_started = 0
        self._address = ""

    async def serve(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code."""
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._hear_signal)
        watches = [asyncio.ensure_future(self._watch_for_stops())]
        try:
            ready = await self._unless_stopped(self._start())
            if ready is not None:
                self._announce(ready)
                watches.append(asyncio.ensure_future(self._watch_engine()))
                watches += [asyncio.ensure_future(self._watch_front(index)) for index in self._fronts]
                stopped = asyncio.ensure_future(self._stopping.wait())
                await asyncio.wait({stopped, *watches}, return_when=asyncio.FIRST_COMPLETED)
                for watch in watches:
                    if watch.done():
                        watch.result()  # it ends only by what nobody can go on with
            return 0
        finally:
            for watch in watches:
                watch.cancel()
            await self._end_all()

    def _hear_signal(self) -> None:
        if self._stopping.is_set():  # told again: at once
            for front in self._fronts.values():
                front.child.tell({"drain": 0})
        self._stopping.set()

    async def _unless_stopped(self, work: Any) -> Any:
        """The result of some work; None if we are told to stop before."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    # --------------------------------------------------------------------------------------------------- start

    async def _start(self) -> dict[str, Any]:
        self._start_engine()
        for index in range(len(self._sockets)):
            self._start_front(index)
        await self._engine.wait_until_ready("the engine's process")
        for index in self._fronts:
            self._connect(index)
        news = [await front.wait_until_ready("a front end") for front in self._fronts.values()]
        return news[0]

    def _connect(self, index: int) -> None:
        """Tell a front end where the engine is, or that it is dead."""
        front, engine = self._fronts[index], self._engine
        if engine.child.ended.done():
            front.child.tell({"dead": self._death()})
        if engine.ready.done():
            self._num_started += 1
            front.name = f"front-{index}-{self._num_started}"
            facts = engine.ready.result()["facts"]
            front.child.tell({"engine": {"address": self._address, "name": front.name, "facts": facts}})

    def _death(self) -> str:
        return self._engine.reason or f"the engine's process {self._engine.child.how_it_ended()}"

    def _start_engine(self) -> None:
        self._num_started += 1
        self._address = f"ipc://{self._folder}/engine-{self._num_started}"
        if self._orders is not None:
            self._orders.close(0)
        self._orders = self._context.socket(zmq.DEALER)
        self._orders.set(zmq.ROUTING_ID, b"supervisor")
        self._orders.connect(self._address)
        task = {"config": self._run.tree, "address": self._address, "max_requests": self._run.serve.max_requests}
        self._engine = _Process(self._engine_target, task)

    def _start_front(self, index: int) -> None:
        one = self._sockets[index]
        task = {
            "config": self._run.tree,
            "serve": asdict(self._run.serve),
            "socket": one.fileno(),
            "folder": str(self._folder),
        }
        self._fronts[index] = _Process(FRONT, task, (one.fileno(),))

    # --------------------------------------------------------------------------------------------------- watch

    async def _watch_for_stops(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for process in (self._engine, *self._fronts.values()):
                process.look()

    async def _watch_engine(self) -> None:
        """Tell the front ends when the engine ends, and start another one if that is wanted."""
        num_quick = 0
        while True:
            engine = self._engine
            await asyncio.shield(engine.child.ended)
            reason = self._death()
            _log.error("the engine is dead: %s", reason)
            for front in self._fronts.values():
                front.child.tell({"dead": reason})
            if not self._run.serve.restart:
                return await asyncio.Future()  # unhealthy until somebody ends us
            num_quick = num_quick + 1 if time.monotonic() - engine.started_s < QUICK_S else 0
            if num_quick >= MAX_QUICK_ENDS:
                raise StartError(f"the engine has ended {num_quick} times right after its start: {reason}")
            self._start_engine()
            try:
                await self._engine.wait_until_ready("the engine's process")
            except StartError:
                continue
            for index in self._fronts:
                self._connect(index)
            _log.info("the engine was started again")

    async def _watch_front(self, index: int) -> None:
        """Put another one in the place of a front end that ends."""
        num_quick = 0
        while True:
            front = self._fronts[index]
            await asyncio.shield(front.child.ended)
            _log.error("front end %d %s; another one takes its place", index, front.child.how_it_ended())
            num_quick = num_quick + 1 if time.monotonic() - front.started_s < QUICK_S else 0
            if num_quick >= MAX_QUICK_ENDS:
                raise StartError(f"front end {index} has ended {num_quick} times right after its start")
            self._order(Gone(front.name))
            self._start_front(index)
            self._connect(index)

    def _order(self, message: Message) -> None:
        assert self._orders is not None
        try:
            self._orders.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.error("the engine's process takes no orders: %s", error)

    # ----------------------------------------------------------------------------------------------------- end

    async def _end_all(self) -> None:
        drain_s = self._run.serve.drain_s
        try:
            for front in self._fronts.values():
                front.child.tell({"drain": drain_s})
            await asyncio.gather(*(front.child.end(drain_s + CLOSE_S) for front in self._fronts.values()))
            if self._orders is not None:
                self._order(Stop())
                await self._engine.child.end(CLOSE_S if self._engine.ready.done() else 0.0)
        finally:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            for one in self._sockets:
                one.close()
