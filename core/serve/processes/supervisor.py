"""The server's first process: it starts the engines' processes and the front ends, replaces processes that end, and
ends all of them in order. It holds the port and the folder of the sockets, and serves nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zmq

from hookline.core.serve.engine_metrics import SHARED
from hookline.core.serve.http.stopping import tell_of_signal
from hookline.core.serve.processes.engine_replica import CLOSE_S, EngineReplica
from hookline.core.serve.processes.messages import Gone
from hookline.core.serve.processes.server_process import LOOK_S, Restarts, ServerProcess, StartError, told_ends
from hookline.core.serve.processes.shares import Share
from hookline.core.serve.settings import ServeRun

FRONT = "hookline.core.serve.processes.front_main:main"
MAX_FOLDER = 60
"""Characters of the folder for temporary files: a socket's name has at most 107 in all."""
_log = logging.getLogger("hookline")


@dataclass(frozen=True)
class _FrontEnd:
    """A front end's process. names: its name at each replica's engine, by the replica's number."""

    process: ServerProcess
    names: dict[int, str] = field(default_factory=dict)


class Supervisor:
    """Runs a server. sockets: one for each front end, bound. announce: called once all are ready, with the model's
    names and how many tokens a request may have.

    engine: the main function of an engine's process, as "module:function". shares: each replica's part of the machine.
    """

    def __init__(
        self,
        run: ServeRun,
        sockets: list[socket.socket],
        announce: Callable[[Sequence[str], int], None],
        engine: str,
        shares: Sequence[Share] = (Share(),),
    ) -> None:
        self._run, self._sockets, self._announce = run, sockets, announce
        self._engine_target, self._shares = engine, shares
        is_long = len(tempfile.gettempdir()) > MAX_FOLDER
        self._folder = Path(tempfile.mkdtemp(prefix="hookline-", dir="/tmp" if is_long else None))
        counts = self._folder / "metrics"
        counts.mkdir()
        self._front_environ = {SHARED: str(counts)}  # a scrape reaches one front end, and gets the counts of all
        self._context: zmq.Context[Any] = zmq.Context()
        self._replicas: list[EngineReplica] = []
        self._fronts: dict[int, _FrontEnd] = {}
        self._num_connected = 0

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
                self._announce(ready["names"], ready["max_model_len"])
                watches += [asyncio.ensure_future(self._watch_replica(replica)) for replica in self._replicas]
                watches += [asyncio.ensure_future(self._watch_front(index)) for index in self._fronts]
                stopped = asyncio.ensure_future(self._stopping.wait())
                await asyncio.wait((stopped, *watches), return_when=asyncio.FIRST_COMPLETED)
                for watch in watches:
                    if watch.done():
                        watch.result()  # raises: a watch ends only by an error that ends the server
            return 0
        finally:
            for watch in watches:
                watch.cancel()
            await self._end_all()

    def _hear_signal(self) -> None:
        tell_of_signal(is_again=self._stopping.is_set(), drain_s=self._run.serve.drain_s)
        if self._stopping.is_set():  # told again: at once
            for front in self._fronts.values():
                front.process.tell({"drain": 0})
        self._stopping.set()

    async def _unless_stopped(self, work: Any) -> Any:
        """The result of some work; None if the server is told to stop before."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            return task.result()
        task.cancel()
        return None

    # --------------------------------------------------------------------------------------------------- start

    async def _start(self) -> dict[str, Any]:
        for number, share in enumerate(self._shares):
            replica = EngineReplica(number, self._run, self._engine_target, share, self._folder, self._context)
            self._replicas.append(replica)
        for index in range(len(self._sockets)):
            self._start_front(index)
        await asyncio.gather(*(replica.wait_until_ready() for replica in self._replicas))
        for front in self._fronts.values():
            for replica in self._replicas:
                self._connect(front, replica)
        news = [await front.process.wait_until_ready("a front end") for front in self._fronts.values()]
        return news[0]

    def _connect(self, front: _FrontEnd, replica: EngineReplica) -> None:
        """Tell a front end the address of a replica's engine, or that it is dead."""
        if replica.process.ready.done():
            self._num_connected += 1
            front.names[replica.number] = f"front-{self._num_connected}"
            front.process.tell({"engine": replica.introduction(front.names[replica.number])})
        if not replica.lives:
            front.process.tell({"dead": replica.death(), "replica": replica.number})

    def _start_front(self, index: int) -> None:
        one = self._sockets[index]
        task = {
            "config": self._run.tree,
            "serve": asdict(self._run.serve),
            "socket": one.fileno(),
            "folder": str(self._folder),
        }
        self._fronts[index] = _FrontEnd(ServerProcess(FRONT, task, (one.fileno(),), self._front_environ))

    # --------------------------------------------------------------------------------------------------- watch

    async def _watch_for_stops(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            engines = [replica.process for replica in self._replicas]
            for process in (*engines, *(front.process for front in self._fronts.values())):
                process.look()

    async def _watch_replica(self, replica: EngineReplica) -> None:
        """Tell the front ends when an engine ends, and start another one if that is wanted.

        Raises: StartError if no replica can be started any more.
        """
        while True:
            await asyncio.shield(replica.process.ended)
            reason = replica.death()
            _log.error("%s is dead: %s", replica.name, reason)
            for front in self._fronts.values():
                front.process.tell({"dead": reason, "replica": replica.number})
            delay_s = replica.restart_delay_s()
            if delay_s is None:
                if self._run.serve.restart:
                    self._give_up(replica, reason)
                return await asyncio.Future()  # unhealthy until somebody ends us
            await asyncio.sleep(delay_s)
            replica.start()
            try:
                await replica.wait_until_ready()
            except StartError:
                continue
            for front in self._fronts.values():
                self._connect(front, replica)
            _log.info("%s was started again", replica.name)

    def _give_up(self, replica: EngineReplica, reason: str) -> None:
        told = f"{told_ends(replica.name)}: {reason}"
        if all(one.has_given_up for one in self._replicas):
            raise StartError(told)
        _log.error("%s", told)

    async def _watch_front(self, index: int) -> None:
        """Replace a front end that ends."""
        restarts = Restarts()
        while True:
            front = self._fronts[index]
            await asyncio.shield(front.process.ended)
            ended = front.process.how_it_ended()
            delay_s = restarts.delay_s(front.process.served_s)
            if delay_s is None:
                raise StartError(f"{told_ends(f'front end {index}')}: it {ended}")
            _log.error("front end %d %s; another one takes its place", index, ended)
            for replica in self._replicas:
                if replica.lives and replica.number in front.names:
                    replica.order(Gone(front.names[replica.number]))
            await asyncio.sleep(delay_s)
            self._start_front(index)
            for replica in self._replicas:
                self._connect(self._fronts[index], replica)

    # ----------------------------------------------------------------------------------------------------- end

    async def _end_all(self) -> None:
        drain_s = self._run.serve.drain_s
        try:
            for front in self._fronts.values():
                front.process.tell({"drain": drain_s})
            await asyncio.gather(*(front.process.end(drain_s + CLOSE_S) for front in self._fronts.values()))
            await asyncio.gather(*(replica.end() for replica in self._replicas))
        finally:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            for one in self._sockets:
                one.close()
