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

    def read(self, dispatched: Dispatched, result: StepResult) -> StepResult:
        """The result of a step, in which the device told of its own drafts: see Executor.collect.

        Of the result the draws of drafts that there were none of are left out, as if the host had made the others.
        """
        if not dispatched.step.num_drafts:
            return result
        told_BX = result.tokens.reshape(len(dispatched.drafted), -1)
        for row, (num_drafts, kept) in zip(dispatched.drafted, told_BX[:, :2].tolist(), strict=True):
            row.tokens, row.kept = row.tokens[: 1 + num_drafts], kept
        drawn_BX = told_BX[:, 2:]
        is_drawn = np.arange(drawn_BX.shape[1]) <= told_BX[:, :1]
        return replace(result, tokens=drawn_BX[is_drawn])

    def keep_at_once(self, dispatched: Dispatched, result: StepResult) -> tuple[Sequence[int], bool]:
        """How many drafts of each row are right, and whether all draws of the step that count were kept.

        They are not if one may end its request or must be looked at; `commit` keeps them then, behind the first ones.
        result: with all draws of the step.
        """
        drawn, first, num_right = result.tokens.tolist(), dispatched.num_plain_draws, list[int]()
        kept = drawn[:first]
        for row in dispatched.drafted:
            own = drawn[first : first + len(row.tokens)]
            num_right.append(self._speculation.num_right(row, own) if row.request.id in self._live else 0)
            kept += own[: 1 + num_right[-1]]
            first += len(own)
        entries_N = dispatched.sampled.entries_N
        more_N = np.zeros(len(entries_N), dtype=np.int64)
        more_N[dispatched.num_plain_draws :] = num_right
        is_kept = not result.extras and self._table.commit_several(dispatched.sampled, more_N, ints(kept))
        if is_kept:
            self._dispatcher.count_kept(entries_N, more_N)
        return num_right, is_kept

    def commit(
        self, dispatched: Dispatched, result: StepResult, num_right: Sequence[int], *, is_kept: bool
    ) -> Mapping[int, int]:
        """Keep the draws behind right drafts, unless they were kept at once; returns how many are kept of each row, by
        the request's id.

        They are kept one after the other, as if each came from a step of its own: a request may end with any of them.
        """
        num_kept = self._commit(dispatched, result, num_right, is_kept=is_kept)
        if dispatched.step.num_drafts:
            self._speculation.note_known(row.request for row in dispatched.drafted if row.request.id in self._live)
        return num_kept

    def _commit(
        self, dispatched: Dispatched, result: StepResult, num_right: Sequence[int], *, is_kept: bool
    ) -> Mapping[int, int]:
        if is_kept:
            return {row.request.id: right for row, right in zip(dispatched.drafted, num_right, strict=True)}
        first, going = dispatched.num_plain_draws, list[tuple[Request, int, int]]()
        for row, right in zip(dispatched.drafted, num_right, strict=True):
            going.append((row.request, first, right))
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
    """The result of a step as if each row with drafts had drawn once."""
    lengths = [len(row.tokens) for row in dispatched.drafted]
    first = dispatched.num_plain_draws
    kept = np.concatenate([np.arange(first), first + np.cumsum([0, *lengths[:-1]])])
    return replace(result, tokens=result.tokens[kept], extras={name: one[kept] for name, one in result.extras.items()})
