"""Executors with one planted fault each, and what the conformance suite must say."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from hookline.core.contracts import RankExecutor, RankPlace, RankStart, StartedRank, WantedRanks
from hookline.core.plugin.environment import environment

HOST = "127.0.0.1"
our_environment = cache(environment)


class ForkedRank(StartedRank):
    """A child that waits for its RankStart at a pipe, whose place is known meanwhile."""

    def __init__(self) -> None:
        read, self.write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads of pytest's, which the child does not need
            self.pid = os.fork()
        if self.pid == 0:
            try:
                with os.fdopen(read, "rb") as told:
                    rank, port, *texts = told.readline().decode().split()
                    RankStart(int(rank), HOST, int(port), *texts).run()
            finally:
                os._exit(0)
        os.close(read)
        self.status: int | None = None

    def start(self, start: RankStart) -> None:
        os.write(self.write, f"{start.rank} {start.port} {start.secret} {start.target}\n".encode())
        os.close(self.write)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            elif time.monotonic() >= until_s:
                return False
            else:
                time.sleep(0.01)
        return True

    def how_it_ended(self) -> Any:
        return f"ended with status {self.status}" if self.wait(2.0) else "closed its connection"


class PlainExecutor(RankExecutor):
    rank: type[ForkedRank] = ForkedRank

    def __init__(self, config: Any, wanted: WantedRanks) -> None:
        self.host, self.ranks = HOST, [self.rank() for _ in range(wanted.num_ranks)]
        self.places: list[RankPlace] = [RankPlace(HOST, HOST, one.pid, "cpu", our_environment()) for one in self.ranks]

    def start(self, starts: Sequence[RankStart]) -> Sequence[StartedRank]:
        for rank, start in zip(self.ranks, starts, strict=True):
            rank.start(start)
        return self.ranks

    def release(self) -> None:
        for rank in self.ranks:
            if rank.status is None:
                rank.kill()
                rank.wait(5.0)


class HasOnePlaceTooFew(PlainExecutor):
    def __init__(self, config: Any, wanted: WantedRanks) -> None:
        super().__init__(config, wanted)
        self.places.pop()


class SaysNothingOfTheEnvironment(PlainExecutor):
    def __init__(self, config: Any, wanted: WantedRanks) -> None:
        super().__init__(config, wanted)
        self.places = [replace(place, environment={}) for place in self.places]


class NamesTheEnginesProcess(PlainExecutor):
    def __init__(self, config: Any, wanted: WantedRanks) -> None:
        super().__init__(config, wanted)
        self.places = [replace(place, pid=os.getpid()) for place in self.places]


class StartsRanksInAnotherOrder(PlainExecutor):
    def start(self, starts: Sequence[RankStart]) -> Sequence[StartedRank]:
        super().start(starts[::-1])
        return self.ranks


class KeepsRanksAfterRelease(PlainExecutor):
    def release(self) -> None:
        if all(rank.status is None for rank in self.ranks):
            return


class OneThatCannotBeKilled(ForkedRank):
    def kill(self) -> None: ...


class CannotKill(PlainExecutor):
    rank = OneThatCannotBeKilled

    def release(self) -> None:
        for rank in self.ranks:
            ForkedRank.kill(rank)
            rank.wait(5.0)


class SilentRank(ForkedRank):
    def how_it_ended(self) -> Any:
        return None


class DoesNotSayHowRanksEnd(PlainExecutor):
    rank = SilentRank


class LosesSightOfRanks(ForkedRank):
    def wait(self, timeout_s: float) -> bool:
        return super().wait(timeout_s) or True


class SaysThatRanksAreGone(PlainExecutor):
    rank = LosesSightOfRanks

    def release(self) -> None:
        for rank in self.ranks:
            rank.kill()


FAULTS: dict[type, str] = {
    HasOnePlaceTooFew: "test_says_where_each_rank_will_be: AssertionError: it has 1 places for 2 ranks",
    SaysNothingOfTheEnvironment: "test_says_where_each_rank_will_be: "
    "places[0] has another environment than this process: ",
    NamesTheEnginesProcess: "test_says_where_each_rank_will_be: AssertionError: two ranks are in the same process",
    StartsRanksInAnotherOrder: "test_runs_each_rank_where_it_said: AssertionError: rank 0 runs in process ",
    KeepsRanksAfterRelease: "test_release_ends_ranks_that_still_run: AssertionError: rank 0 still runs after release",
    CannotKill: "test_kills_a_rank_and_no_other: AssertionError: a rank that was killed is not gone",
    DoesNotSayHowRanksEnd: "test_ends_a_rank_that_is_told_to_end: AssertionError: how_it_ended of rank 0 returned no",
    SaysThatRanksAreGone: "test_runs_each_rank_where_it_said: AssertionError: wait says that rank 0 is gone while",
}
