"""Executors without a device, on a virtual clock that only they advance by the times of a cost model."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.core.bench.step_counts import StepCounter
from hookline.core.engine.engine import Engine
from hookline.core.simulate.cost import CostModel, StepShapes
from hookline.core.step.executor import Executor, StepResult
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock, DeviceTime

if TYPE_CHECKING:
    from hookline.core.contracts import Limits


class VirtualClock:
    """A clock in seconds from 0, for an engine's `clock` and `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        """Seconds that have passed on this clock."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Advance the clock by that many seconds."""
        assert seconds >= 0, f"time goes on, not back by {-seconds} s"
        self.now_s += seconds

    def sleep_until(self, when_s: float) -> None:
        """Advance the clock to that time, if it is not past."""
        self.now_s = max(self.now_s, when_s)


class BlankExecutor(Executor):
    """core.step.executor.Executor without a model: tokens are random, and known at once."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._rng, self._vocab_size = np.random.default_rng(seed), vocab_size

    def launch(self, step: Step) -> int:
        """Count the sampled tokens of a step."""
        assert step.num_logprobs < 0 and not len(step.reads), "there are no log-probabilities without a model"
        return step.num_sampled

    def collect(self, handle: int) -> StepResult:
        """Random tokens, as many as were counted."""
        return StepResult(self._rng.integers(self._vocab_size, size=handle))

    def time_steps(self) -> Clock:
        """Nothing: only the executor that wraps this one knows times."""
        raise AssertionError("nothing takes time here")

    def close(self) -> None:
        """Nothing is held."""


class SimulatedExecutor(Executor):
    """Wraps an Executor on a virtual clock: times come from a cost model, tokens from the wrapped executor."""

    def __init__(self, inner: Executor, cost: CostModel, clock: VirtualClock, limits: Limits) -> None:
        self.inner, self.cost, self.clock = inner, cost, clock
        sizes = limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len
        self._shapes = StepShapes.of(*sizes, **cost.captured)
        self._counter = StepCounter(limits.max_num_seqs)
        self._free_s: float | None = None
        """When the device will have finished everything; None before the first step."""
        self._times: SimulatedTimes | None = None

    def launch(self, step: Step) -> tuple[float, Any]:
        """Advance the clock by the host's time, and compute when the device will have finished."""
        cost, counts = self.cost, self._counter.count(step)
        shape = self._shapes.shape(counts)
        self.clock.sleep(cost.host.before_s(counts))
        called_s = self.clock.now()
        self.clock.sleep(cost.launch_s(shape))
        ready_s = self.clock.now() if shape.is_captured else called_s
        begin_s = ready_s if self._free_s is None else max(ready_s, self._free_s + cost.gap_s)
        end_s = begin_s + cost.device_s(counts, shape)
        if not shape.is_captured:
            end_s = max(end_s, self.clock.now())
        if self._times is not None:
            self._times.add(DeviceTime(end_s - begin_s, 0.0 if self._free_s is None else begin_s - self._free_s))
        self._free_s = end_s
        return end_s, self.inner.launch(step)

    def collect(self, handle: tuple[float, Any]) -> StepResult:
        """Advance the clock until the device has finished the step."""
        done_s, inner = handle
        self.clock.sleep_until(done_s)
        return self.inner.collect(inner)

    def time_steps(self) -> Clock:
        """The modelled times."""
        self._times = SimulatedTimes()
        return self._times

    def close(self) -> None:
        """Close what this wraps."""
        self.inner.close()


class SimulatedTimes:
    """core.step.timing.Clock of a simulated device."""

    def __init__(self) -> None:
        self._times: deque[DeviceTime] = deque()

    def add(self, time: DeviceTime) -> None:
        """Note the times of the next step."""
        self._times.append(time)

    def read(self) -> DeviceTime | None:
        """See Clock."""
        return self._times.popleft() if self._times else None

    def clear(self) -> None:
        """See Clock."""
        self._times.clear()


def run_on(engine: Engine, cost: CostModel) -> VirtualClock:
    """Put an engine that has served nothing on a virtual clock, where its steps take the times of a cost model."""
    clock = VirtualClock()
    engine.state.use_clock(clock.now)
    engine.state.use_sleep(clock.sleep)
    engine.state.use_executor(SimulatedExecutor(engine.executor, cost, clock, engine.limits.plan))
    return clock
