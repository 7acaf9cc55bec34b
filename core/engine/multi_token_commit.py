"""The commit of draws of which a row of a step has several; other draws are committed in commit.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import Dispatched
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import Sampled
from hookline.core.step.executor import StepResult
from hookline.core.util.arrays import Array, IntArray, ints

Keep = Callable[[Sampled, IntArray, Mapping[str, Array]], None]
"""keep(sampled, tokens, extras): commits a token of each of these requests, as if a step of its own had drawn them."""


class MultiTokenCommitter:
    """Keeps the draws behind the first one of a row, as many as count."""

    def __init__(self, state: EngineState, dispatcher: Dispatcher, keep: Keep) -> None:
        self._table, self._live, self._dispatcher, self._keep = state.table, state.queue.live, dispatcher, keep

    def keep_at_once(self, dispatched: Dispatched, result: StepResult, num_more: Sequence[int]) -> bool:
        """Keep all draws of the step that count, unless one may end its request or must be looked at; returns whether
        they are kept.

        If not, `commit` keeps them, behind the first ones. result: with all draws of the step. num_more: how many of
        the draws behind the first one of each row count.
        """
        if result.extras:
            return False
        drawn, first = result.tokens.tolist(), dispatched.num_plain_draws
        kept = drawn[:first]
        for row, more in zip(dispatched.multi_token, num_more, strict=True):
            kept += drawn[first : first + 1 + more]
            first += len(row.tokens)
        entries_N = dispatched.sampled.entries_N
        more_N = np.zeros(len(entries_N), dtype=np.int64)
        more_N[dispatched.num_plain_draws :] = num_more
        is_kept = self._table.commit_several(dispatched.sampled, more_N, ints(kept))
        if is_kept:
            self._dispatcher.count_kept(entries_N, more_N)
        return is_kept

    def commit(self, dispatched: Dispatched, result: StepResult, num_more: Sequence[int]) -> dict[int, int]:
        """Keep the draws behind the first ones that count; returns how many are kept of each row, by the request's id.

        They are kept one after the other, as if each came from a step of its own: a request may end with any of them.
        """
        first, going = dispatched.num_plain_draws, list[tuple[Request, int, int]]()
        for row, more in zip(dispatched.multi_token, num_more, strict=True):
            going.append((row.request, first, more))
            first += len(row.tokens)
        num_kept, place = {request.id: 0 for request, _, _ in going}, 0
        while True:
            place += 1
            going = [one for one in going if one[2] >= place and one[0].id in self._live]
            if not going:
                return num_kept
            for request, _, _ in going:
                num_kept[request.id] = place
            entries_N, draws_N = ints(request.entry for request, _, _ in going), ints(at + place for _, at, _ in going)
            sampled = self._table.sampled(entries_N)
            self._dispatcher.count_kept(entries_N)
            self._dispatcher.count_draws(entries_N)
            extras = {name: values_NW[draws_N] for name, values_NW in result.extras.items()}
            self._keep(sampled, result.tokens[draws_N], extras)


def first_draws(dispatched: Dispatched, result: StepResult) -> StepResult:
    """The result of a step as if each row had drawn once."""
    lengths = [len(row.tokens) for row in dispatched.multi_token]
    first = dispatched.num_plain_draws
    kept = np.concatenate([np.arange(first), first + np.cumsum([0, *lengths[:-1]])])
    return replace(result, tokens=result.tokens[kept], extras={name: one[kept] for name, one in result.extras.items()})
