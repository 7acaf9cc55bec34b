"""The samplers and logits processors that ship with Hookline: their options and registration. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

from hookline.core.contracts import FromSamplingParams, Needs, Registrar, bounded, hookimpl

API_VERSION = 2
CAPTURED = Needs(graph_safe=True, sizes_alike=True)


@dataclass
class GumbelConfig:
    """Gumbel-max sampling."""

    greedy: bool = False
    """Take the most likely token for every request, whatever its temperature."""


@dataclass
class TokenBiasArguments(FromSamplingParams):
    """Numbers added to the logits of some tokens."""

    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass
class TokenAllowlistArguments(FromSamplingParams):
    """The only tokens that may be drawn."""

    allowed_token_ids: tuple[int, ...] | None = None


@dataclass
class WordBanArguments(FromSamplingParams):
    """Words that must not be completed, as lists of token ids."""

    bad_words: tuple[Any, ...] = ()


@dataclass
class PenaltyArguments(FromSamplingParams):
    """Penalties on tokens that are in the prompt or the output already."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass
class TruncationArguments(FromSamplingParams):
    """Limits that leave only the most likely tokens to draw from."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class MirostatArguments:
    """SamplingParams(logprobs=0, extra_args={"mirostat": {"tau": 3.0}})."""

    tau: float = bounded(0.0, 0)
    """The surprise, in bits for each token, that the text is held near; 0 leaves it alone."""
    eta: float = bounded(0.1, 0, 1)
    """How fast the bound on a token's surprise follows the surprise of drawn tokens."""


@hookimpl
def register_samplers(register: Registrar) -> None:
    """Add the sampler, gumbel."""
    register(
        "gumbel",
        "hookline.plugins.samplers.gumbel:Gumbel",
        config=GumbelConfig,
        help="Gumbel-max with a stateless RNG keyed by seed, position and token id; temperature 0 is greedy",
        needs=Needs(graph_safe=True, sizes_alike=True, vocabulary_shards=True, batch_invariant=True),
    )


@hookimpl
def register_processors(register: Registrar) -> None:
    """Add the processors of SamplingParams' own fields, and mirostat."""
    register(
        "token_bias",
        "hookline.plugins.samplers.token_bias:TokenBias",
        config=TokenBiasArguments,
        help="logit_bias: numbers added to the logits of some tokens",
        needs=CAPTURED,
        priority=500,
    )
    register(
        "token_allowlist",
        "hookline.plugins.samplers.token_allowlist:TokenAllowlist",
        config=TokenAllowlistArguments,
        help="allowed_token_ids: the only tokens that may be drawn",
        needs=CAPTURED,
        priority=400,
    )
    register(
        "word_ban",
        "hookline.plugins.samplers.word_ban:WordBan",
        config=WordBanArguments,
        help="bad_words: token sequences whose last token is not drawn after the ones before it",
        needs=CAPTURED,
        priority=300,
    )
    register(
        "penalties",
        "hookline.plugins.samplers.penalties:Penalties",
        config=PenaltyArguments,
        help="repetition, presence and frequency penalties",
        needs=CAPTURED,
        priority=200,
    )
    register(
        "truncation",
        "hookline.plugins.samplers.truncation:Truncation",
        config=TruncationArguments,
        help="top_k, then top_p, then min_p, over the distribution at the request's temperature",
        needs=CAPTURED,
        priority=-100,
    )
    register(
        "mirostat",
        "hookline.plugins.samplers.mirostat:Mirostat",
        config=MirostatArguments,
        help="tau, eta: keep the surprise of the text near tau bits a token; needs logprobs",
        needs=CAPTURED,
        priority=-200,
    )
