"""One replica as the supervisor has it: the engine's process, one after the other, its address and its orders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import zmq

from hookline.core.serve.processes.messages import Message, Stop, encode
from hookline.core.serve.processes.server_process import Restarts, ServerProcess
from hookline.core.serve.processes.shares import Share
from hookline.core.serve.settings import ServeRun

CLOSE_S = 10.0
"""For a process to end once it was told to, beyond what it has to do."""
_log = logging.getLogger("hookline")


class EngineReplica:
    """Replica `number` of a server. target: what its process runs, as "module:function". folder: of the sockets.

    process: the one that was started last.
    """

    def __init__(
        self, number: int, run: ServeRun, target: str, share: Share, folder: Path, context: zmq.Context[Any]
    ) -> None:
        self.number, self._run, self._target, self._share = number, run, target, share
        self._folder, self._context = folder, context
        self._num_started = 0
        self._orders: zmq.Socket[bytes] | None = None
        self._restarts = Restarts()
        self.has_given_up = False
        """Whether it is not started again."""
        self.start()

    @property
    def name(self) -> str:
        """What logs call it."""
        return "the engine" if self._run.serve.replicas == 1 else f"the engine of replica {self.number}"

    def start(self) -> None:
        """Start its process, the first or another one, at an address of its own."""
        self._num_started += 1
        self.address = f"ipc://{self._folder}/engine-{self.number}-{self._num_started}"
        if self._orders is not None:
            self._orders.close(0)
        self._orders = self._context.socket(zmq.DEALER)
        self._orders.set(zmq.ROUTING_ID, b"supervisor")
        self._orders.connect(self.address)
        task = {
            "config": self._run.tree,
            "address": self.address,
            "max_requests": self._run.serve.max_requests,
            "cores": self._share.cores,
        }
        self.process = ServerProcess(self._target, task, environ=self._share.environ)

    async def wait_until_ready(self) -> None:
        """Raises: StartError if it ended instead."""
        await self.process.wait_until_ready(f"{self.name}'s process")

    @property
    def lives(self) -> bool:
        """Whether it takes requests."""
        return self.process.ready.done() and not self.process.has_ended

    def introduction(self, front_name: str) -> dict[str, Any]:
        """What a front end must know to connect, once the engine is ready. front_name: as the engine will know it."""
        facts = self.process.ready.result()["facts"]
        return {"replica": self.number, "address": self.address, "name": front_name, "facts": facts}

    def death(self) -> str:
        """Why it serves nothing, once its process has ended; while another one starts, that it does."""
        process = self.process
        if not process.has_ended:
            return f"{self.name} is being started again"
        return process.reason or f"{self.name}'s process {process.how_it_ended()}"

    def restart_delay_s(self) -> float | None:
        """How long to wait before another process takes the place of one that has ended; None: no other one does."""
        delay_s = self._restarts.delay_s(self.process.served_s) if self._run.serve.restart else None
        self.has_given_up = delay_s is None
        return delay_s

    def order(self, message: Message) -> None:
        """Tell the engine's process something, without waiting."""
        assert self._orders is not None
        try:
            self._orders.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _log.error("%s's process takes no orders: %s", self.name, error)

    async def end(self) -> None:
        """Have it end in good order, and kill it if it does not."""
        self.order(Stop())
        await self.process.end(CLOSE_S if self.process.ready.done() else 0.0)
