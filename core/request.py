"""A request's life on the host: its tokens, its blocks, how far it got, and what the caller gets back.

Knows no torch, no scheduler and no tokenizer. Token ids live in one preallocated int32 array, so a prompt chunk or a
block's content is a slice and never a conversion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from core.block_pool import ROOT, hash_block
from core.sampling import SamplingParams

TokenArray = np.ndarray[Any, np.dtype[np.int32]]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass
class RequestOutput:
    """What a caller gets back for one prompt.

    token_ids holds every generated token, the one that stopped it included; text leaves special tokens out and is empty
    without a tokenizer. num_cached_tokens counts prompt tokens found in the prefix cache. error says why a request
    with finish_reason "error" was refused.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    text: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None


class Request:
    """One request as the engine keeps it. Counts are tokens unless they say otherwise."""

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_size",
        "blocks",
        "high_water",
        "id",
        "match",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "params",
        "parent_serial",
        "prefill_target",
        "priority",
        "prompt",
        "row",
        "seed",
        "stop_ids",
        "tokens",
        "view",
    )

    def __init__(
        self,
        id: int,
        prompt_token_ids: TokenArray,
        params: SamplingParams,
        *,
        max_tokens: int,
        block_size: int,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        prompt: str | None = None,
        arrival_s: float = 0.0,
        priority: int = 0,
    ) -> None:
        self.id = id
        self.prompt = prompt
        self.params = params
        self.arrival_s = arrival_s
        self.priority = priority
        self.seed = seed
        self.stop_ids = stop_ids
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.num_prompt_tokens = self.num_tokens = self.num_known_tokens = len(prompt_token_ids)
        """num_tokens counts a token from the launch of the step that draws it, num_known_tokens from its arrival."""
        self.tokens: TokenArray = np.empty(self.num_prompt_tokens + max_tokens, dtype=np.int32)
        self.tokens[: self.num_prompt_tokens] = prompt_token_ids
        self.block_hashes: list[int] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.high_water = 0
        self.match: tuple[int, list[int]] = (-1, [])
        """(pool version, blocks found): the last prefix look-up, valid while the version stands."""
        self.view = RequestFacade(self)
        self.reset()

    def reset(self) -> None:
        """Forget blocks and progress, as before the first step: on arrival and when preempted."""
        self.blocks: list[int] = []
        self.row = -1
        self.num_computed_tokens = 0
        self.prefill_target = self.num_tokens
        self.num_registered_blocks = 0
        self.parent_serial = ROOT

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """True while known tokens must be computed before the request can decode."""
        return self.num_computed_tokens < self.prefill_target

    def commit(self, token_id: int) -> None:
        """Fill in the oldest token that was drawn and not yet known."""
        assert self.num_known_tokens < self.num_tokens, "a token arrives that nobody expects"
        self.tokens[self.num_known_tokens] = token_id
        self.num_known_tokens += 1

    @property
    def num_known_outputs(self) -> int:
        """Generated tokens whose values are here."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def is_full(self) -> bool:
        """Whether the last token it may generate is drawn, known or not."""
        return self.num_output_tokens >= self.max_tokens

    def block_tokens(self, index: int) -> bytes:
        """Token ids of full block `index`, as bytes."""
        return self.tokens[index * self.block_size : (index + 1) * self.block_size].tobytes()

    def block_hash(self, index: int) -> int:
        """Chained hash of full block `index`; each is computed once."""
        hashes = self.block_hashes
        while len(hashes) <= index:
            hashes.append(hash_block(hashes[-1] if hashes else 0, self.block_tokens(len(hashes))))
        return hashes[index]

    def output(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """What the caller gets, without text."""
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens[: self.num_prompt_tokens].tolist(),
            token_ids=self.tokens[self.num_prompt_tokens : self.num_known_tokens].tolist(),
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class RequestFacade:
    """`core.contracts.RequestView` over a live request: it shows, and cannot set."""

    _request: Request = field(repr=False)

    @property
    def id(self) -> int:
        """See RequestView."""
        return self._request.id

    @property
    def arrival_s(self) -> float:
        """See RequestView."""
        return self._request.arrival_s

    @property
    def priority(self) -> int:
        """See RequestView."""
        return self._request.priority

    @property
    def num_prompt_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_output_tokens

    @property
    def max_tokens(self) -> int:
        """See RequestView."""
        return self._request.max_tokens

    @property
    def num_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """See RequestView."""
        return self._request.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """See RequestView."""
        return self._request.is_prefilling
