"""What a scheduler policy sees, what it answers, and what it implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


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
        """What the caller calls it by, e.g. {"tenant": "acme"}; read-only, and empty unless the caller set it."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """When it should be done, on the engine's clock; None unless the caller set it. A wish: nothing ends it."""
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
class Limits:
    """The bounds every plan must keep."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int


class BlockBudget(Protocol):
    """A ledger of KV-cache blocks for one plan. Counting against it changes nothing but the ledger."""

    @property
    def num_free(self) -> int:
        """Blocks that this plan can still hand out."""
        ...

    def num_cached_tokens(self, request: RequestView) -> int:
        """Leading tokens a waiting request finds in the prefix cache: computed already, or by this very plan."""
        ...

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Tokens still to be computed before the request can generate: free of what the cache holds."""
        ...

    def cost(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that computing `num_tokens` more tokens of the request takes."""
        ...

    def take(self, request: RequestView, num_tokens: int) -> bool:
        """Reserve that cost; False, and nothing reserved, if it exceeds `num_free`."""
        ...

    def take_decodes(self) -> bool:
        """`take` one more token for every running request that can decode; False, and nothing reserved, if not all fit.

        As good as `take` for each of them and much faster; for plans that preempt none of them.
        """
        ...

    def give_back(self, request: RequestView) -> None:
        """Note that the plan preempts this request: what only it holds becomes free."""
        ...


@dataclass(frozen=True)
class SchedulerView:
    """Everything a scheduler may look at.

    waiting: in queue order, preempted requests at the head. running: in order of admission, oldest first; those that
    are prefilling go on through Plan.prefill, the others decode one token a step. prefilling: just those, in the same
    order; a policy that looks there, at `len(running)` and at `budget.take_decodes` need not go through the running
    ones at all. num_steps_without_decode: steps in a row, the last one included, in which nobody decoded although
    somebody could; a policy that puts prompts first bounds it, or arrivals that never end starve the running requests.
    """

    waiting: Sequence[RequestView]
    running: Sequence[RequestView]
    prefilling: Sequence[RequestView]
    limits: Limits
    budget: BlockBudget
    now_s: float
    num_steps_without_decode: int = 0


class Everyone(Enum):
    """Stands for every running request that can decode."""

    ALL = "all"


ALL = Everyone.ALL


@dataclass(frozen=True)
class Plan:
    """What the next step computes. Ids are `RequestView.id`.

    prefill: (id, number of tokens to compute), for waiting requests (admits them) and running ones that are
    prefilling; cached tokens are not counted. decode: ALL, or the ids of requests that are not prefilling. preempt:
    running requests to send back to the head of the queue; they recompute later. idle_s: with nothing else in the plan,
    wait this long (at most a second) before asking again.
    """

    prefill: Sequence[tuple[int, int]] = ()
    decode: Sequence[int] | Everyone = ()
    preempt: Sequence[int] = ()
    idle_s: float = 0.0


class Scheduler(Protocol):
    """A policy: which requests compute how many tokens next. Constructed as `Scheduler(config)`.

    Pure decisions over a read-only view. Core checks every plan (known ids, limits, budget, progress), raises PlanError
    naming the policy if it breaks a rule, and owns blocks, aborts and overlap.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def plan(self, view: SchedulerView) -> Plan:
        """Decide the next step. Called once a step while any request is waiting or running."""
        ...
