"""Writes the step that the ranks compute, once its requests and blocks have been moved. Moves nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from core.arguments import ArgumentWriter, Chunk
from core.request import Request
from core.shared_prefix import shared_prefix
from core.slots import Drawn, Slots
from core.step import IntArray, Step, float_bits, ints, no_ints


@dataclass
class Draft:
    """A step while its plan is carried out.

    table: new entries of the block table, (row, column, block). chunks: (request, first position, number of tokens).
    got_further: as of Dispatched.
    """

    admitted: list[Request] = field(default_factory=list)
    table: list[tuple[int, int, int]] = field(default_factory=list)
    chunks: list[tuple[Request, int, int]] = field(default_factory=list)
    got_further: bool = False


@dataclass(frozen=True)
class Dispatched:
    """A step, and whose next tokens it draws."""

    step: Step
    drawn: Drawn
    num_prefill_tokens: int
    num_cached_tokens: int
    num_prompt_tokens: int
    """Tokens of the prompts that begin with this step; some may be cached."""
    got_further: bool
    """Whether any request computes a token it never computed before."""
    chunks: Sequence[Chunk] = ()
    """The prompt chunks, if the step scores tokens."""


class StepWriter:
    """Writes one step after another. arguments: of the logits processors."""

    def __init__(self, slots: Slots, arguments: ArgumentWriter, *, shares_prefixes: bool) -> None:
        self.slots, self.arguments, self.shares_prefixes = slots, arguments, shares_prefixes
        self._decoding, self._shared_len = no_ints(), 0

    def write(self, draft: Draft, decode: IntArray) -> Dispatched:
        """The step, and who is drawn for."""
        slots, computing, drawn = self.slots, decode, decode
        step = Step(decode_rows=slots.row_S[decode])
        write_table(step, draft)
        if draft.chunks:
            write_chunks(step, draft.chunks)
            chunked = ints(request.slot for request, _, _ in draft.chunks)
            step.sampled_chunks = np.flatnonzero(slots.can_decode(chunked))
            computing = np.concatenate([decode, chunked])
            drawn = np.concatenate([decode, chunked[step.sampled_chunks]])
        self.write_mask(step, drawn)
        self.arguments.write(step, draft.admitted, draft.chunks, slots.requests(drawn))
        step.max_context_len = int(slots.num_computed_tokens_S[computing].max(initial=0))
        step.all_greedy = bool(slots.is_greedy_S[drawn].all())
        if self.shares_prefixes and not draft.chunks:
            self.write_shared_prefix(step, decode)
        begun = [request for request in draft.admitted if request.num_preemptions == 0]
        return Dispatched(
            step,
            slots.drawn(drawn),
            num_prefill_tokens=len(step.token_ids_T),
            num_cached_tokens=sum(request.num_cached_tokens for request in begun),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in begun),
            got_further=draft.got_further,
            chunks=draft.chunks if step.num_logprobs >= 0 else (),
        )

    def write_mask(self, step: Step, drawn: IntArray) -> None:
        """Forbid stop tokens to requests that have not reached their min_tokens."""
        (places,) = (self.slots.num_tokens_S[drawn] < self.slots.min_len_S[drawn]).nonzero()
        if not len(places):
            return
        stops = [request.stops_X for request in self.slots.requests(drawn[places])]
        step.mask_rows = places.repeat([len(stops_X) for stops_X in stops])
        step.mask_tokens = np.concatenate(stops)

    def write_shared_prefix(self, step: Step, decode: IntArray) -> None:
        """Look for a common prefix whenever other requests decode than in the last step that looked."""
        decoding = self.slots.id_S[decode]
        if not np.array_equal(decoding, self._decoding):
            self._decoding = decoding
            group, self._shared_len = shared_prefix(list(self.slots.requests(decode)))
            step.shared_rows = ints(request.row for request in group)
        step.shared_len = self._shared_len


def write_table(step: Step, draft: Draft) -> None:
    """Fill in the admitted requests and the new entries of the block table."""
    if draft.admitted:
        step.admit_rows = ints(request.row for request in draft.admitted)
        step.admit_seeds = ints(request.seed for request in draft.admitted)
        step.admit_temperatures = float_bits(request.temperature for request in draft.admitted)
    if draft.table:
        step.table_rows, step.table_columns, step.table_blocks = np.array(draft.table, dtype=np.int64).T


def write_chunks(step: Step, chunks: Sequence[tuple[Request, int, int]]) -> None:
    """Fill in the prompt chunks: (request, first position, number of tokens)."""
    step.chunk_rows = ints(request.row for request, _, _ in chunks)
    step.chunk_starts = ints(start for _, start, _ in chunks)
    step.chunk_lens = ints(num_tokens for _, _, num_tokens in chunks)
    tokens = [request.tokens[start : start + num_tokens] for request, start, num_tokens in chunks]
    step.token_ids_T = np.concatenate(tokens, dtype=np.int64)
