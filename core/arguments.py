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


class ArgumentWriter:
    """One per engine. Costs two empty look-ups a step while no request uses a processor."""

    def __init__(self, num_rows: int) -> None:
        self._loaded = [0] * num_rows
        self._running: set[int] = set()

    def forget(self, request: Request) -> None:
        """The request gave its row back."""
        self._running.discard(request.id)

    def write(self, step: Step, admitted: Sequence[Request], drawn: Iterable[Request]) -> None:
        """Fill in the processor_* and known_* sections, and `processors`."""
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
                prepared = request.prepared
                step.processors |= prepared.used(request.num_output_tokens) if prepared.ends else prepared.bits

    def _records(self, request: Request) -> list[Record]:
        """The request's own arguments, and defaults where the row still has those of its last owner."""
        own = request.prepared.records
        if not own and not self._loaded[request.row]:
            return []
        wanted = sum(1 << index for index, _ in own)
        stale, self._loaded[request.row] = self._loaded[request.row] & ~wanted, wanted
        if own:
            self._running.add(request.id)
        resets = [(request.row, index, no_ints()) for index in range(stale.bit_length()) if stale >> index & 1]
        return resets + [(request.row, index, values) for index, values in own]


def write_known_tokens(step: Step, requests: Sequence[Request]) -> None:
    """All tokens of newly admitted requests, which may have been generated before a preemption."""
    if requests:
        step.known_rows = ints(request.row for request in requests)
        step.known_prompt_lens = ints(request.num_prompt_tokens for request in requests)
        step.known_lens = ints(request.num_tokens for request in requests)
        tokens = [request.tokens[: request.num_tokens] for request in requests]
        step.known_tokens = np.concatenate(tokens, dtype=np.int64)
