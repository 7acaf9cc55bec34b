"""Hands a step's results to their requests: log-probabilities to those that asked for them, tokens to grammars."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hookline.core.engine.ends import stops_with
from hookline.core.engine.step_builder import Dispatched, scored_chunks
from hookline.core.outputs import FinishReason
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.util.arrays import BoolArray, IntArray


def keep_scores(live: Mapping[int, Request], dispatched: Dispatched, rows: IntArray) -> IntArray:
    """Give the requests of a step their log-probabilities; returns the sampled tokens.

    rows: scored rows, of the sampled tokens and then of prompt tokens; see Executor.collect.
    """
    ids = dispatched.sampled.ids_N.tolist()
    for id_, row in zip(ids, rows, strict=False):
        request = live.get(id_)
        if request is not None and request.scores is not None:
            request.scores.add(row)
    start = len(ids)
    for _, request, first, count in scored_chunks(dispatched.chunks):
        assert request.scores is not None
        request.scores.add_prompt(first, rows[start : start + count])
        start += count
    return rows[: len(ids), 0]


def advance_grammars(
    structured_output: StructuredOutput | None, table: RunningTable, entries_N: IntArray, tokens_N: IntArray
) -> BoolArray:
    """Advance the grammars of these requests by their new tokens; returns which of them end with theirs, (N,) bool."""
    assert structured_output is not None, "a request has a grammar, and the engine no back end"
    is_over_N = np.zeros(len(entries_N), dtype=np.bool_)
    (places,) = table.is_constrained_S[entries_N].nonzero()
    tokens = tokens_N[places].tolist()
    for place, request, token_id in zip(places, table.requests(entries_N[places]), tokens, strict=True):
        constraint = request.constraint
        assert constraint is not None
        if token_id < 0:  # NO_TOKEN, which ends the request elsewhere
            continue
        if stops_with(request, token_id):
            constraint.end = FinishReason.STOP
        else:
            structured_output.take(constraint, token_id)
        is_over_N[place] = constraint.end is not None
    return is_over_N
