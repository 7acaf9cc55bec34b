"""Speculative decoding: decodes compute draft tokens beside their newest token, and keep the right ones.

A draw is a function of the request's seed, the position and the logits. So a draft is right exactly if it is the token
that the step draws at its position; the draw after that token then counts too, and the request has the same tokens as
without drafts. A row with k drafts is a chunk of 1 + k tokens with a draw after each. Afterwards the device does not
know how many were kept: the row's next step is a chunk again, with its newest token from the host. Where the device
makes the drafts itself it does know, and steps overlap (DeviceDrafting). Drafts use only tokens of the step and
blocks that the policy's plan leaves free; policies do not see them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hookline.core.contracts import ComputedRow, DraftCounts, Drafter
from hookline.core.engine.plan_check import CheckedPlan
from hookline.core.engine.step_builder import Decodes, Decoding, Dispatched, MultiTokenDecode, StepDraft, TokenOwners
from hookline.core.kv_cache.manager import KVCacheManager
from hookline.core.plugin.registry import PROCESSOR
from hookline.core.requests.late_input import LateInput
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.speculation.depth import DraftDepth
from hookline.core.speculation.proposals import Proposals, known_tokens
from hookline.core.step.captured import MOST_ROW_TOKENS, TOKEN_ROWS
from hookline.core.step.executor import StepResult
from hookline.core.util.arrays import IntArray, every, ints, no_ints, without

logger = logging.getLogger("hookline")
MAX_PERIOD = 64
"""Longest period of an adaptive drafter: even a request whose drafts are wrong has drafts in one of so many steps."""
NUM_EMPTY, MAX_PERIOD_EMPTY = 16, 8
"""After NUM_EMPTY steps in a row without a proposal, the drafter is asked for a request in one of two steps, then of
four, up to MAX_PERIOD_EMPTY. The limit is low because a text may begin to repeat at any token."""


@dataclass(slots=True)
class _Pause:
    """A request has drafts in one of `period` steps, next after step `until`. Requests with the same period have them
    in the same steps, as a step in which any row may have drafts overlaps for none.
    """

    until: int = 0
    period: int = 1
    num_empty: int = 0
    """Steps without a proposal since the last one."""

    def lengthen(self, step: int, most: int) -> None:
        """Pause from a step on, for twice as long as before."""
        self.period = min(2 * self.period, most)
        self.until = (step // self.period + 1) * self.period - 1


class DeviceDrafting:
    """Which requests' tokens the device knows, so that it makes drafts itself: the host's half of `Step.drafting_rows`.

    Such a step needs nothing of the tokens before it from the host. So it is planned and launched while the step before
    it is computed, on bounds: blocks for all drafts of both steps, and the fewest tokens that a request can have.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}
        """By the row of the request table: whose tokens the device has, and how many, as far as they were committed."""
        self._drafting_ids, self.depth = no_ints(), 0
        """The requests of the step that was launched last, if the device drafted in it, and how many drafts for each;
        else none."""

    def begin(self, ids: IntArray, depth: int) -> None:
        """Note a step in which the device makes so many drafts for each of these requests; none for other steps."""
        self._drafting_ids, self.depth = ids, depth

    def goes_on(self, ids: IntArray) -> bool:
        """Whether the device knows the newest tokens of these requests when the step launched last is over."""
        known = self._drafting_ids
        return np.array_equal(ids, known) or every(np.isin(ids, known))  # mostly they are the same, in the same order

    def show(self, requests: Iterable[Request]) -> dict[str, Any]:
        """The shown_* sections of a step's message: the tokens of these requests that the device lacks; no section if
        it lacks none.

        All tokens of the requests are known on the host.
        """
        shown = list[tuple[Request, int]]()
        for request in requests:
            id_, start = self._known.get(request.row, (-1, 0))
            if id_ != request.id or start != request.num_known_tokens:
                shown.append((request, start if id_ == request.id else 0))
                self.note(request)
        if not shown:
            return {}
        tokens = [request.tokens[start : request.num_known_tokens] for request, start in shown]
        return {
            "shown_rows": ints(request.row for request, _ in shown),
            "shown_starts": ints(start for _, start in shown),
            "shown_lens": ints(map(len, tokens)),
            "shown_limits": ints(request.max_len for request, _ in shown),
            "shown_tokens": np.concatenate(tokens, dtype=np.int64),
        }

    def lose(self) -> None:
        """After a lost step, assume that the device has no request's tokens."""
        self._known.clear()

    def note(self, request: Request) -> None:
        """Note that the device has all tokens of the request that are known on the host."""
        if request.row >= 0:
            self._known[request.row] = request.id, request.num_known_tokens


class Speculation(Decoding):
    """The drafts of one engine. name: of the drafter, for errors. late: of requests whose draws wait for it, whose
    drafts end before the first token that it forbids. If the drafter is adaptive, a request whose drafts are
    all wrong, or for which none are proposed, pauses, twice as long each time. weighs_costs: whether it is also asked
    for only as many drafts as pay, by how long steps take.
    max_num_batched_tokens: the engine's; a step with drafts has no more tokens, nor more than graphs are captured for.
    on_device: whether the device makes drafts itself where it can.
    """

    reads_states = True

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        extensions: InstalledExtensions,
        vocab_size: int,
        late: LateInput | None = None,
        *,
        max_num_batched_tokens: int,
        weighs_costs: bool = False,
        on_device: bool = False,
    ) -> None:
        self._drafter, self._late, self._proposals = drafter, late, Proposals(drafter, name, vocab_size)
        self._adapts, self._most_tokens = drafter.adaptive, min(max_num_batched_tokens, TOKEN_ROWS[-1])
        self._depths = DraftDepth(drafter.k) if weighs_costs and drafter.adaptive else None
        self.max_tokens = 1 + drafter.k
        self._num_ahead = 0
        """How many drafts the device makes for each request of the next step, if that is launched ahead."""
        self._last_commit: tuple[float, int] | None = None
        """When a step was committed last, and its depth; None if it had prompts."""
        self._kinds = [stage.entry.kind for stage in extensions.stages]
        self._pauses: dict[int, _Pause] = {}
        self._step = 0
        """The number of the step that was begun last."""
        self._chunked: set[int] = set()
        """Requests whose rows on the device do not hold their newest token."""
        self.device = DeviceDrafting() if on_device else None
        self._pretended = drafter.pretended_length
        self._due = 0.0
        self.counts: DraftCounts = DraftCounts(pretended_length=self._pretended)
        if self._pretended is not None:
            logger.warning(
                "%s pretends that requests keep %s tokens of a step: this is for benchmarks, and answers are not the "
                "model's",
                *(name, self._pretended),
            )

    def join(self, queue: RequestQueue, cache: KVCacheManager) -> None:
        """See Decoding."""
        self._queue, self._table, self._cache = queue, queue.table, cache

    def may_overlap(self, plan: CheckedPlan) -> bool:
        """See Decoding: not if requests may have drafts of the host, nor if the device lacks their newest token."""
        running, step = self._queue.running, self._step + 1
        self._num_ahead = self._num_on_device(plan, 1, is_ahead=True)
        if self._num_ahead or not self._chunked.isdisjoint(running):
            return self._num_ahead > 0
        requests = running.values()
        if not self._depth(len(requests), self._room(len(requests), len(requests)), step):
            return True
        return all(self._refused(request) is not None or self._pauses_in(request, step) for request in requests)

    def look_ahead(self, dispatched: Dispatched) -> None:
        """See Decoding."""
        self._proposals.look_ahead(dispatched.multi_token)

    def extend(self, plan: CheckedPlan, draft: StepDraft, *, is_ahead: bool) -> Decodes:
        """See Decoding: decodes have drafts as far as the step's tokens and free blocks last."""
        num_drafts = self._num_ahead if is_ahead else self._num_on_device(plan, 0, is_ahead=False)
        self._step += 1
        # One that was preempted draws its newest token anew, behind the last chunk of its prompt.
        self._chunked.difference_update(request.id for request in draft.admitted)
        if num_drafts:
            return self._draft_on_device(plan.decode, draft, num_drafts, is_ahead=is_ahead)
        if self.device is not None:
            self.device.begin(no_ints(), 0)
        if is_ahead:  # it is planned before the tokens before it are known
            self.counts.skip("overlap", len(plan.decode))
            return Decodes(plan.decode)
        return self._draft(plan.decode, draft)

    def _num_on_device(self, plan: CheckedPlan, num_uncounted: int, *, is_ahead: bool) -> int:
        """How many drafts the device makes for each request of the plan's step; 0 if the host makes them, if there are
        none, or if they need more blocks than there are. num_uncounted: how many tokens of each request the step has
        beside them that do not count as computed yet. is_ahead: as of `extend`.
        """
        device, table, entries, count, step = self.device, self._table, plan.decode, len(plan.decode), self._step + 1
        if device is None or plan.prefill or plan.preempt or not count:
            return 0
        if is_ahead and not device.goes_on(table.id_S[entries]):
            return 0
        if not every(table.num_tokens_S[entries] >= table.min_len_S[entries]):
            return 0  # tokens are forbidden by position
        if all(self._pauses_in(request, step) for request in table.requests(entries)):
            return 0
        if not is_ahead and not all(request.is_plain for request in table.requests(entries)):
            return 0  # while it goes on, they are the same requests
        num_drafts = self._depth(count, min(MOST_ROW_TOKENS - 1, self._room(count, count)), step)
        if not num_drafts:
            return 0
        most_computed = self._most_computed(entries, num_uncounted + num_drafts, is_ahead=is_ahead)
        needed = np.maximum(most_computed - table.num_block_tokens_S[entries], 0)
        num_blocks = int((-(-needed // self._cache.pool.block_size)).sum()) * self._cache.blocks_per_column
        return num_drafts if num_blocks <= self._cache.pool.num_free else 0

    def _most_computed(self, entries: IntArray, num_tokens: int, *, is_ahead: bool) -> IntArray:
        """How many tokens these requests can have in the cache after so many more, whatever the step in flight kept."""
        unknown = self.device.depth if is_ahead and self.device is not None else 0
        most: IntArray = self._table.num_computed_tokens_S[entries] + (num_tokens + unknown)
        return np.minimum(most, self._table.max_len_S[entries], out=most)

    def _draft_on_device(self, entries: IntArray, draft: StepDraft, num_drafts: int, *, is_ahead: bool) -> Decodes:
        """Have the device make drafts for all decodes of the step; there are blocks for them."""
        device, table, cache = self.device, self._table, self._cache
        assert device is not None
        most_computed = self._most_computed(entries, num_drafts, is_ahead=is_ahead)
        is_short = most_computed > table.num_block_tokens_S[entries]
        counts = (most_computed - table.num_computed_tokens_S[entries])[is_short].tolist()
        for request, count in zip(table.requests(entries[is_short]), counts, strict=True):
            draft.table.extend(cache.allocate(request, cache.missing_blocks(request, count)))
        shown = {} if is_ahead else device.show(table.requests(entries))
        device.begin(table.id_S[entries], num_drafts)
        rows = [MultiTokenDecode(request, 0, [0] * (1 + num_drafts)) for request in table.requests(entries)]
        self._note_launched(rows)
        sections = {"drafting_rows": table.row_S[entries], "num_drafts": num_drafts, **shown}
        return Decodes(no_ints(), rows, entries, 1 + num_drafts, sections, int(most_computed.max()))

    def _draft(self, entries: IntArray, draft: StepDraft) -> Decodes:
        """Give decodes drafts of the host, as far as the step's tokens and free blocks last."""
        table, rows, asked = self._table, list[MultiTokenDecode](), list[tuple[Request, int]]()
        room = self._room(len(entries), len(entries) + sum(length for _, _, length in draft.chunks))
        depth, lengths = self._depth(len(entries), room, self._step), table.num_tokens_S[entries]
        # The token after the last draft must be within the request's length, too.
        left = (table.max_len_S[entries] - lengths - 1).tolist()
        if room > 0 and not depth:
            self.counts.skip("cost", len(entries))
        else:
            for request, most in zip(table.requests(entries), left, strict=True):
                if most := self._most_drafts(request, min(depth, most)):
                    asked.append((request, most))
        proposed = {request.id: drafts for (request, _), drafts in zip(asked, self._proposals.of(asked), strict=True)}
        newest = table.tokens_SL[entries, lengths - 1].tolist()
        for request, length, token in zip(table.requests(entries), lengths.tolist(), newest, strict=True):
            drafts = self._noted(request, proposed[request.id]) if request.id in proposed else []
            if drafts or request.id in self._chunked:
                rows.append(MultiTokenDecode(request, length - 1, [token, *drafts]))
        if not rows:
            return Decodes(entries, max_tokens=1 + depth)
        are_all = len(rows) == len(entries)  # which are in the same order
        own = entries if are_all else ints(row.request.entry for row in rows)
        self._allocate(rows, own, draft)
        self._note_launched(rows)
        return Decodes(no_ints() if are_all else without(entries, own), rows, own, 1 + depth)

    def _allocate(self, rows: Sequence[MultiTokenDecode], entries: IntArray, draft: StepDraft) -> None:
        """Give rows blocks for their drafts, or drop the drafts if there are none."""
        num_computed = self._table.num_computed_tokens_S[entries] + ints(row.num_behind for row in rows)
        for place in (num_computed > self._table.num_block_tokens_S[entries]).nonzero()[0].tolist():
            row = rows[place]
            missing = self._cache.missing_blocks(row.request, row.num_behind)
            if missing > self._cache.pool.num_free:
                row.shorten(1)
                continue
            draft.table.extend(self._cache.allocate(row.request, missing))

    def _note_launched(self, rows: Sequence[MultiTokenDecode]) -> None:
        """Note the rows of a step that is launched: a row without drafts holds its newest token from then on."""
        for row in rows:
            (self._chunked.add if row.num_behind else self._chunked.discard)(row.request.id)

    def accept(self, dispatched: Dispatched, result: StepResult) -> tuple[StepResult, Sequence[int]]:
        """See Decoding: as many draws behind the first one count as drafts are right."""
        rows = dispatched.multi_token
        told: list[int | None] = [None] * len(rows)
        if dispatched.step.num_drafts:  # the device told of its own drafts: see StepResult.tokens
            told_BX = result.tokens.reshape(len(rows), -1)
            told, drawn_BX = told_BX[:, 1].tolist(), told_BX[:, 2:]
            for row, num_drafts in zip(rows, told_BX[:, 0].tolist(), strict=True):
                row.shorten(1 + num_drafts)
            is_drawn_BX = np.arange(drawn_BX.shape[1]) <= told_BX[:, :1]  # as if the host had made the drafts
            result = replace(result, tokens=drawn_BX[is_drawn_BX])
        drawn, first, num_right = result.tokens.tolist(), dispatched.num_plain_draws, list[int]()
        for row, num_kept in zip(rows, told, strict=True):
            own, is_live = drawn[first : first + len(row.tokens)], row.request.id in self._queue.live
            num_right.append(self._num_right(row, own, num_kept) if is_live else 0)
            first += len(own)
        return result, num_right

    def _num_right(self, row: MultiTokenDecode, drawn: list[int], told: int | None) -> int:
        """How many drafts of a row, whose request is live, are kept; its next steps have drafts or a pause.

        drawn: all 1 + k draws. told: how many are kept, if the device made them, which then says so.
        """
        if told is not None:
            num_right = told
            self._note_proposal(row.request, row.num_behind)
        elif self._pretended is None:
            num_right = num_right_of(row.tokens[1:], drawn)
        elif not row.num_behind:
            return 0
        else:  # What a row with fewer than k drafts cannot keep is not made up for.
            self._due += self._pretended - 1
            due = int(self._due + 1e-6)
            self._due -= due
            num_right = min(due, row.num_behind)
        if self._adapts and row.num_behind:
            pause = self._pauses.setdefault(row.request.id, _Pause())
            if num_right:
                pause.until, pause.period = 0, 1
            else:
                pause.lengthen(self._step, MAX_PERIOD)
        return num_right

    def count_step(self, rows: Sequence[MultiTokenDecode], num_kept: Mapping[int, int]) -> None:
        """See Decoding."""
        self.kept_ids = [id_ for id_, count in num_kept.items() for _ in range(count)]
        counted = Counter((row.num_behind, num_kept[row.request.id]) for row in rows)
        for (num_drafts, kept), num_rows in counted.items():
            self.counts.add(num_drafts, kept, num_rows)

    def note_kept(self, dispatched: Dispatched, num_kept: Mapping[int, int], now: Callable[[], float]) -> None:
        """See Decoding: the device has all tokens of requests that it drafted for. Notes how long steps take."""
        if self.device is not None and dispatched.step.num_drafts:
            for row in dispatched.multi_token:
                if row.request.id in self._queue.live:
                    self.device.note(row.request)
        if (depths := self._depths) is None:
            return
        depth, now_s, has_prompts = dispatched.max_tokens - 1, now(), len(dispatched.chunks) > 0
        num_decodes = len(dispatched.step.decode_rows) + len(dispatched.multi_token)
        last, self._last_commit = self._last_commit, None if has_prompts else (now_s, depth)
        if has_prompts or not num_decodes:
            return
        depths.count(num_decodes, depth, num_kept.values())
        # A step without drafts behind one with drafts could not be launched before that one's tokens were known.
        if last is not None and (depth or not last[1]):
            depths.note(num_decodes, depth, self._step, now_s - last[0])

    def show(self, owners: TokenOwners, layers: Mapping[int, Any]) -> None:
        """See Decoding: the drafter gets the states except at the positions of wrong drafts."""
        (ids_T, positions_T), num_running = owners, len(self._queue.running)
        if self._room(num_running, num_running) < 1 or not len(ids_T):
            return
        starts = [0, *(np.flatnonzero(np.diff(ids_T)) + 1).tolist()]
        ids, positions, rows = ids_T[starts].tolist(), positions_T[starts].tolist(), []
        for id_, start, first, end in zip(ids, positions, starts, [*starts[1:], len(ids_T)], strict=True):
            request = self._queue.live.get(id_)
            if request is None or not request.is_drawn_for or self._refused(request) is not None:
                continue
            known_L = known_tokens(request)
            count = min(end - first, len(known_L) - 1 - start)  # behind them are wrong drafts
            if count > 0:
                rows.append(ComputedRow(request.id, known_L, start, layers, first, count))
        self._proposals.observe(rows)

    def forget(self, request: Request) -> None:
        """See Decoding."""
        self._chunked.discard(request.id)
        self._pauses.pop(request.id, None)
        self._proposals.forget(request)

    def lose(self) -> None:
        """See Decoding."""
        if self.device is not None:
            self.device.lose()

    def close(self) -> None:
        """See Decoding."""
        self._proposals.close()

    def _room(self, num_requests: int, num_tokens: int) -> int:
        """Most drafts of each of so many requests in a step of so many tokens without drafts; may be negative."""
        return (self._most_tokens - num_tokens) // max(1, num_requests)

    def _depth(self, num_requests: int, room: int, step: int) -> int:
        """Most drafts of each of so many requests. room: for each."""
        most = max(0, min(self._drafter.k, room))
        return most if self._depths is None else self._depths.choose(num_requests, most, step)

    def _most_drafts(self, request: Request, room: int) -> int:
        """How many drafts the drafter is asked for; 0 if the request has none in this step."""
        reason = self._refused(request) or ("paused" if self._pauses_in(request, self._step) else None)
        if reason is None and room >= 1:
            return room
        self.counts.skip(reason or "no room")
        return 0

    def _noted(self, request: Request, drafts: list[int]) -> list[int]:
        """The proposed drafts that are computed; a request without proposals in many steps pauses."""
        if request.late is not None and self._late is not None and drafts:
            drafts = drafts[: self._late.num_fitting(request.late, drafts)]
        self._note_proposal(request, len(drafts))
        return drafts

    def _note_proposal(self, request: Request, num_drafts: int) -> None:
        """Count a step for which so many drafts were proposed."""
        if not num_drafts:
            self.counts.skip("no proposal")
        if self._adapts:
            pause = self._pauses.setdefault(request.id, _Pause())
            pause.num_empty = 0 if num_drafts else pause.num_empty + 1
            if pause.num_empty > NUM_EMPTY:
                pause.lengthen(self._step, max(MAX_PERIOD_EMPTY, pause.period))

    def _pauses_in(self, request: Request, step: int) -> bool:
        pause = self._pauses.get(request.id)
        return pause is not None and step <= pause.until

    def _refused(self, request: Request) -> str | None:
        """Why a request never has drafts; None if it may."""
        late = request.late
        if late is not None and not (late.can_go_back and self._pretended is None):
            return late.field.replace("_", " ")
        prepared = request.prepared
        is_other = any(kind != PROCESSOR for index, kind in enumerate(self._kinds) if prepared.bits >> index & 1)
        return "step extensions" if is_other or prepared.stateful or prepared.layer_bits else None


def num_right_of(drafts: list[int], drawn: list[int]) -> int:
    """How many drafts, from the first on, are the tokens drawn at their positions. drawn: and the draw behind them."""
    if drafts == drawn[:-1] and min(drawn) >= 0:
        return len(drafts)
    for place, draft in enumerate(drafts):
        # Behind a draft whose late input failed no token is drawn (it is negative): the next step finds out again.
        if drawn[place] != draft or drawn[place + 1] < 0:
            return place
    return len(drafts)
