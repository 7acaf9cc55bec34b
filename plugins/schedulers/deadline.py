"""Earliest deadline first, for requests that can still be in time; steps as large as running requests can wait for.

A waiting request is due when its first token has to come. Requests due first are admitted first (Liu and Layland 1973,
doi:10.1145/321738.321743); when not all can be in time, the longest are passed over, so that as many as possible are in
time (Moore 1968, doi:10.1287/mnsc.15.1.102). Steps with prompts are as large as fits between two tokens of a running
request, by the costs of steps that were carried out.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator
from itertools import islice

from hookline.core.contracts import CommittedStep, Plan, RequestView, SchedulerView
from hookline.core.scheduling import (
    MAX_PROMPT_STEPS,
    SIMPLY_DECODE,
    Arrivals,
    PlanDraft,
    admit_waiting,
    can_simply_decode,
    continue_prompts,
    decode_running,
)
from hookline.plugins.schedulers import DeadlineConfig
from hookline.plugins.schedulers.step_costs import LEAST_TOKENS, StepCosts

FIRST_TOKENS = 512
"""Prompt tokens of a step before any cost is known."""
SPARE = 0.85
"""Fraction of the time per token that is planned for; the rest is a reserve."""
DECODING = 0.6
"""Fraction of that time that decodes may take; a request that would make them take longer is not admitted."""
MOST_LOOKED_AT = 256
"""Waiting requests that are checked for being in time; requests behind them are not urgent yet."""


class Deadline:
    """Most requests in time: first tokens by ttft_s, answers by their deadlines, further tokens every tpot_s.

    Worst gap, whatever arrives: a running request gets its next token at most 17 steps after its last one, and, once
    the costs of steps are known, about tpot_s after it, if a step of few requests takes less than half of that. Of a
    prompt that was begun, a chunk is computed in every second step at least. Late requests, which cannot be in time,
    wait for the others, but get at least late_share of the prompt tokens in order of arrival. Preempted ones go first.
    """

    def __init__(self, config: DeadlineConfig) -> None:
        self.config = config
        self._arrivals, self._costs = Arrivals(), StepCosts()
        self._due: dict[int, float] = {}
        """Due time of each waiting request that can be in time."""
        self._queue: list[tuple[float, int, RequestView]] = []
        """The same requests sorted by due time, with some that no longer wait."""
        self._late: dict[int, RequestView] = {}
        """Requests without any computed token that cannot be in time, in the order in which this was noticed."""
        self._preempted: dict[int, RequestView] = {}
        self._begun: dict[int, bool] = {}
        """Requests that have begun -> whether they are too late."""
        self._owed_tokens = 0.0
        """Prompt tokens that late requests may still have computed before other waiting requests."""
        self._pace_s, self._last_decode_s = 0.0, math.inf

    # --------------------------------------------------------------------------------------------------------- memory

    def committed(self, step: CommittedStep) -> None:
        """Learn what steps cost, and forget the requests that ended."""
        self._arrivals.forget(step)
        if step.is_carried_out:
            self._costs.learn(step, is_backlogged=bool(self._due))
            self._note_pace(step)
        for one in step.prefilled:
            self._begin(one.request, one.num_tokens)
        for end in step.ended:
            for known in (self._due, self._late, self._preempted):
                known.pop(end.request.id, None)
            self._begun.pop(end.request.id, None)
        self._tidy()

    def _note_pace(self, step: CommittedStep) -> None:
        """Seconds between two tokens of a request now, with the prompts in between."""
        if not step.num_decodes:
            return
        pace_s = max(0.0, min(step.now_s - self._last_decode_s, 2 * self._target_s()))
        self._pace_s += 0.05 * (pace_s - self._pace_s)
        self._last_decode_s = step.now_s

    def _begin(self, request: RequestView, num_tokens: int) -> None:
        """Note that a step computed a part of a request's prompt. A request that has ended meanwhile was forgotten
        already.
        """
        is_late = self._late.pop(request.id, None) is not None
        if is_late or self._due.pop(request.id, None) is not None:
            self._begun[request.id] = is_late
        self._preempted.pop(request.id, None)
        if is_late:
            self._owed_tokens = max(0.0, self._owed_tokens - request.num_prompt_tokens)
        elif self._late:
            self._owed_tokens += self.config.late_share * num_tokens

    def _tidy(self) -> None:
        """Remove requests that no longer wait from the queue, once they are the majority."""
        if len(self._queue) > 64 + 2 * len(self._due):
            self._queue = [entry for entry in self._queue if entry[1] in self._due]

    def _note(self, view: SchedulerView) -> None:
        """Note requests that arrived, and requests that have become late."""
        for request in self._arrivals.new(view.waiting):
            if request.id in self._begun:
                self._preempted[request.id] = request
            elif request.id not in self._late:
                due_s = self._due[request.id] = self._due_s(request)
                insort(self._queue, (due_s, request.id, request))
        throughput, place = self._costs.throughput, 0
        begin_s = view.now_s + throughput.step_s
        for due_s, id_, request in self._queue:
            if id_ in self._due and _waits(request):
                if due_s >= begin_s + throughput.step_s + throughput.token_s * request.num_prompt_tokens:
                    break
                self._late[id_] = request
                del self._due[id_]
            place += 1
        del self._queue[:place]

    def _due_s(self, request: RequestView) -> float:
        """When the request's first token is due, on the engine's clock."""
        config, deadline_s = self.config, request.deadline_s
        if deadline_s is None and config.default_deadline_s is not None:
            deadline_s = request.arrival_s + config.default_deadline_s
        if deadline_s is None:
            return request.arrival_s + config.ttft_s
        return deadline_s - self._pace_s * request.max_tokens

    # ----------------------------------------------------------------------------------------------------------- plan

    def plan(self, view: SchedulerView) -> Plan:
        """The urgent prompts first, in steps that leave running requests in time."""
        self._note(view)
        if can_simply_decode(view):
            return SIMPLY_DECODE
        num_decodes = len(view.running) - len(view.prefilling)
        size, is_mixed = self._size(view, num_decodes)
        draft = PlanDraft(view, self.config.watermark, self._prompt_steps(size, num_decodes), self._rank)
        if num_decodes and is_mixed:
            decode_running(draft)
            draft.tokens_left = min(draft.tokens_left, size)
        elif num_decodes and view.num_steps_without_decode and self._num_pending(view, size) < size:
            decode_running(draft)  # a step that prompts do not fill can wait for others to join it
            return draft.plan()
        else:
            draft.tokens_left = min(draft.tokens_left, size)
        continue_prompts(draft)
        if self._may_admit(view):
            admit_waiting(draft, self._in_turn(view))
        if not draft.prefill and not draft.decode:
            decode_running(draft)
        return draft.plan()

    def _rank(self, request: RequestView) -> bool:
        return self._begun.get(request.id, False)

    def _target_s(self) -> float:
        """Seconds for one token of every running request; longer than configured if a step of a single request takes
        half of that.
        """
        return max(SPARE * self.config.tpot_s, 2 * self._costs.decodes.seconds(1))

    def _prompt_steps(self, size: int, num_decodes: int) -> int:
        """How many steps of prompts there is time for between two decodes; at least one."""
        prompt_s = self._costs.prompts.seconds(size)
        room_s = self._target_s() - self._costs.decodes.seconds(num_decodes)
        return MAX_PROMPT_STEPS if prompt_s <= 0 else max(1, min(MAX_PROMPT_STEPS, int(room_s / prompt_s)))

    def _may_admit(self, view: SchedulerView) -> bool:
        """Whether another decode leaves the others enough time."""
        num_running = len(view.running)
        return not num_running or self._costs.decodes.seconds(num_running + 1) <= DECODING * self._target_s()

    def _size(self, view: SchedulerView, num_decodes: int) -> tuple[int, bool]:
        """Most prompt tokens of the step, and whether running requests decode in it."""
        costs, limit = self._costs, view.limits.max_num_batched_tokens
        room_s = self._target_s() - costs.decodes.seconds(num_decodes)
        size = self._prompt_size(limit, room_s, view)
        if num_decodes and costs.decodes.is_known and costs.prompts.is_known(size):
            mixed = self._mixed_size(limit - num_decodes, room_s, costs.prompts.price_s(size), view)
            if mixed:
                return mixed, True
        return size, False

    def _prompt_size(self, limit: int, room_s: float, view: SchedulerView) -> int:
        """The most efficient size of a step that there is time for; twice that, if enough tokens wait, to learn its
        cost.
        """
        costs = self._costs.prompts
        size = costs.best_size(limit)
        if size is None:
            return min(limit, FIRST_TOKENS)
        twice = min(2 * size, limit)
        is_worth_trying = twice > size and not costs.is_known(twice) and 2 * costs.seconds(size) <= room_s
        if is_worth_trying and self._num_pending(view, twice) >= twice:
            return twice
        while size > LEAST_TOKENS and costs.seconds(size) > room_s:
            size //= 2
        return size

    def _mixed_size(self, limit: int, room_s: float, price_s: float, view: SchedulerView) -> int:
        """The largest number of prompt tokens in a step with decodes that costs no more than separate steps; 0 if there
        is none.

        Unknown costs are tried out if enough tokens wait and there is time: first one size, then up to twice the
        largest size known to be efficient.
        """
        costs, best = self._costs.mixed, 0
        size = min(limit, LEAST_TOKENS)
        while size >= LEAST_TOKENS:
            if costs.is_known(size):
                is_good = costs.price_s(size) <= price_s and costs.seconds(size) <= room_s
            else:
                is_good = self._is_worth_trying(size, best, limit, room_s) and self._num_pending(view, size) >= size
            if is_good:
                best = size
            if size == limit:
                break
            size = min(2 * size, limit)
        return best

    def _is_worth_trying(self, size: int, best: int, limit: int, room_s: float) -> bool:
        """Whether to learn how long a step of decodes takes with prompts of that size. best: largest efficient size so
        far, or 0.
        """
        seconds = self._costs.prompts.seconds
        is_largest = size in (FIRST_TOKENS, limit) or seconds(2 * size) > room_s
        return seconds(size) <= room_s and (is_largest or size == 2 * best)

    def _num_pending(self, view: SchedulerView, enough: int) -> int:
        """Prompt tokens that wait to be computed, counted up to `enough`."""
        num_tokens = sum(request.num_tokens - request.num_computed_tokens for request in view.prefilling)
        for request in view.waiting:
            if num_tokens >= enough:
                break
            num_tokens += request.num_tokens
        return num_tokens

    # ---------------------------------------------------------------------------------------------------------- order

    def _in_turn(self, view: SchedulerView) -> Iterator[RequestView]:
        """The waiting requests in order: preempted requests, then the others by due time, and at intervals a late
        request.
        """
        yield from filter(_waits, list(self._preempted.values()))
        late = filter(_waits, list(self._late.values()))
        owed, next_late = self._owed_tokens, next(late, None)
        for request in self._by_due_time(view):
            while next_late is not None and owed >= next_late.num_prompt_tokens:
                owed -= next_late.num_prompt_tokens
                yield next_late
                next_late = next(late, None)
            yield request
        if next_late is not None:
            yield next_late
            yield from late

    def _by_due_time(self, view: SchedulerView) -> Iterator[RequestView]:
        """As many requests as can be in time, sorted by due time, then the requests passed over, then the rest."""
        throughput = self._costs.throughput
        waiting = (entry for entry in self._queue if entry[1] in self._due and _waits(entry[2]))
        looked_at = list(islice(waiting, MOST_LOOKED_AT))
        end_s = view.now_s + throughput.step_s
        longest: list[tuple[float, int]] = []
        passed_over: set[int] = set()
        for due_s, id_, request in looked_at:
            cost_s = throughput.token_s * request.num_prompt_tokens
            end_s += cost_s
            heapq.heappush(longest, (-cost_s, id_))
            if end_s > due_s:
                cost_s, id_ = heapq.heappop(longest)
                end_s += cost_s
                passed_over.add(id_)
        yield from (request for _, id_, request in looked_at if id_ not in passed_over)
        yield from (request for _, id_, request in looked_at if id_ in passed_over)
        yield from (request for _, _, request in waiting)


def _waits(request: RequestView) -> bool:
    return request.num_computed_tokens == 0
