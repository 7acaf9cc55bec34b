"""What an observer is told, and the methods it may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hookline.core.outputs import RequestOutput
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.util.arrays import FloatArray, IntArray, VectorArray


class EngineView(Protocol):
    """What an observer may read of an engine: live, and never to be changed."""

    @property
    def model_name(self) -> str:
        """The checkpoint, as the configuration names it."""
        ...

    @property
    def policy(self) -> str:
        """Name of the scheduler policy."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds; the clock of all times in StepStats and in a RequestOutput's timings."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that are running."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, preempted ones among them."""
        ...

    @property
    def waiting_by_reason(self) -> Mapping[str, int]:
        """The same, counted by what they wait for, under three keys that are always there. capacity: for room to begin.
        preempted: for room to go on. grammar: for their grammar, which is being compiled.
        """
        ...

    @property
    def late_work(self) -> Mapping[str, int]:
        """What the device's kernels and graphs still needed after the engine was ready, while requests waited: counts
        by kind, kernel_compiled, kernel_fetched (from the compiler's cache), kernel_loaded, graph, inductor. Each is a
        warning in the log, too. With tp > 1, of rank 0. Empty on executors that compile nothing.
        """
        ...

    @property
    def job_folder(self) -> Path | None:
        """The folder of the sweep's job that the engine works for, where files about it belong; None outside of one."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; their contents may still be found again."""
        ...


@dataclass(frozen=True)
class RequestBegin:
    """A request that an engine has just queued: what it says of itself. There is no text, and no token."""

    request_id: int
    """As in its RequestOutput."""
    arrival_s: float
    """On the engine's clock."""
    num_prompt_tokens: int
    """Length of the prompt, cached tokens included."""
    params: SamplingParams
    """What it asks for, with the checkpoint's defaults filled in."""
    priority: int
    """Lower is more urgent."""
    tags: Mapping[str, str]
    """Read-only."""
    deadline_s: float | None
    """Seconds after the arrival."""
    is_pooled: bool = False
    """Whether it ends with a vector in place of tokens; its params mean nothing then."""


@dataclass(frozen=True)
class TappedStates:
    """Hidden states of the T tokens of one step: the residual stream behind each tapped layer, before any norm.

    request_ids_T: whose tokens they are, decoding requests first; positions_T: their places in their sequences, from 0.
    layers: (T, D) float32 by layer. All numpy's, and the observer's to keep.
    """

    request_ids_T: IntArray
    positions_T: IntArray
    layers: Mapping[int, VectorArray]


@dataclass(frozen=True)
class StepStats:
    """What one step did, for observers and the progress bar. Requests and blocks are counted when it is committed.

    num_running, num_waiting: requests. num_free_blocks, num_blocks: KV-cache blocks that no request holds, and all.
    num_prefill_tokens: known tokens that it computed, those that a preemption made necessary again included.
    num_decode_tokens: rows that decoded. num_cached_tokens: tokens of the requests it admitted that the prefix cache
    held. num_preemptions: running requests that it sent back to wait.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_prompt_tokens: int
    """Tokens of the prompts that were begun, those found in the cache included."""
    num_generated_tokens: int
    """Tokens that it drew and that were kept."""
    step_s: float
    """From the launch to the end of the commit."""
    host_s: float
    """What the host worked for this step: all parts but the waiting, and without device_s where that is a part of
    launch_s."""
    plan_s: float
    """Asking the scheduler and checking its plan."""
    dispatch_s: float
    """Carrying the plan out: rows, blocks, the step's message."""
    launch_s: float
    """Handing the step to the device; on a CPU this computes it."""
    wait_s: float
    """Waiting for its tokens."""
    commit_s: float
    """Keeping the tokens and ending requests."""
    device_s: float | None = None
    """From the first of the step's work on the device to the last; None unless `Engine.time_steps` asked for it."""
    idle_s: float | None = None
    """What the device waited since the last step's work ended, copies included; None as before."""


class Observer(Protocol):
    """Watches one engine. Constructed as `Observer(config)`, before anything is loaded, if the configuration names it.

    For classes to extend, with any of these methods; when they are called and what an exception does is said with the
    hooks of the same names in `hookline.core.contracts.hooks`. Callers find the object again as `LLM.observers[name]`.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    @optional
    def on_engine_start(self, engine: EngineView) -> None:
        """See the hook."""
        return

    @optional
    def on_request_begin(self, info: RequestBegin) -> None:
        """See the hook."""
        return

    @optional
    def on_first_token(self, info: RequestBegin, first_token_s: float) -> None:
        """See the hook."""
        return

    @optional
    def on_token_gaps(self, gaps_s: FloatArray) -> None:
        """See the hook."""
        return

    @optional
    def on_hidden_states(self, states: TappedStates) -> None:
        """See the hook."""
        return

    @optional
    def on_step_end(self, stats: StepStats) -> None:
        """See the hook."""
        return

    @optional
    def on_request_end(self, output: RequestOutput) -> None:
        """See the hook."""
        return

    @optional
    def on_engine_stop(self, engine: EngineView) -> None:
        """See the hook."""
        return
