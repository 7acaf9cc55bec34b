"""Writes into a step what logits processors must know of the requests it admits, and which of them it runs.

Follows which rows of the request table hold arguments that a later owner of the row must not inherit. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from core.request import Request
from core.step import IntArray, Step, ints, no_ints

Record = tuple[int, int, IntArray]
"""Row of the request table, processor, values."""
Chunk = tuple[Request, int, int]
"""A request, the position of the chunk's first token, and its length."""
NUM_LOGPROBS = (0, 1, 5, 10, 20)
"""What `num_logprobs` is rounded up to, so that few graphs serve all requests."""


class ArgumentWriter:
    """One per engine. Costs two empty look-ups a step while no request uses a processor."""

    def __init__(self, num_rows: int) -> None:
        self._loaded = [0] * num_rows
        self._running: set[int] = set()

    def forget(self, request: Request) -> None:
        """The request gave its row back."""
        self._running.discard(request.id)

    def write(self, step: Step, admitted: Sequence[Request], chunks: Sequence[Chunk], drawn: Iterable[Request]) -> None:
        """Fill in the processor_*, known_* and scored_* sections, `processors` and `num_logprobs`."""
        records: list[Record] = []
        for request in admitted:
            records += self._records(request)
        if records:
            step.processor_rows = ints(row for row, _, _ in records)
            step.processor_ids = ints(index for _, index, _ in records)
            step.processor_lens = ints(len(values) for _, _, values in records)
            step.processor_values = np.concatenate([values for _, _, values in records])
        if self._running:
            write_known_tokens(step, [request for request in admitted if request.prepared.reads_tokens])
            for request in drawn:
                if request.params.logprobs is not None:
                    step.num_logprobs = max(step.num_logprobs, request.params.logprobs)
                prepared = request.prepared
                step.processors |= prepared.used(request.num_output_tokens) if prepared.ends else prepared.bits
            self._write_scored(step, scored_chunks(chunks))

    def _write_scored(self, step: Step, scored: Sequence[tuple[int, Request, int, int]]) -> None:
        if scored:
            step.scored_chunks = ints(index for index, *_ in scored)
            step.scored_lens = ints(count for *_, count in scored)
            tokens = [request.tokens[first : first + count] for _, request, first, count in scored]
            step.scored_tokens = np.concatenate(tokens, dtype=np.int64)
            wanted = [request.params.prompt_logprobs or 0 for _, request, _, _ in scored]
            step.num_logprobs = max(step.num_logprobs, *wanted)
        if step.num_logprobs >= 0:
            step.num_logprobs = next(size for size in NUM_LOGPROBS if size >= step.num_logprobs)

    def _records(self, request: Request) -> list[Record]:
        """The request's own arguments, and defaults where the row still has those of its last owner."""
        own = request.prepared.records
        if own or request.scores is not None:
            self._running.add(request.id)
        if not own and not self._loaded[request.row]:
            return []
        wanted = sum(1 << index for index, _ in own)
        stale, self._loaded[request.row] = self._loaded[request.row] & ~wanted, wanted
        resets = [(request.row, index, no_ints()) for index in range(stale.bit_length()) if stale >> index & 1]
        return resets + [(request.row, index, values) for index, values in own]


def scored_chunks(chunks: Sequence[Chunk]) -> list[tuple[int, Request, int, int]]:
    """(index, request, first position, number) of the prompt tokens that chunks make known the probabilities of.

    A chunk's hidden states tell the probabilities of the tokens one position further.
    """
    found = []
    for index, (request, start, length) in enumerate(chunks):
        count = min(length, request.num_prompt_tokens - 1 - start)
        if request.params.prompt_logprobs is not None and count > 0:
            found.append((index, request, start + 1, count))
    return found


def write_known_tokens(step: Step, requests: Sequence[Request]) -> None:
    """All tokens of newly admitted requests, which may have been generated before a preemption."""
    if requests:
        step.known_rows = ints(request.row for request in requests)
        step.known_prompt_lens = ints(request.num_prompt_tokens for request in requests)
        step.known_lens = ints(request.num_tokens for request in requests)
        tokens = [request.tokens[: request.num_tokens] for request in requests]
        step.known_tokens = np.concatenate(tokens, dtype=np.int64)
