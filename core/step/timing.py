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
    """Measures the seconds that each part of a step takes, by the host's clock `now`.

    clock: the device's, once `Engine.time_steps` asked for it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.tracer: Tracer | None = None
        self.clock: Clock | None = None
        self.num_steps = 0
        self.doing = ""
        """The part that was begun last."""
        self.seconds: dict[str, float] = {}

    def step(self) -> AbstractContextManager[Any]:
        """A context around a whole step."""
        self.num_steps += 1
        return nullcontext() if self.tracer is None else self.tracer.step(self.num_steps)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A context around the part of a step with this name."""
        return _Part(self, name, None if self.tracer is None else self.tracer.part(name))

    def take(self) -> dict[str, float]:
        """The seconds that each part took since the last call, by name."""
        taken, self.seconds = self.seconds, {}
        return taken


class _Part:
    __slots__ = ("name", "range", "started", "watch")

    def __init__(self, watch: StepWatch, name: str, range: AbstractContextManager[Any] | None) -> None:
        self.watch, self.name, self.range = watch, name, range

    def __enter__(self) -> None:
        self.watch.doing = self.name
        if self.range is not None:
            self.range.__enter__()
        self.started = self.watch.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.seconds[self.name] = self.watch.now() - self.started
        if self.range is not None:
            self.range.__exit__(kind, error, trace)
