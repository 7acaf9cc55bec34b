"""What an observer is told, and the methods it may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hookline.core.engine.engine import Engine
    from hookline.core.outputs import RequestOutput


@dataclass(frozen=True)
class StepStats:
    """What one step did, for observers and the progress bar."""

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

    Any of these methods may be missing; when they are called and what an exception does is said with the hooks of the
    same names in `core.contracts.hooks`. Callers find the object again as `LLM.observers[name]`.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def on_engine_start(self, engine: Engine) -> None:
        """See the hook."""
        ...

    def on_step_end(self, stats: StepStats) -> None:
        """See the hook."""
        ...

    def on_request_end(self, output: RequestOutput) -> None:
        """See the hook."""
        ...

    def on_engine_stop(self, engine: Engine) -> None:
        """See the hook."""
        ...
