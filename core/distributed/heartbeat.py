"""Heartbeats: a few words of each rank by which the monitor sees that it runs, gets further, or is compiling."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import torch

from hookline.core.distributed.side_stream import SideStream
from hookline.core.util.arrays import IntArray

COMPILERS = (
    "triton.compiler",
    "torch._dynamo.convert_frame",
    "torch._inductor.async_compile",
    "torch._inductor.codecache",
    "torch.utils.cpp_extension",
    "flashinfer.jit",
)
"""Packages and modules that are on the stack of a thread while it compiles. Other parts of torch's compilers are left
out: compiled code runs under them, or their threads live on after a compilation."""


def is_compiling(compilers: tuple[str, ...] = COMPILERS) -> bool:
    """Whether one of these modules is on the stack of any thread. Takes some microseconds a thread."""
    return any(
        _lies_in(frame.f_globals.get("__name__"), compilers)
        for top in sys._current_frames().values()
        for frame in _stack(top)
    )


def _stack(top: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = top
    while frame is not None:
        yield frame
        frame = frame.f_back


def _lies_in(module: object, packages: tuple[str, ...]) -> bool:
    """Whether a module's name is one of these or of a module inside; of code run by exec() it may be any object."""
    return isinstance(module, str) and f"{module}.".startswith(tuple(f"{package}." for package in packages))


NUM_NUMBERS = 1 << 16
"""Marks are numbered modulo this; far fewer are passed between two beats."""


class DeviceMarks:
    """`core.distributed.heartbeat.Marks` of a GPU, queued on the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self._numbers_K = torch.arange(NUM_NUMBERS, device=device)
        self._latest_1 = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen_1 = self._latest_1.numpy()
        self._aside = SideStream(device)
        self._next, self._num_reached, self._before = 0, 0, 0

    def mark(self) -> None:
        """See Marks. Does nothing during a capture, since each replay of the graph would repeat the same mark."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._next = (self._next + 1) % NUM_NUMBERS
        number_1 = self._numbers_K[self._next : self._next + 1]
        self._aside(lambda: self._latest_1.copy_(number_1, non_blocking=True))

    def num_reached(self) -> int:
        """See Marks."""
        latest = int(self._seen_1[0])
        self._num_reached += (latest - self._before) % NUM_NUMBERS
        self._before = latest
        return self._num_reached


BEAT_S = 0.2
"""Seconds between two beats."""
HEARTBEAT_WORDS = 7
"""Words for each rank: beats, progress of the host, progress of its device, whether it compiles, number of steps that
ended, number of the last step that failed for single requests, and whether it waits for another rank.
"""
WAITING = 1 << 40
"""Added to the progress of a rank that waits for another one, so that a waiting rank always counts as further than a
rank that computes: the ranks of unlike stages do unlike numbers of collectives, and the numbers alone do not show who
waits."""


class Marks(Protocol):
    """Marks between the work that a device was given, by which its progress can be counted."""

    def mark(self) -> None:
        """Queue a mark behind the work that the device has been given."""
        ...

    def num_reached(self) -> int:
        """How many marks the device has passed; called from another thread."""
        ...


class Heartbeat:
    """The words of one rank; only the rank itself writes them."""

    def __init__(self, words: IntArray, rank: int) -> None:
        self._words = words[rank * HEARTBEAT_WORDS : (rank + 1) * HEARTBEAT_WORDS]
        self._marks: Marks | None = None

    def beat(self) -> None:
        """Note that the process runs, whether it compiles, and how far its device is; called by a second thread."""
        self._words[0] += 1
        self._words[3] = is_compiling()
        if self._marks is not None:
            self._words[2] = self._marks.num_reached()

    def advance(self) -> None:
        """Count progress of the host: a step ended, or a collective was reached."""
        self._words[1] += 1

    def end_step(self, *, failed: bool = False) -> None:
        """Count a step that ended. failed: whether it failed for single requests."""
        if failed:
            self._words[5] = self._words[4] + 1
        self._words[4] += 1
        self.advance()

    def take(self, words: Sequence[int]) -> None:
        """Copy the words of a rank in another process."""
        self._words[:] = words

    @property
    def words(self) -> list[int]:
        """All words, for `take` in another process."""
        words: list[int] = self._words.tolist()
        return words

    @property
    def num_steps(self) -> int:
        """Steps that ended."""
        return int(self._words[4])

    @property
    def last_failed(self) -> int:
        """The last step that failed for single requests, counted from 1; 0 if none did."""
        return int(self._words[5])

    def reach_collective(self) -> None:
        """Count that the host reached its next collective, and queue a mark that counts when the device does."""
        self.advance()
        if self._marks is not None:
            self._marks.mark()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around a wait of the host for another rank that counts of collectives do not show; see WAITING."""
        self._words[6] = 1
        try:
            yield
        finally:
            self._words[6] = 0

    def follow(self, marks: Marks) -> None:
        """Count the marks that the device reaches as progress, too."""
        self._marks = marks

    @property
    def beats(self) -> int:
        """How many beats there were so far."""
        return int(self._words[0])

    @property
    def progress(self) -> int:
        """How far the rank has got, counted in collectives and steps, which ranks of one stage do in common."""
        return int(self._words[1] + self._words[2]) + WAITING * int(self._words[6])

    @property
    def is_compiling(self) -> bool:
        """Whether the rank was compiling at its last beat."""
        return bool(self._words[3])
