"""The contract of scheduler policies: the view that a policy gets, and the plan that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from hookline.core.outputs import FinishReason


class RequestView(Protocol):
    """A request as a scheduler sees it: read-only and live. Counts are tokens."""

    @property
    def id(self) -> int:
        """Unique in the engine."""
        ...

    @property
    def arrival_s(self) -> float:
        """Arrival on the engine's monotonic clock, in seconds."""
        ...

    @property
    def priority(self) -> int:
        """Lower is more urgent; 0 unless the caller set it."""
        ...

    @property
    def tags(self) -> Mapping[str, str]:
        """The caller's labels of it, e.g. {"tenant": "acme"}; read-only, and empty unless the caller set it."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """When it should be done, on the engine's clock; None unless the caller set it. It is not enforced."""
        ...

    @property
    def first_token_s(self) -> float | None:
        """When its first token was known, on the engine's clock; None before."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens this request may generate."""
        ...

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache; 0 while waiting."""
        ...

    @property
    def is_prefilling(self) -> bool:
        """True for a running request that must compute more known tokens before it can decode."""
        ...


@dataclass(frozen=True)
class Joining:
    """Which mixed steps, of decodes and prompts, take less time than a step of each, as far as the engine knows.

    These are steps of at most max_decodes, max_prompts and max_prompt_tokens, which run as one CUDA graph; by default
    none. While a request asks for a feature that graphs with prompts lack, a policy gets the default.
    """

    max_decodes: int = 0
    max_prompts: int = 0
    max_prompt_tokens: int = 0

    def pays(self, num_decodes: int, num_prompts: int, num_prompt_tokens: int) -> bool:
        """Whether a mixed step of these sizes is worth it."""
        return (
            0 < num_decodes <= self.max_decodes
            and 0 < num_prompts <= self.max_prompts
            and num_prompt_tokens <= self.max_prompt_tokens
        )


@dataclass(frozen=True)
class Limits:
    """The bounds every plan must keep.

    max_num_seqs: most requests that run at a time. max_num_batched_tokens: most tokens of a step: prompt tokens, and
    one for each decode. max_model_len: most tokens of a request, prompt and output. block_size: tokens of a KV-cache
    block. num_blocks: blocks of the KV cache.
    max_blocks_per_token: most blocks that one more token of a request can take; more than 1 if groups of layers with
    different caches have their own blocks.
    joining: which mixed steps are worth it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_blocks_per_token: int = 1
    joining: Joining = Joining()


class BlockBudget(Protocol):
    """A ledger of KV-cache blocks for one plan. Counting against it changes nothing but the ledger."""

    @property
    def num_free(self) -> int:
        """Blocks that this plan can still hand out."""
        ...

    def num_cached_tokens(self, request: RequestView) -> int:
        """Leading tokens that a waiting request finds in the prefix cache: computed already, or by this plan."""
        ...

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Tokens still to be computed before the request can generate, without tokens found in the prefix cache."""
        ...

    def cost(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that computing `num_tokens` more tokens of the request takes, in all groups of layers.

        For more tokens than one step computes: the most blocks held at any time while they are computed in chunks.
        """
        ...

    def take(self, request: RequestView, num_tokens: int) -> bool:
        """Reserve that cost; False, and nothing reserved, if it exceeds `num_free`."""
        ...

    def take_decodes(self) -> bool:
        """`take` one more token for every running request that can decode; False, and nothing reserved, if not all fit.

        Equal to `take` for each of these requests, and much faster; for plans that preempt none of them.
        """
        ...

    def give_back(self, request: RequestView) -> None:
        """Note that the plan preempts this request: the blocks that only it holds become free."""
        ...


@dataclass(frozen=True)
class ServedTokens:
    """Tokens that requests were served, without tokens from the prefix cache and tokens computed again.

    prompt: prompt tokens that were computed. generated: output tokens that were sampled and kept.
    """

    prompt: int = 0
    generated: int = 0


def _served_nothing(key: str) -> Mapping[str, ServedTokens]:
    return {}


@dataclass(frozen=True)
class SchedulerView:
    """Everything a scheduler may look at.

    waiting: in queue order, preempted requests at the head. running: in order of admission, oldest first; requests that
    are still prefilling go on through Plan.prefill, the others decode one token a step. prefilling: the running
    requests that are prefilling, in the same order; with it, `len(running)` and `budget.take_decodes` a policy need not
    go through `running`. num_steps_without_decode: how many steps in a row, up to the last one, decoded no request
    although one could have decoded; a policy that puts prompts first must bound it, or a steady stream of arrivals
    starves the running requests.
    served_tokens: `view.served_tokens("tenant")` maps each value of that tag to the tokens that its requests were
    served by committed steps since the policy first asked for the tag; "" stands for requests without it. Core keeps at
    most MAX_SERVED_VALUES values and drops the least recently served ones.
    limits: the bounds of a plan. budget: a ledger for this one plan. now_s: on the engine's clock, in seconds.
    """

    waiting: Sequence[RequestView]
    running: Sequence[RequestView]
    prefilling: Sequence[RequestView]
    limits: Limits
    budget: BlockBudget
    now_s: float
    num_steps_without_decode: int = 0
    served_tokens: Callable[[str], Mapping[str, ServedTokens]] = _served_nothing


MAX_SERVED_VALUES = 4096
"""Most values of a tag in SchedulerView.served_tokens."""


class Everyone(Enum):
    """Stands for every running request that can decode."""

    ALL = "all"


ALL = Everyone.ALL
"""For Plan.decode: every running request that is not prefilling."""


@dataclass(frozen=True)
class Plan:
    """A policy's plan for the next step. Ids are `RequestView.id`.

    prefill: (id, number of tokens to compute), for waiting requests, which this admits, and for running requests that
    are prefilling; cached tokens are not counted. decode: ALL, or the ids of requests that are not prefilling. preempt:
    running requests to send back to the head of the queue; they recompute later. idle_s: with nothing else in the plan,
    wait this long (at most a second) before asking again.
    """

    prefill: Sequence[tuple[int, int]] = ()
    decode: Sequence[int] | Everyone = ()
    preempt: Sequence[int] = ()
    idle_s: float = 0.0


@dataclass(frozen=True)
class Prefilled:
    """A chunk of a request's prompt that a step computed, or of tokens computed again after a preemption.

    num_tokens: tokens computed by this step. num_new_tokens: how many of them were never computed before.
    num_cached_tokens: tokens found in the prefix cache, if this step admitted the request. is_sampled: whether this was
    the last chunk and the step sampled a token that was kept.
    """

    request: RequestView
    num_tokens: int
    num_new_tokens: int
    num_cached_tokens: int = 0
    is_sampled: bool = False


@dataclass(frozen=True)
class Ended:
    """A request that has ended. Its view still shows its last state.

    reason: as in its RequestOutput. error: the cause, if the request did not end by itself or by its caller.
    """

    request: RequestView
    reason: FinishReason
    error: str | None = None


@dataclass(frozen=True)
class CommittedStep:
    """The outcome of a plan, or a notice of requests that ended between two steps.

    plan: the object that `plan` returned; None in a notice that only has `ended`. is_carried_out: False if the plan was
    not carried out: it asked to wait, broke a rule, was made ahead of time and discarded, or its step failed. now_s: on
    the engine's clock. prefilled: chunks, in the order of the plan; some of these requests may have ended while the
    step was computed. decoded: requests that decoded and keep the token; requests that ended meanwhile are left out.
    preempted: requests sent back to wait. ended: requests that ended with this step's tokens; in a notice without a
    plan, requests that were aborted, reached their time limit or failed. num_decodes, num_context_tokens: rows
    that decoded, and the tokens they read from the cache. busy_s: seconds from the launch, or from the end of the
    previous step if that is later, to the end of this step. device_s: seconds that the device computed, if it has a
    clock. In a simulation both are virtual.
    """

    plan: Plan | None
    is_carried_out: bool
    now_s: float
    prefilled: Sequence[Prefilled] = ()
    decoded: Sequence[RequestView] = ()
    preempted: Sequence[RequestView] = ()
    ended: Sequence[Ended] = ()
    num_decodes: int = 0
    num_context_tokens: int = 0
    busy_s: float = 0.0
    device_s: float | None = None

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts that the step computed, and tokens that it computed again after preemptions."""
        return sum(one.num_tokens for one in self.prefilled)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that requests admitted by this step found in the prefix cache."""
        return sum(one.num_cached_tokens for one in self.prefilled)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that the step sampled and that were kept."""
        return sum(num_tokens for _, num_tokens in self.generated())

    def generated(self) -> Iterator[tuple[RequestView, int]]:
        """Each request that keeps tokens of this step, and how many: requests with a last chunk first, then decodes.

        Today each request keeps one token. A policy that charges for tokens should count them here and not by the
        length of `decoded`, so that its figures hold for steps with several tokens a request too.
        """
        yield from ((one.request, 1) for one in self.prefilled if one.is_sampled)
        yield from ((request, 1) for request in self.decoded)

    @property
    def step_s(self) -> float:
        """How long the step took: on the device if that is known, else as the host saw it."""
        return self.busy_s if self.device_s is None else self.device_s


class Scheduler(Protocol):
    """A policy: which requests compute how many tokens next. Constructed as `Scheduler(config)`.

    Pure decisions over a read-only view and, for a policy that `RemembersSteps`, over committed steps. Core checks
    every plan (known ids, limits, budget, progress), raises PlanError naming the policy if it breaks a rule, and owns
    blocks, aborts and overlap.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def plan(self, view: SchedulerView) -> Plan:
        """Decide the next step. Called once a step while any request is waiting or running.

        With overlap it is called while the previous step is being computed; the view counts that step's tokens already.
        The same view and the same memory must give the same plan.
        """
        ...


class RemembersSteps(Protocol):
    """A policy that learns from the outcome of its plans. Any Scheduler may have this method."""

    def committed(self, step: CommittedStep) -> None:
        """Learn the outcome of a plan.

        When: once for each plan that the engine asked for, in the order of the plans, carried out or not; and with
            `step.plan` None as soon as requests end otherwise than with a step's tokens. Each request's end is
            reported once, even if it was in no plan. With overlap, a step is reported after the next one was planned.
        Cost: none for a policy without this method. With it, the engine measures each step's time on the device.
        Errors: any exception ends all requests with a PluginError that names the policy.
        """
        ...
