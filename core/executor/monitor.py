"""Watches the processes of an engine's ranks and ends all of them when one is lost, so that no rank waits for ever.

It is a thread of the engine's process, which may be rank 0's process as well. A rank is lost when its process ends,
when it reports an error, when it gives no sign of life, or when a step gets no further. One loss causes errors on other
ranks; only the first cause is reported. Then all processes are killed, which breaks off the collective that
rank 0 may be stuck in. Only the time that this thread runs is counted, so that a process group that was suspended as a
whole can go on.

With the default timeouts callers are told within 5 s: engine.rank_timeout_s is 4.5 s, and a check of the ranks comes up
to TICK_S later, or twice that if their heartbeats are shared memory. A rank whose threads are all held up for 4 s is
silent for BEAT_S longer, and is not lost.

A stuck rank is told from a slow one by the others: all have as much to do until the next collective, so a rank that is
late there gets engine.step_timeout_s beyond what the others took. Until a first rank arrives, all get STEP_TIMEOUTS
times as much, since on a CPU single layers of a large step may take that long. Time spent compiling does not count.

However the group ends, rank 0 finds out at its next collective, for which its device is freed of waits for others; if
it does not get there, it is interrupted.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hookline.core.distributed.heartbeat import BEAT_S, Heartbeat
from hookline.core.errors import HooklineError, RankError, one_short_line
from hookline.core.executor.peer import KILLED_S, Peer, await_end, kill
from hookline.core.util.interrupt import Interrupter

logger = logging.getLogger("hookline")
TICK_S = 0.1
SEEN_LATE_S = BEAT_S + TICK_S
"""Longest time in seconds from a rank's progress until the monitor sees it."""
GRACE_S = 0.5
"""Seconds to wait for the cause of a loss: ranks whose collectives broke off because of it may report earlier."""
RELEASING_S = 60.0
"""Seconds for which the device of a rank 0 that does not leave its step is still freed again and again."""
START_SILENCE_S = 120.0
"""Seconds without a sign of life while a process starts, when imports and compilers keep its threads from running."""
STEP_TIMEOUTS = 12
"""How many times engine.step_timeout_s ranks on a CPU have until the first of them reaches the next collective."""
COMPILE_S = 300.0
"""Seconds of compiling that do not count as being stuck."""


@dataclass(frozen=True)
class Timeouts:
    """rank_s, step_s, start_s: engine.rank_timeout_s, step_timeout_s and start_timeout_s.

    all_s: time limit between two collectives while no rank has reached the next one.
    """

    rank_s: float
    step_s: float
    all_s: float
    start_s: float = 300.0


class Monitor:
    """Decides when the group is lost, and ends it. children: the ranks in processes of their own.

    heartbeats: of all ranks, rank 0's first. release: called to free rank 0's device if it is this process, once
    the group has ended, and again until rank 0 is out of its step or a minute has passed.
    """

    def __init__(self, children: Sequence[Peer], heartbeats: Sequence[Heartbeat], timeouts: Timeouts) -> None:
        self.children, self.heartbeats, self.timeouts = children, heartbeats, timeouts
        self.release: Callable[[], None] = lambda: None
        self.interrupter = Interrupter()
        self.tell_if_stuck: Callable[[HooklineError], None] = lambda error: None
        """Called, by the thread that watches, if rank 0 does not leave its step even when it is interrupted."""
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._said: dict[str, dict[int, Any]] = {"here": {}, "tried": {}, "ready": {}}
        self._suspects: list[tuple[bool, str]] = []
        self._places: dict[int, str] = {}
        """The code that each child's main thread is in while it starts."""
        self._faults: dict[int, tuple[int, str]] = {}
        """By child: the last step that failed for single requests, counted from 1, and the error."""
        self._alone_s = 0.0
        self._awaited, self._late, self._late_s = "", [0], 0.0
        """`_awaited`: the message that rank 0 waits for from all children. `_late`: while an engine starts, the ranks
        that the others wait for, since they have not sent it or are behind; `_late_s`: for how long.
        """
        self._silent_s, self._grace_s = [0.0] * len(heartbeats), 0.0
        self._stuck_s, self._taken_s, self._compiled_s = 0.0, 0.0, 0.0
        self._beats, self._progress = [0] * len(heartbeats), [0] * len(heartbeats)
        self._in_step, self._is_starting, self._started = False, False, False
        self._stopped = threading.Event()
        self.late_work: dict[str, int] = {}
        """See EngineView.late_work: from the last message of rank 0's process, if rank 0 has its own process."""
        self._gone: set[int] = set()
        self._thread = threading.Thread(target=self._watch, name="hookline-ranks", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: from now on processes may end. A second call does nothing."""
        self._stopped.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ------------------------------------------------------------------------------------------------- for the group

    def wait_until_all(self, said: str) -> dict[int, Any]:
        """Wait until every child has sent "here", "tried" or "ready"; returns each child's value with it.

        Raises: RankError with the cause if the group ends meanwhile.
        """
        with self._changed:
            self._awaited = said
            self._changed.wait_for(lambda: self.failure or len(self._said[said]) == len(self.children))
            self._awaited = ""
        self.check()
        self._started = said == "ready"
        return self._said[said]

    def check(self) -> None:
        """Raise RankError if the group has ended."""
        if self.failure is not None:
            raise RankError(self.failure)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context around code that may wait for other ranks: inside, they are watched for progress.

        Raises: RankError if the group has ended.
        """
        self._stuck_s, self._taken_s, self._in_step = 0.0, 0.0, True
        try:
            self.check()
            yield
        finally:
            self._in_step = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A context around rank 0's computations with the other ranks while it starts."""
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False

    def verdict(self, echo: BaseException) -> RankError:
        """The error to raise after a collective of rank 0 broke off: the cause on another rank, or else `echo`."""
        patience_s = self.timeouts.rank_s + GRACE_S + 1.0
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, patience_s)
        if self.failure is None:
            self.fail(f"rank 0 of {len(self.heartbeats)} (this process): {echo}")
        return RankError(self.failure)

    def fail(self, cause: str, *, breaks_off: bool = False) -> None:
        """End the group for this reason, unless it has ended already. breaks_off: interrupt rank 0 at once."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = f"{cause}. The engine has ended; make a new one"
            kill(self.children)
            self._changed.notify_all()
        if breaks_off:
            self.interrupter.break_off()
        self._release()
        # What their GPUs still did after that may have undone it.
        await_end(self.children, KILLED_S)
        self._release()

    def fail_alone(self, ranks: Sequence[int], fault: str) -> None:
        """End the group, since these ranks failed in a step that others completed. fault: rank 0's, if it is one."""
        with self._changed:
            own = {0} if self._has_rank_0 else set()
            self._changed.wait_for(lambda: self.failure is not None or set(ranks) <= {*own, *self._faults}, GRACE_S)
            told = fault if own & set(ranks) else self._faults.get(ranks[0], (0, "for an unknown cause"))[1]
        self.fail(f"{' and '.join(map(self._name, ranks))} alone failed in a step: {told}")

    @property
    def _has_rank_0(self) -> bool:
        """Whether rank 0 is this process."""
        return len(self.children) < len(self.heartbeats)

    @property
    def alone_s(self) -> float:
        """Seconds that ranks which failed in a step wait for the others to fail too: before these count as stuck."""
        return min(self.timeouts.step_s, self.timeouts.rank_s) / 2

    def _release(self) -> None:
        try:
            self.release()
        except Exception as error:  # must hide no cause, nor end the thread that watches
            logger.error("while rank 0's device was freed: %s", error)

    # -------------------------------------------------------------------------------------------------- the thread's

    def _watch(self) -> None:
        try:
            self._judge_until_the_end()
        except Exception as error:  # a bug of ours; without a monitor, ranks could wait for ever
            logger.exception("while ranks were watched")
            self.fail(f"the ranks cannot be watched any more: {one_short_line(error)}")
        self._see_rank_0_out()

    def _judge_until_the_end(self) -> None:
        poll = select.poll()
        of_socket = {child.connection.fileno(): child for child in self.children}
        for socket_fd in of_socket:
            poll.register(socket_fd, select.POLLIN)
        last = time.monotonic()
        while not self._stopped.is_set() and self.failure is None:
            for socket_fd, _ in poll.poll(int(TICK_S * 1000)):
                if not self._hear(of_socket[socket_fd]):
                    poll.unregister(socket_fd)
            now = time.monotonic()
            self._judge(min(now - last, self._longest_look_s))
            last = now

    @property
    def _longest_look_s(self) -> float:
        """Most seconds between two checks that count: a busy machine's delays do, the time of a suspension does not."""
        return max(2 * TICK_S, min(self.timeouts.rank_s, self.timeouts.step_s) / 4)

    def _see_rank_0_out(self) -> None:
        """After the group's end: free rank 0's device until rank 0 leaves its step; interrupt rank 0 if it does not."""
        self._keep_releasing(self.timeouts.step_s)
        if self._is_stuck:
            logger.error("%s", self.failure)
            self.interrupter.break_off()
        self._keep_releasing(GRACE_S)
        if self._is_stuck:
            self.tell_if_stuck(RankError(str(self.failure)))
        self._keep_releasing(RELEASING_S)

    @property
    def _is_stuck(self) -> bool:
        """Whether rank 0 is in its step still."""
        return self._in_step and not self._stopped.is_set()

    def _keep_releasing(self, seconds: float) -> None:
        """Free rank 0's device again and again for this long, or until rank 0 is out of its step or its start."""
        last = time.monotonic()
        while (self._in_step or self._is_starting) and seconds > 0 and not self._stopped.wait(TICK_S):
            self._release()
            now = time.monotonic()
            seconds -= min(now - last, self._longest_look_s)
            last = now

    def _hear(self, child: Peer) -> bool:
        """Handle a child's messages; returns False once it is gone."""
        messages = child.line.receive()
        for message in messages or ():
            if "words" in message:
                self.heartbeats[child.rank].take(message["words"])
            elif "log" in message:
                logger.log(message["log"], "%s", message["text"])
            elif "late_work" in message:
                self.late_work = message["late_work"]
            elif "fault" in message:
                with self._changed:
                    self._faults[child.rank] = message["step"], message["fault"]
                    self._changed.notify_all()
            elif "place" in message:
                self._places[child.rank] = f", {message['place']},"
            elif "error" in message:
                self._suspect(child, f"failed{self._when()}: {message['error']}", is_echo=message["is_echo"])
                self._gone.add(child.rank)
            else:
                with self._changed:
                    for said in self._said.keys() & message.keys():
                        self._said[said][child.rank] = message[said]
                    self._changed.notify_all()
        if messages is None and not self._stopped.is_set() and child.rank not in self._gone:
            self._gone.add(child.rank)
            is_known = any(not is_echo for is_echo, _ in self._suspects)  # why takes a while to find out
            how = "closed its connection" if is_known else child.how_it_ended()
            self._suspect(child, f"{how}{self._when()}", is_echo=is_known)
        return messages is not None

    def _suspect(self, child: Peer, what: str, *, is_echo: bool) -> None:
        self._suspects.append((is_echo, f"{self._name(child.rank)} {what}"))

    def _judge(self, passed_s: float) -> None:
        """Fail with a cause if a rank is at fault. passed_s: seconds since the last look."""
        if self._suspects:
            self._grace_s += passed_s
            is_echo, cause = min(self._suspects, key=lambda suspect: suspect[0])
            if not is_echo or self._grace_s > GRACE_S:
                self.fail(cause)
            return
        self._judge_silence(passed_s)
        self._judge_faults(passed_s)
        self._judge_progress(passed_s)
        if not self._started:
            self._judge_start(passed_s)

    def _judge_silence(self, passed_s: float) -> None:
        for child in self.children:
            beats = self.heartbeats[child.rank].beats
            self._silent_s[child.rank] = (
                0.0 if beats != self._beats[child.rank] else (self._silent_s[child.rank] + passed_s)
            )
            self._beats[child.rank] = beats
            if self._silent_s[child.rank] <= self.timeouts.rank_s:
                continue
            # While a process starts, imports and compilers may hold its thread up; a stopped one does neither.
            is_stopped = not self._started and child.is_stopped
            is_strict = self._started or is_stopped
            limit_s = self.timeouts.rank_s if is_strict else max(START_SILENCE_S, self.timeouts.rank_s)
            if self._silent_s[child.rank] > limit_s:
                key = " (engine.rank_timeout_s)" if is_strict else ""
                why = ": it is stopped, as by SIGSTOP" if is_stopped else ""
                name = self._name(child.rank)
                self.fail(f"{name} has given no sign of life for {limit_s:g} s{key}{self._when()}{why}")

    def _judge_faults(self, passed_s: float) -> None:
        """End the group if a child failed before a collective, and the other ranks go on waiting for it there."""
        others = self.heartbeats[:1] if self._has_rank_0 else self.heartbeats
        num_steps = min(heartbeat.num_steps for heartbeat in others)
        with self._changed:
            early = [rank for rank, (step, _) in self._faults.items() if step > num_steps]
        self._alone_s = self._alone_s + passed_s if early else 0.0
        if self._alone_s > self.alone_s:
            self.fail_alone(early, "")

    def _judge_progress(self, passed_s: float) -> None:
        if self._has_rank_0:
            self.heartbeats[0].beat()
        before, self._progress = self._progress, [heartbeat.progress for heartbeat in self.heartbeats]
        if not (self._in_step and self._started) or min(self._progress) != min(before):
            self._stuck_s, self._taken_s, self._compiled_s = 0.0, 0.0, 0.0
        elif self._progress != before:  # the first ones arrive where the last are waited for
            self._taken_s, self._stuck_s = self._taken_s + self._stuck_s, 0.0
        elif any(heartbeat.is_compiling for heartbeat in self.heartbeats) and self._compiled_s < COMPILE_S:
            self._compiled_s += passed_s
        else:
            self._stuck_s += passed_s
        is_waited_for = min(self._progress) != max(self._progress)
        taken_s = max(0.0, self._taken_s - SEEN_LATE_S)
        limit_s = self.timeouts.step_s + taken_s if is_waited_for else self.timeouts.all_s
        if self._stuck_s > limit_s:
            self._end_stuck()

    def _judge_start(self, passed_s: float) -> None:
        """While starting: end the group if ranks are late at a first collective, or with a message to rank 0."""
        before, progress = self._late, self._progress
        self._late = [rank for rank, count in enumerate(progress) if count < max(progress)]
        if self._awaited and (self._has_rank_0 or self._said[self._awaited]):
            self._late = [child.rank for child in self.children if child.rank not in self._said[self._awaited]]
        is_busy = any(heartbeat.is_compiling for heartbeat in self.heartbeats)
        self._late_s = self._late_s + passed_s * (not is_busy) if self._late and self._late == before else 0.0
        if self._late_s > self.timeouts.start_s:
            who = " and ".join(f"{self._name(rank)}{self._places.get(rank, '')}" for rank in self._late)
            what = f"kept the others waiting for {self.timeouts.start_s:g} s (engine.start_timeout_s) while starting"
            self.fail(f"{who} {what}", breaks_off=0 in self._late)

    def _end_stuck(self) -> None:
        behind = [rank for rank, count in enumerate(self._progress) if count == min(self._progress)]
        self.fail(
            f"{' and '.join(self._name(rank) for rank in behind)} got no further in a step for {self._stuck_s:.1f} s "
            f"(engine.step_timeout_s={self.timeouts.step_s:g}); if the step is only slow, raise engine.step_timeout_s",
            breaks_off=0 in behind,
        )
        if 0 in behind:
            logger.error("%s", self.failure)  # whoever called may be out of reach

    def _when(self) -> str:
        return "" if self._started else " while starting"

    def _name(self, rank: int) -> str:
        who = next((str(child) for child in self.children if child.rank == rank), "this process")
        return f"rank {rank} of {len(self.heartbeats)} ({who})"
