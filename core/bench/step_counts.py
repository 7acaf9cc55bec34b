"""Counts of a step's work, computed from its message alone, on which its time depends.

`recorder` records the counts, `hookline.core.simulate.cost` estimates seconds from them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hookline.core.step.message import Step
from hookline.core.util.arrays import BoolArray, IntArray


class StepCounts(NamedTuple):
    """Counts of a step's work; docs/benchmarks.md describes each."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """Query-key pairs of the prompt chunks."""
    prefill_chunks: int = 0
    decode_rows: int = 0
    """Tokens that decodes compute, drafts included."""
    decode_context_tokens: int = 0
    """Sum of the context lengths of the rows that decode, the token included that they compute."""
    decode_shared_tokens: int = 0
    """The context tokens among them that kernels read once for all rows with the same prefix."""


def has_drafts(step: Step) -> BoolArray:
    """Of each chunk of a step, whether it is a decode with drafts, which draws several tokens."""
    return np.bincount(step.sampled_chunks, minlength=len(step.chunk_rows)) > 1


class StepCounter:
    """Follows the steps of an engine from its first on; it counts none out of order."""

    def __init__(self, max_num_seqs: int) -> None:
        self._lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_sharing = 0

    def note_lengths(self, rows: IntArray, lengths: IntArray) -> None:
        """Note how many tokens these rows have, which a step does not say of rows for which the device drafts."""
        self._lengths[rows] = lengths

    def count(self, step: Step) -> StepCounts:
        """The counts of the next step. Rows for which the device drafts are of the lengths that were noted before."""
        ends = step.chunk_starts + step.chunk_lens
        self._lengths[step.chunk_rows] = ends
        self._lengths[step.decode_rows] += 1
        if len(step.shared_rows):
            self._num_sharing = len(step.shared_rows)
        pairs = step.chunk_lens * (step.chunk_starts + ends + 1) // 2
        drafted = has_drafts(step)
        num_drafted = int(step.chunk_lens[drafted].sum())
        per_row = 1 + step.num_drafts
        num_drafting = per_row * len(step.drafting_rows)
        drafting_pairs = per_row * int(self._lengths[step.drafting_rows].sum()) + num_drafting * step.num_drafts // 2
        return StepCounts(
            prefill_tokens=len(step.token_ids_T) - num_drafted,
            prefill_pairs=int(pairs[~drafted].sum()),
            prefill_chunks=int((~drafted).sum()),
            decode_rows=len(step.decode_rows) + num_drafted + num_drafting,
            decode_context_tokens=int(self._lengths[step.decode_rows].sum() + pairs[drafted].sum()) + drafting_pairs,
            decode_shared_tokens=self._num_sharing * step.shared_len,
        )
