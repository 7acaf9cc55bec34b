"""The conformance suite of executors: subclass it in your tests and return your executor from `make`.

Ranks are played by `report`: they connect and wait, so that no model is loaded.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from hookline.core.contracts import RankPlace, RankStart, StartedRank, WantedRanks
from hookline.core.executor.connections import MESSAGES, accept_all, connect_back
from hookline.core.executor.messages import JsonLines, send_message
from hookline.core.plugin.environment import difference, environment
from hookline.core.testing.checks import check, check_contract


def report(start: RankStart) -> None:
    """The main function of the suite's ranks: send the process id, and wait until the connection is closed."""
    with connect_back(start, MESSAGES) as engine:
        send_message(engine, {"pid": os.getpid()})
        engine.recv(1)


class ExecutorSuite:
    """`class TestMine(ExecutorSuite): def make(self, wanted): return Mine(MyConfig(), wanted)`.

    device: WantedRanks.device. num_ranks: ranks to start, which are one tensor-parallel group. patience_s: longest time
    in seconds of each wait.
    """

    device: ClassVar[str] = "cpu"
    num_ranks: ClassVar[int] = 2
    patience_s: ClassVar[float] = 60.0

    def make(self, wanted: WantedRanks) -> Any:
        """The executor under test."""
        raise NotImplementedError("return your executor from make()")

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        with self._made() as executor:
            check_contract("executor", type(executor))

    def test_says_where_each_rank_will_be(self) -> None:
        """A place for each rank, with an address, a device and the environment of this process."""
        with self._made() as executor:
            places, size = executor.places, self.num_ranks
            check(len(places) == size, f"it has {len(places)} places for {size} ranks")
            check(executor.host != "", "its host is empty")
            for rank, place in enumerate(places):
                check(isinstance(place, RankPlace), f"its places[{rank}] is a {type(place).__name__}")
                told = difference(place.environment, environment())
                check(told is None, f"places[{rank}] has another environment than this process: {told}")
                is_device = place.device == "cpu" or place.device.removeprefix("cuda:").isdecimal()
                check(is_device, f"places[{rank}].device is {place.device!r}, neither cpu nor cuda:N")
                check(bool(place.host), f"places[{rank}].host is empty")
            pids = [(place.node, place.pid) for place in places]
            check(len(set(pids)) == size, f"two ranks are in the same process: {pids}")

    def test_runs_each_rank_where_it_said(self) -> None:
        """`start` has each process call `run` of its RankStart; `wait` says when it is done."""
        with self._made() as executor, self._started(executor) as (started, said):
            for rank, (one, place) in enumerate(zip(started, executor.places, strict=True)):
                check(said[rank] == place.pid, f"rank {rank} runs in process {said[rank]}, and its place is {place}")
                check(not one.wait(0.0), f"wait says that rank {rank} is gone while it runs")

    def test_ends_a_rank_that_is_told_to_end(self) -> None:
        """A rank whose `run` returns is gone for `wait`, and `how_it_ended` has words for it."""
        with self._made() as executor:
            with self._started(executor) as (started, _):
                pass
            for rank, one in enumerate(started):
                check(one.wait(self.patience_s), f"wait does not say that rank {rank} has ended")
                check(isinstance(one.how_it_ended(), str), f"how_it_ended of rank {rank} returned no text")

    def test_kills_a_rank_and_no_other(self) -> None:
        """`kill` ends one process; a second call does nothing."""
        with self._made() as executor, self._started(executor) as (started, _):
            *others, last = started
            last.kill()
            last.kill()
            check(last.wait(self.patience_s), "a rank that was killed is not gone")
            told = last.how_it_ended()
            check(bool(told), f"how_it_ended of a killed rank returned {told!r}")
            check(not any(one.wait(0.0) for one in others), "another rank than the one that was killed is gone")

    def test_release_ends_ranks_that_still_run(self) -> None:
        """`release` ends ranks that still run; a second call does nothing."""
        with self._made() as executor, self._started(executor) as (started, _):
            executor.release()
            executor.release()
            for rank, one in enumerate(started):
                check(one.wait(self.patience_s), f"rank {rank} still runs after release")

    @contextmanager
    def _made(self) -> Iterator[Any]:
        executor = self.make(WantedRanks(self.num_ranks, self.num_ranks, self.device, 1, self.patience_s))
        try:
            yield executor
        finally:
            executor.release()

    @contextmanager
    def _started(self, executor: Any) -> Iterator[tuple[list[StartedRank], Mapping[int, int]]]:
        """Started ranks and the process that each of them says it is in; at the end their connections are closed."""
        secret, keys = secrets.token_hex(32), {(rank, MESSAGES) for rank in range(self.num_ranks)}
        with socket.create_server((executor.host, 0)) as server:
            port, target = server.getsockname()[1], f"{__name__}:report"
            starts = [RankStart(rank, executor.host, port, secret, target) for rank in range(self.num_ranks)]
            started = executor.start(starts)
            check(len(started) == self.num_ranks, f"start returned {len(started)} processes for {self.num_ranks} ranks")
            found = accept_all(server, secret, keys, self.patience_s, lambda: None)
        try:
            for connection in found.values():
                connection.settimeout(self.patience_s)
            yield list(started), {rank: JsonLines(one).wait()[0]["pid"] for (rank, _), one in found.items()}
        finally:
            for connection in found.values():
                with suppress(OSError):
                    connection.close()
