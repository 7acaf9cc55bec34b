"""Executor: the protocol by which the engine has ranks compute its steps, and the result of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hookline.core.errors import HooklineError
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock
from hookline.core.util.arrays import Array, IntArray, WordArray


@dataclass(slots=True)
class StepResult:
    """The result of a step, on the host.

    tokens: the sampled tokens (N,). Of a step in which the device drafts (Step.drafting_rows): for each row how many
    drafts it made, how many of these it kept, and its 1 + num_drafts draws, of which the last ones may follow no draft.
    extras: further arrays with numbers for each draw, by the name of the step extension that computed them, or
    DRAW_SCORES.
    apart: float32 arrays that belong to no draw, by name: `read_by(reader)`, rows (P, F) of a prompt reader in the
    chunks' order; `tapped_after(layer)` for layers of engine.taps and of the drafter, hidden states (T, D) of the
    step's decodes, then of its chunks' tokens. A drafter's are torch tensors on the device if rank 0 runs here.
    extension_seconds: (X, 2) float64, the index of each step extension that was timed on the device and its seconds;
    None if none was.
    """

    tokens: IntArray
    extras: Mapping[str, Array] = field(default_factory=dict)
    apart: Mapping[str, Any] = field(default_factory=dict)
    extension_seconds: Array | None = None


def read_by(reader: int) -> str:
    """The name of the rows that the prompt reader of this index computed; see StepResult.apart."""
    return f"read by {reader}"


def tapped_after(layer: int) -> str:
    """The name of the hidden states after a layer; see StepResult.apart."""
    return f"tapped after {layer}"


class Executor(Protocol):
    """Computes steps: one rank, or a group of them. For classes to extend."""

    @property
    def watches_steps(self) -> bool:
        """Whether it notices by itself that a launched step is stuck."""
        return False

    @property
    def is_here(self) -> bool:
        """Whether rank 0 computes in this process."""
        return True

    @property
    def progress(self) -> int:
        """A number that changes while a step proceeds, for a watchdog in another thread."""
        return 0

    def launch(self, step: Step) -> Any:
        """Start computing a step; returns a handle for `collect`."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step and return its result."""
        ...

    def late_rows(self, num_rows: int) -> WordArray:
        """The buffer for the late rows of the step launched last: (num_rows, W) int32, see core/requests/late_input.py.

        Asked for only if step.late_draws is not empty; it holds rows of earlier steps.
        """
        raise AssertionError("this executor draws without late rows")

    def release(self, handle: Any, num_rows: int) -> None:
        """Draw all tokens of the step launched last, now that its rows are in `late_rows`.

        A step with late draws that is not released draws nothing; `collect` must not be called for it, and the next
        launch drops it.
        """
        raise AssertionError("this executor draws without late rows")

    def time_steps(self) -> Clock:
        """Mark on the device when steps begin and end from now on; the clock returned has a time for each step."""
        ...

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Call `tell`, from another thread, if a step can never end. Does nothing unless a class overrides it."""
        return

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView.late_work; of this process alone."""
        return {}

    def close(self) -> None:
        """Release memory and processes; may be called twice."""
        ...


class SizedExecutor(Executor, Protocol):
    """An executor that knows how many blocks its KV cache has."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        ...


class RankWorker(SizedExecutor, Protocol):
    """The executor of one rank, on this process's device.

    Every rank launches each step and releases its draws; only rank 0's collects, so others keep no results.
    """

    def has_arrived(self, handle: Any) -> bool:
        """Whether `collect` has nothing to wait for."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        ...
