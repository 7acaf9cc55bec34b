"""Executor: what the engine asks of the ranks that compute its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hookline.core.errors import HooklineError
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock
from hookline.core.util.arrays import IntArray, MaskArray, VectorArray


class Executor(Protocol):
    """Computes steps: one rank, or a group of them. For classes to extend."""

    @property
    def watches_steps(self) -> bool:
        """Whether it notices by itself if a launched step gets no further."""
        return False

    @property
    def is_here(self) -> bool:
        """Whether rank 0 computes in this process."""
        return True

    @property
    def progress(self) -> int:
        """A number that changes while a step gets further, for those who watch from another thread."""
        return 0

    def launch(self, step: Step) -> Any:
        """Start computing a step; returns a handle for `collect`."""
        ...

    def collect(self, handle: Any) -> IntArray:
        """Wait for a launched step and return the drawn tokens (N,).

        If step.num_logprobs is not -1: rows (N + P, X) instead, of the drawn tokens and then of the scored prompt
        tokens, as `core.worker.runner.model_runner` lays them out; the first column holds the tokens.
        """
        ...

    def collect_vectors(self, handle: Any) -> Sequence[VectorArray]:
        """Wait for the vectors of a launched step's prompts that were pooled and are complete, in its chunks' order.

        Asked for only if there are any.
        """
        raise AssertionError("this executor pools nothing")

    def collect_states(self, handle: Any) -> Mapping[int, VectorArray]:
        """Wait for the hidden states of a launched step after the layers of engine.taps: (T, D) each, by layer.

        The rows are those of the step's decodes, then of its chunks' tokens. Asked for only if there are such layers.
        """
        raise AssertionError("this executor has no hidden states")

    def mask_rows(self, num_rows: int) -> MaskArray:
        """The buffer for the masks of the step launched last: (num_rows, W) int32, see `core.contracts.grammar`.

        Asked for only if step.masked_draws is not empty; it holds masks of earlier steps.
        """
        raise AssertionError("this executor draws without masks")

    def release(self, handle: Any, num_rows: int) -> None:
        """Draw all tokens of the step launched last, now that its masks are in `mask_rows`.

        A step with masked draws that is not released draws nothing; `collect` must not be called for it, and the next
        launch drops it.
        """
        raise AssertionError("this executor draws without masks")

    def time_steps(self) -> Clock:
        """Mark on the device when steps begin and end from now on; the clock returned has a time for each step."""
        ...

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Have `tell` called, from another thread, if a step can never end. Does nothing by itself."""
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
