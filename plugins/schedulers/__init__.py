"""The scheduler policies that ship with Hookline: their options and their registration. Imports no policy code."""

import math
from dataclasses import dataclass, field

from hookline.core.contracts import Registrar, bounded, hookimpl
from hookline.core.errors import ConfigError
from hookline.core.scheduling import MAX_PROMPT_STEPS

API_VERSION = 2


@dataclass
class WatermarkConfig:
    """The option that all policies here have."""

    watermark: float = bounded(0.01, 0, below=1)
    """Fraction of all KV blocks kept free when a request is admitted beside running requests; avoids preemptions."""


@dataclass
class PrefillFirstConfig(WatermarkConfig):
    """Waiting prompts before decodes."""

    max_prompt_steps: int = bounded(MAX_PROMPT_STEPS, 1)
    """Most steps of prompts in a row while a running request could decode; then all such requests decode once."""


@dataclass
class ChunkedConfig(WatermarkConfig):
    """Decodes and prompt chunks in the same step."""


@dataclass
class LongestFirstConfig(WatermarkConfig):
    """Decodes and prompt chunks in the same step; waiting requests with most tokens left to generate begin first."""

    ageing_tokens_per_s: float = bounded(100.0, above=0)
    """How much longer a request counts for each second it waits, in tokens; above 0, so that nothing starves."""
    pace: bool = False
    """Compute prompts only as fast as needed for all answers to end when the longest does, which leaves the prompts of
    short answers for steps with few decodes. For mixed steps that are captured as CUDA graphs, and answers about as
    long as their max_tokens; otherwise all is done sooner if prompts are computed as fast as they fit into steps."""


@dataclass
class FairShareConfig(WatermarkConfig):
    """Service in proportion to weights, by the value of a tag."""

    key: str = "tenant"
    """The tag whose values share the machine; requests without it are one tenant together."""
    weights: dict[str, float] = field(default_factory=dict)
    """How much more than weight 1 each value gets, e.g. {acme: 3}; above 0, and 1 for values not named."""
    prompt_token_cost: float = bounded(1.0, 0)
    """Cost of a computed prompt token in a tenant's service; prompt tokens from the prefix cache are free."""
    output_token_cost: float = bounded(2.0, above=0)
    """Cost of a generated token in a tenant's service."""
    max_prompt_steps: int = bounded(MAX_PROMPT_STEPS, 1)
    """Most steps of prompts in a row while a running request could decode; then all such requests decode once."""

    def __post_init__(self) -> None:
        for value, weight in self.weights.items():
            if not 0 < weight < math.inf:
                raise ConfigError(f"scheduler.weights.{value}={weight} must be a finite number above 0")


@dataclass
class DeadlineConfig(WatermarkConfig):
    """Earliest deadline first, among requests that can still be served in time."""

    ttft_s: float = bounded(0.2, above=0)
    """Seconds after its arrival by which a request without a deadline should have its first token."""
    tpot_s: float = bounded(0.02, above=0)
    """Seconds between two tokens of a running request that steps should keep."""
    default_deadline_s: float | None = bounded(None, above=0)
    """Seconds after its arrival by which a request without a deadline should be done; null: it has ttft_s alone."""
    late_share: float = bounded(0.05, above=0, below=1)
    """Part of the prompt tokens for requests that can no longer be in time, while others wait; above 0, so that no
    request starves."""


@hookimpl
def register_schedulers(register: Registrar) -> None:
    """Add the policies, each with the dataclass of its fields."""
    register(
        "prefill_first",
        "hookline.plugins.schedulers.prefill_first:PrefillFirst",
        config=PrefillFirstConfig,
        help="first come first served; prompts before decodes; preempts the newest",
    )
    register(
        "chunked",
        "hookline.plugins.schedulers.chunked:Chunked",
        config=ChunkedConfig,
        help="decodes first, the rest of each step's token budget goes to prompt chunks",
    )
    register(
        "longest_first",
        "hookline.plugins.schedulers.longest_first:LongestFirst",
        config=LongestFirstConfig,
        help="for batch jobs: as chunked, but those with most left to generate begin first, at a pace if wanted",
    )
    register(
        "fair_share",
        "hookline.plugins.schedulers.fair_share:FairShare",
        config=FairShareConfig,
        help="tenants, by a tag of their requests, are served in proportion to their weights",
    )
    register(
        "deadline",
        "hookline.plugins.schedulers.deadline:Deadline",
        config=DeadlineConfig,
        help="earliest deadline first; steps sized by what they cost, so that running requests keep their pace",
    )
