"""Results that the last pipeline stage sends to the first: tokens for its request table, all results for its host.

The first stage's next step starts from these tokens. A receive is posted as soon as a step is launched, and its tokens
are written into the table just before the micro-batch that needs them, so no stage waits for a whole step.
Legend: as in core/worker/request_table.py; X as in core/worker/results/scores.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hookline.core.step.message import Axis
from hookline.core.step.micro_batches import MicroBatch, joined
from hookline.core.util.arrays import IntArray, no_ints
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.results.token_transfer import Rows


class BackLink(Protocol):
    """How the first stage receives from the last one; see `core.distributed.stage_links.StageLinks`."""

    def receive_back(self, x: Tensor) -> Callable[[], None]:
        """Post a receive; the call returned waits for it, on the current stream or on a CPU's host."""
        ...


class StageLink(Protocol):
    """A stage's link for sending and receiving; see `core.distributed.stage_links.StageLinks`."""

    def send(self, x: Tensor) -> None:
        """Send to the next stage."""
        ...

    def receive(self, x: Tensor) -> None:
        """Receive from the stage before."""
        ...

    def send_back(self, x: Tensor) -> None:
        """Send from the last stage to the first."""
        ...


@dataclass
class Arrival:
    """The results of a micro-batch, or other rows, that the first stage receives.

    rows_N: of each draw, the row of the request table that its token belongs to; empty if the rows bring no tokens.
    arrive: waits for the rows; see BackLink.receive_back.
    """

    results_NX: Tensor
    rows_N: Tensor
    arrive: Callable[[], None]
    on_host_NX: Tensor | None = None
    event: Any = None
    has_come: bool = False

    def join(self) -> None:
        """Let the current stream, or on a CPU this thread, wait for the rows."""
        if not self.has_come:
            self.arrive()
            self.has_come = not self.results_NX.is_cuda  # on a GPU each stream waits by itself

    def write(self, table: RequestTable) -> None:
        """Write the tokens into the table, where the next step reads them."""
        self.join()
        count = len(self.rows_N)
        if count:
            tokens_N = self.results_NX if self.results_NX.ndim == 1 else self.results_NX[:count, 0]
            table.last_token_R[self.rows_N] = tokens_N.clamp(min=0)  # NO_TOKEN: see Kernels.keep_tokens

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. Always true on a CPU, where that cannot be found out."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> IntArray:
        """Wait for the results; returns them on the host."""
        if self.event is None:
            self.join()
            found: IntArray = self.results_NX.numpy()
            return found
        self.event.synchronize()
        assert self.on_host_NX is not None
        found = self.on_host_NX.numpy()
        return found


@dataclass(frozen=True)
class StepResults:
    """The results of a launched step along an axis, by its micro-batches; None for micro-batches without results."""

    parts: Sequence[MicroBatch]
    arrivals: Sequence[Rows | None]
    axis: Axis = Axis.DRAW

    @property
    def has_arrived(self) -> bool:
        """See Rows."""
        return all(one is None or one.has_arrived for one in self.arrivals)

    def wait(self) -> IntArray:
        """See StepResult."""
        return joined(self.parts, [no_ints() if one is None else one.wait() for one in self.arrivals], self.axis)


class ReturnedTokens:
    """Receives, on the first stage, results of the last stage. is_host: whether this rank's host collects them."""

    def __init__(self, table: RequestTable, link: BackLink, *, is_host: bool) -> None:
        self._table, self._link, self._is_host = table, link, is_host
        self._under_way: deque[Arrival] = deque()
        self._num_written = 0
        self._newest_R = np.zeros(table.padding_row + 1, dtype=np.int64)
        """For each row of the table, the number of the last arrival with a token of it, counted from 1."""
        self._num_before_last, self._num_posted = 0, 0
        is_cuda = table.device.type == "cuda"
        self._aside: Any = torch.cuda.Stream(table.device) if is_cuda else None  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Write the tokens of all steps but the last one; the host has collected those already."""
        self._write_until(self._num_before_last)
        self._num_before_last = self._num_posted

    def await_rows(self, rows: IntArray) -> None:
        """Write the tokens that these rows compute next, and all that were drawn before them."""
        self._write_until(int(self._newest_R[rows].max(initial=0)))

    def expect(self, parts: Sequence[MicroBatch], rows: Sequence[Tensor], num_columns: int) -> StepResults:
        """Post the receives of a step that was just launched.

        rows: of each part's draws, the rows of the table. num_columns: X; 0 for tokens alone.
        """
        return StepResults(parts, [self._post(*one, num_columns) for one in zip(parts, rows, strict=True)])

    def _post(self, part: MicroBatch, rows_N: Tensor, num_columns: int) -> Arrival | None:
        if not (count := len(part.places(Axis.DRAW))):
            return None
        shape = (count, num_columns) if num_columns else (count,)
        results_NX, step = torch.empty(shape, dtype=torch.int64, device=self._table.device), part.step
        arrival = self.receive(results_NX, rows_N)
        self._newest_R[step.decode_rows] = self._newest_R[step.chunk_rows[step.sampled_chunks]] = self._num_posted
        return arrival

    def receive(self, results_NX: Tensor, rows_N: Tensor | None = None) -> Arrival:
        """Post a receive into results_NX. rows_N: the table's rows whose tokens it brings; None if it brings none."""
        if rows_N is None:
            rows_N = results_NX.new_empty(0, dtype=torch.int64)
        arrival = Arrival(results_NX, rows_N, self._link.receive_back(results_NX))
        self._num_posted += 1
        self._under_way.append(arrival)  # this also keeps results_NX in memory until it is received
        if self._is_host and self._aside is not None:
            self._copy_to_host(arrival)
        return arrival

    def _copy_to_host(self, arrival: Arrival) -> None:
        results_NX = arrival.results_NX
        arrival.on_host_NX = torch.empty(results_NX.shape, dtype=results_NX.dtype, pin_memory=True)
        arrival.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            arrival.join()
            arrival.on_host_NX.copy_(results_NX, non_blocking=True)
            arrival.event.record()
        results_NX.record_stream(self._aside)

    def _write_until(self, number: int) -> None:
        while self._num_written < number:
            self._under_way.popleft().write(self._table)
            self._num_written += 1
