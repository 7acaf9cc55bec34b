"""The contract of observers: the methods they may have, and the values that these get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hookline.core.contracts.drafter import DraftCounts
    from hookline.core.outputs import RequestOutput
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.util.arrays import FloatArray, IntArray, VectorArray

WAITING_REASONS = ("capacity", "preempted", "grammar")
"""The keys of EngineView.waiting_by_reason."""


class EngineView(Protocol):
    """An engine as observers see it. Values are live; do not change them."""

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
        """Returns seconds: the clock of all times in StepStats and in a RequestOutput's timings."""
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
        """num_waiting by the reason. Three keys are always there: "capacity", requests that wait for room to begin;
        "preempted", for room to go on; "grammar", for their grammar, which is being compiled.
        """
        ...

    @property
    def late_work(self) -> Mapping[str, int]:
        """How often a kernel or a graph was made only after the engine was ready, so that requests waited for it.

        Counts by kind: kernel_compiled, kernel_fetched (from the compiler's cache), kernel_loaded, graph, inductor.
        Each is also a warning in the log. With tp > 1, counts of rank 0. Empty on executors that compile nothing.
        """
        ...

    @property
    def speculation(self) -> DraftCounts | None:
        """Counts of drafts and of kept drafts so far; live. None without a drafter."""
        ...

    @property
    def extension_costs(self) -> Mapping[str, ExtensionCost]:
        """The time that each installed step extension took so far, by name; live."""
        ...

    @property
    def job_folder(self) -> Path | None:
        """The folder of the sweep's job that this engine runs in, for files about it; None outside a sweep."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds; their contents may still be found again."""
        ...


@dataclass
class ExtensionCost:
    """The time that one step extension took in an engine so far. Live: it grows with each step."""

    num_steps: int = 0
    """Steps that ran it."""
    host_s: float = 0.0
    """Seconds in its methods on the host, including calls before and after a request's steps."""
    num_timed_steps: int = 0
    """Steps in which its methods on the device were timed: on a CPU all steps; on a GPU, once `Engine.time_steps` asked
    for it, the steps in which they were not replayed in a CUDA graph."""
    device_s: float = 0.0
    """Seconds in its methods on the device of rank 0, in the timed steps."""

    def add_host(self, seconds: float) -> None:
        """Count time on the host."""
        self.host_s += seconds

    def add_step(self) -> None:
        """Count a step that ran it."""
        self.num_steps += 1

    def add_device(self, seconds: float) -> None:
        """Count a step in which it was timed on the device."""
        self.num_timed_steps += 1
        self.device_s += seconds


@dataclass(frozen=True)
class RequestBegin:
    """A request that an engine has just queued, without its text and its tokens."""

    request_id: int
    """The same as in its RequestOutput."""
    arrival_s: float
    """When it arrived, on the engine's clock."""
    num_prompt_tokens: int
    """Length of the prompt, cached tokens included."""
    params: SamplingParams
    """Its sampling parameters, with the checkpoint's defaults filled in."""
    priority: int
    """Lower is more urgent."""
    tags: Mapping[str, str]
    """The caller's labels of it, e.g. {"tenant": "acme"}; read-only."""
    deadline_s: float | None
    """When it should be done, in seconds after its arrival; None unless the caller set it."""
    is_pooled: bool = False
    """Whether it ends with a vector in place of tokens; its params are then unused."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers of the caller's trace, e.g. `traceparent`, and attributes of the request's own span (`gen_ai.…`)."""


@dataclass(frozen=True)
class TappedStates:
    """Hidden states of the T tokens of one step: the residual stream after each tapped layer, before any norm.

    request_ids_T: whose tokens they are, decoding requests first; positions_T: their positions in their sequences, from
    0. layers: for each tapped layer, (T, D) float32. All are numpy arrays, which the observer may keep.
    """

    request_ids_T: IntArray
    positions_T: IntArray
    layers: Mapping[int, VectorArray]


@dataclass(frozen=True)
class StepStats:
    """Counts and times of one step, for observers and the progress bar. Requests and blocks are counted at its commit.

    num_running, num_waiting: requests. num_free_blocks, num_blocks: KV-cache blocks that no request holds, and all.
    num_prefill_tokens: tokens of prompts that it computed, and tokens that it computed again after a preemption.
    num_decode_tokens: rows that decoded. num_cached_tokens: tokens that the requests it admitted found in the prefix
    cache. num_preemptions: running requests that it sent back to wait.
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
    """Tokens of the prompts that the step began, including tokens found in the cache."""
    num_generated_tokens: int
    """Tokens that it drew and that were kept."""
    step_s: float
    """From the launch to the end of the commit."""
    host_s: float
    """The host's work for this step: plan_s + dispatch_s + launch_s + commit_s; on a CPU minus device_s, which is a
    part of launch_s there."""
    plan_s: float
    """Asking the scheduler and checking its plan."""
    dispatch_s: float
    """Carrying the plan out: rows, blocks, the step's message."""
    launch_s: float
    """Handing the step to the device; on a CPU this computes it."""
    wait_s: float
    """Waiting for the step's tokens."""
    commit_s: float
    """Keeping the tokens and ending requests."""
    device_s: float | None = None
    """From the first of the step's work on the device to the last; None unless `Engine.time_steps` asked for it."""
    idle_s: float | None = None
    """How long the device waited after the previous step's work ended, copies included; None like device_s."""


class Observer(Protocol):
    """Watches one engine. Constructed as `Observer(config)`, before anything is loaded, if the configuration names it.

    Extend it with any of these methods. The hooks of the same names in `hookline.core.contracts.hooks` say when each is
    called and what an exception does. The caller of an LLM finds the object as `LLM.observers[name]`.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    @optional
    def on_engine_start(self, engine: EngineView) -> None:
        """The engine is ready to take requests; see the hook of this name."""
        return

    @optional
    def on_request_begin(self, info: RequestBegin) -> None:
        """A request was queued; see the hook of this name."""
        return

    @optional
    def on_first_token(self, info: RequestBegin, first_token_s: float) -> None:
        """A request got its first token; see the hook of this name."""
        return

    @optional
    def on_token_gaps(self, gaps_s: FloatArray) -> None:
        """How long requests waited for their next token, (N,) seconds; see the hook of this name."""
        return

    @optional
    def on_hidden_states(self, states: TappedStates) -> None:
        """Hidden states after the layers that `engine.taps` names; see the hook of this name."""
        return

    @optional
    def on_step_end(self, stats: StepStats) -> None:
        """A step's tokens are committed; see the hook of this name."""
        return

    @optional
    def on_request_end(self, output: RequestOutput) -> None:
        """A request finished, was refused or was aborted; see the hook of this name."""
        return

    @optional
    def on_engine_stop(self, engine: EngineView) -> None:
        """The engine is being closed; see the hook of this name."""
        return
