"""Admission: a prompt and its parameters are checked against the engine's limits, and made into a request.

This happens once, on arrival, so that no request is queued that can never be served.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hookline.core.contracts import Limits, RequestFacts
from hookline.core.errors import PluginError, PluginFault, PromptTooLongError, QueueFullError, RequestError, shown
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import PLAIN, RequestOptions
from hookline.core.requests.extension_states import ExtensionStates
from hookline.core.requests.pooling import Poolers
from hookline.core.requests.request import Request, Watcher
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.requests.structured_output import late_state
from hookline.core.sampling_params import SamplingParams, derived_seed
from hookline.core.util.arrays import TokenArray

NOTHING_DRAWN = SamplingParams(temperature=0.0, max_tokens=1)
"""The parameters of requests that draw no token."""


@dataclass(frozen=True)
class EngineLimits:
    """The limits of an engine, known once its memory is sized. Lengths are in tokens."""

    plan: Limits
    vocab_size: int
    stall_timeout_s: float
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    overlap: bool = False
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    tag_keys: tuple[str, ...] | None = None
    """The only tags that requests may have; None allows any."""
    extensions: InstalledExtensions = field(default_factory=InstalledExtensions)
    """The step extensions that requests can use."""
    poolers: Poolers = field(default_factory=Poolers)
    """The poolers that requests can use."""
    taps: tuple[int, ...] = ()
    """Layers after which observers get the hidden states."""
    no_generation: str | None = None
    """Why requests cannot generate tokens, e.g. since the checkpoint has no head for it; None if they can."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of sampling parameters that a request does not set, from the checkpoint's generation_config.json."""

    max_position: int | None = None
    """How many positions the checkpoint has: no sequence can be longer. None if it is not known."""
    num_cache_tokens: int | None = None
    """Longest sequence that fits the whole pool; None: as many tokens as its blocks hold."""

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and output: max_model_len, or the capacity of the whole pool if that is less."""
        held = self.num_cache_tokens
        return min(self.plan.max_model_len, self.plan.num_blocks * self.plan.block_size if held is None else held)


def admit(
    limits: EngineLimits,
    id: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    prompt: str | None = None,
    options: RequestOptions = PLAIN,
    arrival_s: float = 0.0,
    watcher: Watcher | None = None,
    like: Request | None = None,
    pooling: PoolingParams | None = None,
) -> Request:
    """Make the request of a prompt; max_tokens is cut so that it ends at max_len.

    like: another completion of the same prompt, with the same parameters but for the seed; its prepared arguments are
    used again. pooling: the request ends with a vector once its prompt is computed; params are ignored.
    Raises: RequestError if it can never be served: empty, over-long, with a token id outside the vocabulary, or with
    arguments that no step extension takes; or if it asks for work of the front end: several completions, or stop
    strings without a watcher that looks for them.
    """
    if pooling is not None:
        return _pooled(limits, id, prompt_token_ids, pooling, prompt=prompt, options=options, arrival_s=arrival_s)
    if limits.no_generation is not None:
        raise RequestError(limits.no_generation)
    if params.n != 1:
        raise RequestError(f"sampling.n={params.n}: an engine takes one completion a request; use SamplingParams.each")
    if params.stop and watcher is None:
        raise RequestError(
            f"sampling.stop={shown(list(params.stop))} needs a watcher that reads the text; use LLM or AsyncLLM"
        )
    tokens = _checked_tokens(limits, prompt_token_ids)
    params = params.resolved(limits.sampling_defaults)
    assert params.temperature is not None
    if like is None:
        eos = frozenset() if params.ignore_eos else limits.eos_token_ids
        stop_ids = eos.union(params.stop_token_ids)
        _check_draws(params, stop_ids, limits.vocab_size)
        has_logprobs = params.logprobs is not None
        facts = RequestFacts(len(tokens), params.temperature, stop_ids, limits.vocab_size, has_logprobs)
        prepared = limits.extensions.prepare(params, facts)
    else:
        stop_ids, prepared = like.stop_ids, like.prepared
    try:
        states = ExtensionStates(prepared.stateful) if prepared.stateful else None
    except PluginError as error:
        raise PluginFault(str(error)) from error
    return Request(
        id,
        tokens,
        params,
        max_tokens=params.num_tokens_in(limits.max_len - len(tokens)),
        block_size=limits.plan.block_size,
        seed=params.seed if params.seed is not None else derived_seed(limits.seed, id),
        stop_ids=stop_ids,
        prepared=prepared,
        extensions=states,
        prompt=prompt,
        arrival_s=arrival_s,
        options=options,
        watcher=watcher,
        late=late_state(params, stop_ids),
    )


def _pooled(
    limits: EngineLimits, id: int, prompt_token_ids: Sequence[int], pooling: PoolingParams, **further: Any
) -> Request:
    """Make a request that ends with a vector when its prompt is computed. Raises: RequestError as `admit` does."""
    tokens = _checked_tokens(limits, prompt_token_ids, num_outputs=0)
    size, prepared = limits.plan.block_size, limits.poolers.prepare(pooling)
    return Request(id, tokens, NOTHING_DRAWN, max_tokens=0, block_size=size, seed=0, reader=prepared, **further)


def _check_draws(params: SamplingParams, stop_ids: frozenset[int], vocab_size: int) -> None:
    """Refuse parameters that this vocabulary cannot satisfy."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            raise RequestError(f"sampling.{name}={value} is more than the vocabulary's {vocab_size} tokens")
    largest = max(params.stop_token_ids, default=0)
    if largest >= vocab_size:
        raise RequestError(
            f"sampling.stop_token_ids: token id {largest} is outside the vocabulary (0 to {vocab_size - 1})"
        )
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and stop_ids.issuperset(allowed):
        raise RequestError(
            f"sampling.allowed_token_ids={shown(list(allowed))} holds only tokens that end the request, which "
            f"sampling.min_tokens={params.min_tokens} forbids; allow another one, or set min_tokens=0"
        )


def check_room(limits: EngineLimits, queue: RequestQueue, num_requests: int) -> None:
    """Refuse further requests while too many wait.

    Raises: QueueFullError naming the key, its value and the waiting requests and tokens; RequestError for more requests
    than may ever wait.
    """
    load = len(queue.waiting) + len(queue.compiling), queue.num_waiting_tokens
    max_requests, max_tokens = limits.max_queued_requests, limits.max_queued_tokens
    if max_requests is not None and num_requests > max_requests:
        raise RequestError(
            f"{num_requests} completions are asked for at once, and engine.max_queued_requests={max_requests}; ask for "
            "fewer"
        )
    if max_requests is not None and load[0] + num_requests > max_requests:
        raise QueueFullError("engine.max_queued_requests", max_requests, *load)
    if max_tokens is not None and load[1] >= max_tokens:
        raise QueueFullError("engine.max_queued_tokens", max_tokens, *load)


def _checked_tokens(limits: EngineLimits, prompt_token_ids: Sequence[int], *, num_outputs: int = 1) -> TokenArray:
    """The prompt's token ids, checked: within the vocabulary, and with room for `num_outputs` more tokens."""
    if len(prompt_token_ids) == 0:
        raise RequestError("the prompt is empty; at least one token is needed")
    if len(prompt_token_ids) > limits.max_len - num_outputs:
        raise PromptTooLongError(_too_long(limits, len(prompt_token_ids), limits.max_len - num_outputs))
    if isinstance(prompt_token_ids, list) and type(prompt_token_ids[0]) is int:  # NumPy would look for a dtype first
        with suppress(TypeError, OverflowError):
            found: TokenArray = np.frombuffer(array("i", prompt_token_ids), dtype=np.int32)
            if found.view(np.uint32).max() < limits.vocab_size:
                return found
    try:
        tokens = np.asarray(prompt_token_ids)
    except (TypeError, ValueError, OverflowError):
        tokens = np.empty(0, dtype=object)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"prompt token ids must be whole numbers of at most 64 bits: {shown(prompt_token_ids)}")
    outside = (tokens < 0) | (tokens >= limits.vocab_size)
    if outside.any():
        value = tokens[outside][0]
        raise RequestError(f"token id {value} is outside the vocabulary (0 to {limits.vocab_size - 1})")
    return tokens.astype(np.int32)


def _too_long(limits: EngineLimits, length: int, most: int) -> str:
    plan = limits.plan
    room = f"a prompt may have at most {most} tokens"
    if limits.max_len == limits.max_position:
        return f"the prompt has {length} tokens; {room}: the checkpoint has at most {limits.max_position} positions"
    if limits.max_len == plan.max_model_len:
        return f"the prompt has {length} tokens; {room}: raise engine.max_model_len={plan.max_model_len}"
    capacity = f"the KV cache holds {plan.num_blocks} blocks of {plan.block_size} tokens"
    if plan.max_blocks_per_token > 1:
        capacity += f", which {plan.max_blocks_per_token} groups of layers share"
    return f"the prompt has {length} tokens; {room}, as {capacity}: give it more memory or engine.num_blocks"
