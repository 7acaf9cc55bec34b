"""The executor over several ranks: rank 0 is this process, the others are its children, and all compute every step.

Rank 0 sends each step to the others over their sockets and then computes it like them; the collectives inside keep
them together. `core.assembly.engine` makes rank 0's worker and says what a child's process runs. Once a rank is lost,
every later call raises RankError: a group does not heal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hookline.core.errors import HooklineError, Interrupted, LostStep, RankError, RequestFault
from hookline.core.executor.links import RankLinks, uninterrupted
from hookline.core.step.executor import SizedExecutor, StepResult
from hookline.core.step.message import Step, pack, pack_late_rows
from hookline.core.step.timing import Clock
from hookline.core.util.arrays import IntArray, WordArray


class MultiprocExecutor(SizedExecutor):
    """`core.step.executor.Executor` over the ranks of one engine."""

    watches_steps = True

    def __init__(self, worker: SizedExecutor, links: RankLinks) -> None:
        self.worker, self.links, self._is_closed = worker, links, False

    @property
    def num_blocks(self) -> int:
        """See Executor."""
        return self.worker.num_blocks

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView.late_work."""
        return self.worker.late_work

    def launch(self, step: Step) -> _Handle:
        """See Executor.

        Raises: RankError if a rank is lost; RequestFault if the step failed on every rank for the same requests.
        """
        own = self._together(partial(self.worker.launch, step), pack(step))
        return _Handle(own, self.links.heartbeat.num_steps if step.is_agreed_on else 0)

    def _together(self, ours: Callable[[], Any], message: IntArray) -> Any:
        """Send a message to the other ranks, and do rank 0's part by `ours`, whose result is returned."""
        monitor = self.links.monitor
        with monitor.in_step(), self._telling_why(), uninterrupted(), monitor.interrupter.region():
            try:
                self.links.send(message)
                result = ours()
            except RankError:
                raise
            except RequestFault as error:
                self.links.heartbeat.end_step(failed=True)
                self.links.agree(self.links.heartbeat.num_steps, str(error))
                raise
            except BaseException as error:
                monitor.check()  # it may be no more than an echo of another rank's end
                # The others compute this step to its end, so from here on they are not where we are.
                monitor.fail(f"rank 0 (this process) broke off a step: {type(error).__name__}: {error}")
                if isinstance(error, LostStep):
                    error.end_engine()
                raise
            self.links.heartbeat.end_step()
        return result

    def late_rows(self, num_rows: int) -> WordArray:
        """See Executor."""
        return self.worker.late_rows(num_rows)

    def release(self, handle: _Handle, num_rows: int) -> None:
        """See Executor; the rows are sent to the other ranks from this one's buffer.

        Raises: as `launch` does.
        """
        rows_NW = self.late_rows(num_rows)
        self._together(partial(self.worker.release, handle.own, num_rows), pack_late_rows(rows_NW))
        if handle.to_agree_on:
            handle.to_agree_on = self.links.heartbeat.num_steps

    def collect(self, handle: _Handle) -> StepResult:
        """See Executor; the results are the same on every rank.

        Raises: RankError if a rank is lost.
        """
        with self.links.monitor.in_step(), self._telling_why():
            result = self.worker.collect(handle.own)
            if handle.to_agree_on:
                self.links.agree(handle.to_agree_on)
        self.links.monitor.check()
        return result

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """See Engine.tell_if_stuck."""
        self.links.monitor.tell_if_stuck = tell

    def time_steps(self) -> Clock:
        """See Executor; the times are of rank 0's device, and include its waits for other ranks."""
        return self.worker.time_steps()

    @contextmanager
    def _telling_why(self) -> Iterator[None]:
        """Turn the error of an interrupted collective into a RankError that names the rank at fault."""
        try:
            yield
        except (RankError, Interrupted) as error:
            raise self.links.monitor.verdict(error) from error
        except RuntimeError as error:
            self.links.monitor.check()
            raise error

    def close(self) -> None:
        """See Executor."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.links.close()
        finally:
            self.worker.close()


@dataclass
class _Handle:
    """A launched step. own: the handle of rank 0's worker.

    to_agree_on: the number of the step's last message, if plugins ran in it that may fail for single requests; else 0.
    """

    own: Any
    to_agree_on: int
