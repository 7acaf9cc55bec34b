"""A replica as the supervisor sees it: its engine's process, started again after a fault, its address, its orders."""

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
"""Seconds that a process has to end once it was told to, besides the time for its running requests."""
_log = logging.getLogger("hookline")


class EngineReplica:
    """Replica `number` of a server. target: its process' main function, as "module:function". folder: of the sockets.

    process: the engine process that was started last.
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
        """The name in log messages."""
        return "the engine" if self._run.serve.replicas == 1 else f"the engine of replica {self.number}"

    def start(self) -> None:
        """Start its process, for the first time or again, at a new address."""
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
            "tells_of_metrics": self.number == 0 and self._num_started == 1,
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
        """The message from which a front end connects to the ready engine. front_name: the front end's name there."""
        facts = self.process.ready.result()["facts"]
        return {"replica": self.number, "address": self.address, "name": front_name, "facts": facts}

    def death(self) -> str:
        """Why the replica serves nothing after its process has ended, or that it is being started again."""
        process = self.process
        if not process.has_ended:
            return f"{self.name} is being started again"
        return process.reason or f"{self.name}'s process {process.how_it_ended()}"

    def restart_delay_s(self) -> float | None:
        """Seconds to wait before the ended process is replaced; None: it is not replaced."""
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
