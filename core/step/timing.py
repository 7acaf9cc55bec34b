"""How long the parts of a step take on the host, and their names in a trace while one is recorded.

Each part costs two readings of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol


@dataclass(frozen=True)
class DeviceTime:
    """How long a step took on the device, and how long the device was idle before it.

    Idle is all the time from the end of the last step's own work to the beginning of this one's, copies to and from the
    host included; 0 for the first step.
    """

    device_s: float
    idle_s: float
    on_host: bool = False
    """Whether the device is the host itself, which computed the step while launching it."""


class Clock(Protocol):
    """When steps began and ended on the device."""

    def read(self) -> DeviceTime | None:
        """The times of the oldest step not read yet, which must be over; None if there is none."""
        ...

    def clear(self) -> None:
        """Drop the times that were not read yet."""
        ...


class Tracer(Protocol):
    """Marks ranges of time in a trace."""

    def step(self, number: int) -> AbstractContextManager[Any]:
        """A range for a whole call of `Engine.step`, counted from 1."""
        ...

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A range for a part of it."""
        ...


class StepWatch:
    """Measures the seconds that each part of a step takes, by the host's clock `now`. As a context: around one part."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.tracer: Tracer | None = None
        self.clock: Clock | None = None
        """The clock of the device, once `Engine.time_steps` asked for it."""
        self.num_steps = 0
        self.doing = ""
        """The part that was begun last; empty between steps."""
        self._seconds: dict[str, float] = {}
        self._range: AbstractContextManager[Any] | None = None
        self._started_s = 0.0

    def use_clock(self, now: Callable[[], float]) -> None:
        """Read another clock of the host from now on."""
        self.now = now

    def use_device_clock(self, clock: Clock) -> None:
        """Read the times of steps on the device from this clock."""
        self.clock = clock

    def use_tracer(self, tracer: Tracer | None) -> None:
        """Mark steps and their parts in a trace from now on; None: no longer."""
        self.tracer = tracer

    def drop_device_times(self) -> None:
        """Forget steps that were timed and will not be committed."""
        if self.clock is not None:
            self.clock.clear()

    def rest(self) -> None:
        """Note that no part of a step is being done."""
        self.doing = ""

    def step(self) -> AbstractContextManager[Any]:
        """A context around a whole step."""
        self.num_steps += 1
        return nullcontext() if self.tracer is None else self.tracer.step(self.num_steps)

    def part(self, name: str) -> StepWatch:
        """The context around the part of a step with this name; parts do not nest."""
        self.doing = name
        self._range = None if self.tracer is None else self.tracer.part(name)
        return self

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        self._started_s = self.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._seconds[self.doing] = self.now() - self._started_s
        if self._range is not None:
            self._range.__exit__(kind, error, trace)

    def pop_seconds(self) -> dict[str, float]:
        """The seconds that each part took since the last call, by name."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def pop_part(self, name: str) -> float:
        """The seconds that one part took, which are not counted elsewhere then."""
        return self._seconds.pop(name)
