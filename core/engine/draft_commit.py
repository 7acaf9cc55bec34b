"""The commit of draws behind drafts, of which a row of a step has several; other draws are committed in commit.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.speculation import Speculation
from hookline.core.engine.state import EngineState
from hookline.core.engine.step_builder import Dispatched
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import Sampled
from hookline.core.step.executor import StepResult
from hookline.core.util.arrays import Array, IntArray, ints

Keep = Callable[[Sampled, IntArray, Mapping[str, Array]], None]
"""keep(sampled, tokens, extras): commits a token of each of these requests, as if a step of its own had drawn them."""


class DraftCommitter:
    """Keeps the draws behind drafts that turned out right."""

    def __init__(self, state: EngineState, speculation: Speculation, dispatcher: Dispatcher, keep: Keep) -> None:
        self._state, self._table, self._live = state, state.table, state.queue.live
        self._speculation, self._dispatcher, self._keep = speculation, dispatcher, keep
        self._hears_gaps = state.observers.hears("on_token_gaps")

    def commit(self, dispatched: Dispatched, result: StepResult) -> int:
        """Keep a row's further draws as long as the drafts before them are right; returns how many are kept.

        They are kept one after the other, as if each came from a step of its own: a request may end with any of them.
        result: with all draws of the step.
        """
        speculation, live = self._speculation, self._live
        drawn_N, drawn = result.tokens, result.tokens.tolist() if dispatched.drafted else []
        first, going, total = dispatched.num_plain_draws, list[tuple[Request, int, int]](), 0
        num_kept = {row.request.id: 0 for row in dispatched.drafted}
        for row in dispatched.drafted:
            if row.request.id in live:
                num_right = speculation.num_right(row, drawn[first : first + len(row.tokens)])
                going.append((row.request, first, num_right))
                speculation.adapt(row, num_right)
            first += len(row.tokens)
        kept = [one for one in going if one[2]]
        if kept and not result.extras and self._keep_at_once(kept, drawn_N):
            num_kept |= {request.id: num_right for request, _, num_right in kept}
            going, total = [], sum(num_right for _, _, num_right in kept)
        place = 0
        while True:
            place += 1
            going = [one for one in going if one[2] >= place and one[0].id in live]
            if not going:
                speculation.count_step(dispatched.drafted, num_kept)
                return total
            for request, _, _ in going:
                num_kept[request.id] = place
            entries_N, draws_N = ints(request.entry for request, _, _ in going), ints(at + place for _, at, _ in going)
            sampled = self._table.sampled(entries_N)
            self._dispatcher.count_kept(entries_N)
            self._keep(
                sampled, drawn_N[draws_N], {name: values_NW[draws_N] for name, values_NW in result.extras.items()}
            )
            total += len(going)

    def _keep_at_once(self, kept: Sequence[tuple[Request, int, int]], drawn_N: IntArray) -> bool:
        """Keep all these draws, unless one may end its request or must be looked at: returns whether they are kept.

        kept: requests, each with the place of its first draw and the number of those behind it that it keeps.
        """
        entries, counts = ints(request.entry for request, _, _ in kept), ints(count for _, _, count in kept)
        tokens_N = drawn_N[ints(at + place for _, at, count in kept for place in range(1, count + 1))]
        if not self._table.commit_several(entries, counts, tokens_N):
            return False
        self._dispatcher.count_kept(entries, counts)
        if self._hears_gaps:  # they come at the same moment as the first draw
            self._state.observers.notify("on_token_gaps", gaps_s=np.zeros(len(tokens_N)))
        self._state.cache.cache_filled_blocks(entries)
        return True


def first_draws(dispatched: Dispatched, result: StepResult) -> StepResult:
    """The result of a step as if each row with drafts had drawn once."""
    lengths = [len(row.tokens) for row in dispatched.drafted]
    first = dispatched.num_plain_draws
    kept = np.concatenate([np.arange(first), first + np.cumsum([0, *lengths[:-1]])])
    return replace(result, tokens=result.tokens[kept], extras={name: one[kept] for name, one in result.extras.items()})
