"""When steps begin and end on the device: by CUDA events, without waiting for them, and on a CPU by the host's clock.

Steps are told apart by their order alone.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from hookline.core.step.timing import DeviceTime


class StepClock:
    """`core.step.timing.Clock`: two marks for each step on the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self.is_host = device.type != "cuda"
        self._begun: Any = None
        self._ended: Any = None
        self._spans: deque[tuple[Any, Any, Any]] = deque()
        """(end of the step before, beginning, end) of the steps not read yet, oldest first."""
        self._free: list[Any] = []
        """Events that have been read."""

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

    def _mark(self) -> Any:
        if self.is_host:
            return time.perf_counter()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        seconds: float = stop - start if self.is_host else start.elapsed_time(stop) / 1000
        return seconds
