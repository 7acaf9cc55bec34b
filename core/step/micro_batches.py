"""A step cut into micro-batches, which the stages of a model compute one after the other: each is a step of its own.

Every rank cuts by the same rule, so micro-batches need not be sent. Legend: N draws of a step, P scored prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.step.message import HEADER, POOLED_WIDTH, Step
from hookline.core.util.arrays import IntArray

OF_THE_WHOLE = (
    *("admit_rows", "admit_seeds", "admit_temperatures", "table_rows", "table_columns", "table_blocks", "shared_rows"),
    *("extension_rows", "extension_ids", "extension_lens", "extension_values"),
    *("known_rows", "known_prompt_lens", "known_lens", "known_tokens"),
    *("restored_rows", "restored_slots", "saved_rows", "saved_slots"),
)
"""Sections that concern the whole step; the first micro-batch has them, since it is computed first."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a step, which is a step itself.

    places: for each of its results (draws, then scored prompt tokens), the index among the whole step's results. masks:
    for each of its draws that has a mask, the index among the whole step's masks.
    """

    step: Step
    places: IntArray
    masks: IntArray


def cut(step: Step, most: int) -> list[MicroBatch]:
    """Cut a step into at most `most` micro-batches, none of them empty, in the order in which they are computed.

    Decodes are cut into equal parts, in their order. Prompt chunks are not cut, but distributed in their order so that
    micro-batches have about the same number of tokens. A step of one row is one micro-batch.
    """
    num_decodes, num_chunks = len(step.decode_rows), len(step.chunk_rows)
    count = max(1, min(most, num_decodes + num_chunks))
    if count == 1:
        num_results = step.num_sampled + int(step.scored_lens.sum())
        return [MicroBatch(step, np.arange(num_results), np.arange(len(step.masked_draws)))]
    decodes = [index * num_decodes // count for index in range(count + 1)]
    chunks = _chunk_bounds(step.chunk_lens, decodes)
    spans = [span for span in zip(decodes, decodes[1:], chunks, chunks[1:], strict=False) if _is_filled(*span)]
    return [_part(step, *span, is_first=index == 0) for index, span in enumerate(spans)]


def _is_filled(first: int, end: int, first_chunk: int, end_chunk: int) -> bool:
    return first < end or first_chunk < end_chunk


def _chunk_bounds(lens: IntArray, decodes: Sequence[int]) -> list[int]:
    """Where to cut the list of chunks, so that micro-batches, with their decodes, have about equally many tokens."""
    ends, count = np.concatenate([[0], np.cumsum(lens)]), len(decodes) - 1
    total = decodes[-1] + int(ends[-1])
    bounds = [0]
    for index in range(1, count):
        missing = np.abs(decodes[index] + ends - total * index / count)
        bounds.append(max(bounds[-1], int(missing.argmin())))
    return [*bounds, len(lens)]


def _part(step: Step, first: int, end: int, first_chunk: int, end_chunk: int, *, is_first: bool) -> MicroBatch:
    num_decodes, num_draws = len(step.decode_rows), step.num_sampled
    tokens = np.concatenate([[0], np.cumsum(step.chunk_lens)])
    is_sampled = (step.sampled_chunks >= first_chunk) & (step.sampled_chunks < end_chunk)
    draws = np.concatenate([np.arange(first, end), num_decodes + np.nonzero(is_sampled)[0]])
    own_draw = np.full(num_draws, -1)
    own_draw[draws] = np.arange(len(draws))
    masked_pairs, masks = own_draw[step.mask_rows] >= 0, np.nonzero(own_draw[step.masked_draws] >= 0)[0]
    is_scored = (step.scored_chunks >= first_chunk) & (step.scored_chunks < end_chunk)
    is_scored_token = np.repeat(is_scored, step.scored_lens)
    pooled_P4 = step.pooled.reshape(-1, POOLED_WIDTH)
    pooled_P4 = pooled_P4[(pooled_P4[:, 0] >= first_chunk) & (pooled_P4[:, 0] < end_chunk)]
    sections: dict[str, Any] = {
        "decode_rows": step.decode_rows[first:end],
        "chunk_rows": step.chunk_rows[first_chunk:end_chunk],
        "chunk_starts": step.chunk_starts[first_chunk:end_chunk],
        "chunk_lens": step.chunk_lens[first_chunk:end_chunk],
        "token_ids_T": step.token_ids_T[tokens[first_chunk] : tokens[end_chunk]],
        "sampled_chunks": step.sampled_chunks[is_sampled] - first_chunk,
        "mask_rows": own_draw[step.mask_rows[masked_pairs]],
        "mask_tokens": step.mask_tokens[masked_pairs],
        "masked_draws": own_draw[step.masked_draws[masks]],
        "scored_chunks": step.scored_chunks[is_scored] - first_chunk,
        "scored_lens": step.scored_lens[is_scored],
        "scored_tokens": step.scored_tokens[is_scored_token],
        "pooled": (pooled_P4 - [first_chunk, *[0] * (POOLED_WIDTH - 1)]).reshape(-1),
    }
    if is_first:
        sections |= {name: getattr(step, name) for name in OF_THE_WHOLE}
    sections |= {name: getattr(step, name) for name in HEADER}
    places = np.concatenate([draws, num_draws + np.nonzero(is_scored_token)[0]])
    return MicroBatch(Step(**sections), places, masks)


def joined(parts: Sequence[MicroBatch], results: Sequence[IntArray]) -> IntArray:
    """The results (N + P, ...) of a step, put together from those of its micro-batches."""
    if len(parts) == 1:
        return results[0]
    found = np.empty((sum(map(len, results)), *max(results, key=np.ndim).shape[1:]), dtype=np.int64)
    for part, rows in zip(parts, results, strict=True):
        if len(rows):
            found[part.places] = rows
    return found


def token_places(parts: Sequence[MicroBatch]) -> list[IntArray]:
    """For each micro-batch, the indices of its tokens among the whole step's: decodes first, then chunks' tokens."""
    found, decode, token = [], 0, sum(len(part.step.decode_rows) for part in parts)
    for part in parts:
        num_decodes, num_tokens = len(part.step.decode_rows), len(part.step.token_ids_T)
        found.append(np.concatenate([np.arange(decode, decode + num_decodes), np.arange(token, token + num_tokens)]))
        decode, token = decode + num_decodes, token + num_tokens
    return found
