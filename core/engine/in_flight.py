"""A launched step, and the StepStats that are made of it once it is committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import StepStats
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.step_builder import Dispatched
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.step.timing import StepWatch
from hookline.core.util.arrays import IntArray

PARTS = ("plan", "dispatch", "launch", "wait", "commit")
"""The parts of a step on the host."""


@dataclass(slots=True)
class InFlight:
    """A launched step whose tokens are not known yet.

    started: when it was launched, on the engine's clock. host_s: seconds that its parts took on the host so far.
    num_context_tokens: how many tokens its decodes read from the cache; 0 unless the policy wants to know. has_faults:
    whether the grammar of one of its requests filled no mask.
    """

    plan: CheckedPlan
    dispatched: Dispatched
    handle: Any
    started: float
    host_s: dict[str, float]
    num_context_tokens: int = 0
    has_faults: bool = False
    tapped: tuple[IntArray, IntArray] | None = None
    """For each of its tokens, the request's id and the position; None unless observers get its hidden states."""


def step_stats(
    launched: InFlight, num_generated_tokens: int, queue: RequestQueue, pool: BlockPool, watch: StepWatch, now_s: float
) -> StepStats:
    """What a step did, for observers, once it is committed."""
    plan, dispatched, clock = launched.plan, launched.dispatched, watch.clock
    # launched.host_s comes last: it replaces the time of a plan ahead that was not launched.
    parts = {**watch.take(), **launched.host_s}
    parts["commit"] += parts.pop("advance")
    device = clock.read() if clock is not None and plan.computes else None
    return StepStats(
        num_running=len(queue.running),
        num_waiting=len(queue.waiting),
        num_free_blocks=pool.num_free,
        num_blocks=pool.num_blocks,
        num_prefill_tokens=dispatched.num_prefill_tokens,
        num_decode_tokens=len(plan.decode),
        num_cached_tokens=dispatched.num_cached_tokens,
        num_preemptions=len(plan.preempt),
        num_prompt_tokens=dispatched.num_prompt_tokens,
        num_generated_tokens=num_generated_tokens,
        step_s=now_s - launched.started,
        host_s=sum(parts.values()) - parts["wait"] - (device.device_s if device and device.on_host else 0.0),
        **{f"{part}_s": parts[part] for part in PARTS},
        device_s=None if device is None else device.device_s,
        idle_s=None if device is None else device.idle_s,
    )
