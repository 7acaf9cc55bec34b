"""Times steps, and calls in them, on the device: by CUDA events, without waiting for them, and on a CPU by the host's
clock.

Steps are told apart by their order alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hookline.core.step.timing import DeviceTime
from hookline.core.util.arrays import Array


class DeviceMarks:
    """Marks on the device's queue, and the time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self.is_host = device.type != "cuda"
        self._free: list[Any] = []
        """Events that have been read and can be recorded again."""

    def _mark(self) -> Any:
        if self.is_host:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        seconds: float = stop - start if self.is_host else start.elapsed_time(stop) / 1000
        return seconds


class CallClock(DeviceMarks):
    """Times calls in a step on the device, by the number of the callee; calls in a graph's capture are not timed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._spans: list[tuple[int, Any, Any]] = []

    def begin(self) -> Any:
        """Mark the beginning of a call; None if it is not timed."""
        return None if not self.is_host and torch.cuda.is_current_stream_capturing() else self._mark()

    def end(self, number: int, begun: Any) -> None:
        """Mark the end of a call that `begin` marked."""
        if begun is not None:
            self._spans.append((number, begun, self._mark()))

    def pop(self) -> list[tuple[int, Any, Any]]:
        """The calls timed since the last `pop`, for `read` once the device has finished them."""
        spans, self._spans = self._spans, []
        return spans

    def read(self, spans: Sequence[tuple[int, Any, Any]]) -> Array | None:
        """(X, 2) float64: each number of some calls, and how many seconds all its calls took; None for no calls."""
        seconds: dict[int, float] = {}
        for number, begun, ended in spans:
            seconds[number] = seconds.get(number, 0.0) + self._between(begun, ended)
            if not self.is_host:
                self._free += [begun, ended]
        return np.array(list(seconds.items()), dtype=np.float64) if seconds else None


class StepClock(DeviceMarks):
    """`core.step.timing.Clock`: two marks for each step on the device's queue."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._begun: Any = None
        self._ended: Any = None
        self._spans: deque[tuple[Any, Any, Any]] = deque()
        """(end of the step before, beginning, end) of the steps not read yet, oldest first."""

    def begin(self) -> None:
        """Mark the beginning of a step's work; the last call before `end` counts."""
        self._begun = self._mark()

    def end(self) -> None:
        """Mark the end of a step's work."""
        ended = self._mark()
        self._spans.append((self._ended, self._begun, ended))
        self._ended = ended

    def read(self) -> DeviceTime | None:
        """See Clock."""
        if not self._spans:
            return None
        before, begun, ended = self._spans.popleft()
        idle_s = 0.0 if before is None else self._between(before, begun)
        device_s = self._between(begun, ended)
        if not self.is_host:
            self._free += [begun] if before is None else [begun, before]
        return DeviceTime(device_s, idle_s, on_host=self.is_host)

    def clear(self) -> None:
        """See Clock."""
        self._spans.clear()
