"""Speculative decoding: decodes compute draft tokens beside their newest token, and keep the right ones.

A draw is a function of the request's seed, the position and the logits. So a draft is right exactly if it is the token
that the step draws at its position; the draw after that token then counts too, and the request has the same tokens as
without drafts. A row with k drafts is a chunk of 1 + k tokens with a draw after each. Afterwards the device does not
know how many were kept: the row's next step is a chunk again, with its newest token from the host. Where the device
makes the drafts itself it does know, and steps overlap (device_drafting.py). Drafts use only tokens of the step and
blocks that the policy's plan leaves free; policies do not see them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.contracts import ComputedRow, DraftCounts, Drafter, DraftRow, is_offered
from hookline.core.engine.device_drafting import DeviceDrafting
from hookline.core.engine.draft_depth import DraftDepth
from hookline.core.errors import show_traceback
from hookline.core.plugin.blame import breach, failure
from hookline.core.plugin.registry import PROCESSOR
from hookline.core.requests.late_input import LateInput
from hookline.core.requests.request import Request
from hookline.core.requests.running_table import RunningTable
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.step.captured import DRAFT_TOKENS, MOST_DRAFTS
from hookline.core.util.arrays import IntArray, TokenArray, every, no_ints

logger = logging.getLogger("hookline")
_INT = frozenset({int})
MAX_PERIOD = 64
"""Longest period of an adaptive drafter: even a request whose drafts are wrong has drafts in one of so many steps."""
NUM_EMPTY, MAX_PERIOD_EMPTY = 16, 8
"""After NUM_EMPTY steps in a row without a proposal, the drafter is asked for a request in one of two steps, then of
four, up to MAX_PERIOD_EMPTY. The limit is low because a text may begin to repeat at any token."""


@dataclass(slots=True)
class DraftedRow:
    """A decode that is computed as a chunk. start: position of its newest token, which comes first; tokens: that token
    and the drafts behind it. kept: how many drafts are kept, if the device made them, which then says so; it does not
    say which tokens they are.
    """

    request: Request
    start: int
    tokens: list[int]
    kept: int | None = None

    @property
    def num_drafts(self) -> int:
        """K."""
        return len(self.tokens) - 1

    def drop_drafts(self) -> None:
        """Compute the newest token alone."""
        self.tokens = self.tokens[:1]

    def num_right(self, drawn: list[int]) -> int:
        """How many drafts, from the first on, are the tokens drawn at their positions. drawn: all 1 + k draws."""
        if self.kept is not None:
            return self.kept
        drafts = self.tokens[1:]
        if drafts == drawn[:-1] and min(drawn) >= 0:
            return len(drafts)
        for place, draft in enumerate(drafts):
            # Behind a draft whose late input failed no token is drawn (it is negative): the next step finds out again.
            if drawn[place] != draft or drawn[place + 1] < 0:
                return place
        return len(drafts)


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


class Speculation:
    """The drafts of one engine. name: of the drafter, for errors. late: of requests whose draws wait for it, whose
    drafts end before the first token that it forbids. If the drafter is adaptive, a request whose drafts are
    all wrong, or for which none are proposed, pauses, twice as long each time. weighs_costs: whether it is also asked
    for only as many drafts as pay, by how long steps take.
    max_num_batched_tokens: the engine's; a step with drafts has no more tokens, nor more than graphs are captured for.
    on_device: whether the device makes drafts itself where it can.
    """

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
        self._drafter, self._name, self._vocab_size, self._late = drafter, name, vocab_size, late
        self._adapts, self._most_tokens = drafter.adaptive, min(max_num_batched_tokens, DRAFT_TOKENS[-1])
        self._depths = DraftDepth(drafter.k) if weighs_costs and drafter.adaptive else None
        self.max_drafts = drafter.k
        """Most drafts of a request in any step."""
        self.depth = 0
        """Most drafts of a request in the step that was begun last; 0 if it has none."""
        self._last_commit: tuple[float, int] | None = None
        """When a step was committed last, and its depth; None if it had prompts."""
        self._kinds = [stage.entry.kind for stage in extensions.stages]
        self._forgets = is_offered(type(drafter).forget)
        self._proposes_all = is_offered(type(drafter).propose_all)
        self._newest: dict[int, list[int]] = {}
        """If the drafter goes by tokens alone: the newest drafts of each request, by its id, and one draft more."""
        self._ahead: dict[int, tuple[int, list[int], list[int]]] = {}
        """By a request's id: how many tokens it should then have, the last of them, and the drafts that follow."""
        self._pauses: dict[int, _Pause] = {}
        self._step = 0
        """The number of the step that was begun last."""
        self._chunked: set[int] = set()
        """Requests whose rows on the device do not hold their newest token."""
        self.device = DeviceDrafting() if on_device else None
        self._is_blamed = False
        self._pretended = drafter.pretended_length
        self._due = 0.0
        self.counts = DraftCounts(pretended_length=self._pretended)
        self.kept_ids: list[int] = []
        """Of the step that was committed last: the request of each token beyond the first one of its row."""
        if self._pretended is not None:
            logger.warning(
                "%s pretends that requests keep %s tokens of a step: this is for benchmarks, and answers are not the "
                "model's",
                *(name, self._pretended),
            )

    def drafted(self, table: RunningTable, entries: IntArray, num_tokens: int) -> list[DraftedRow]:
        """The decodes of a step, at these entries, that are computed as chunks, with their drafts. num_tokens: of the
        step without drafts.
        """
        self._begin_step()
        room, rows = self._room(len(entries), num_tokens), []
        self.depth = self._depth(len(entries), room, self._step)
        lengths = table.num_tokens_S[entries]
        # The token after the last draft must be within the request's length, too.
        left = (table.max_len_S[entries] - lengths - 1).tolist()
        asked: list[tuple[Request, int]] = []
        if room > 0 and not self.depth:
            self.counts.skip("cost", len(entries))
        else:
            for request, most in zip(table.requests(entries), left, strict=True):
                if most := self._most_drafts(request, min(self.depth, most)):
                    asked.append((request, most))
        proposed = {request.id: drafts for (request, _), drafts in zip(asked, self._proposed(asked), strict=True)}
        newest = table.tokens_SL[entries, lengths - 1].tolist()
        for request, length, token in zip(table.requests(entries), lengths.tolist(), newest, strict=True):
            drafts = self._noted(request, proposed[request.id]) if request.id in proposed else []
            if drafts or request.id in self._chunked:
                rows.append(DraftedRow(request, length - 1, [token, *drafts]))
        return rows

    def skip_step(self, num_decodes: int) -> None:
        """Begin a step without drafts, since it is planned before the tokens before it are known."""
        self._begin_step()
        self.counts.skip("overlap", num_decodes)

    def num_on_device(self, table: RunningTable, entries: IntArray, *, is_ahead: bool) -> int:
        """How many drafts the device makes for each decode of the next step, which are at these entries and alone in
        it; 0 if it makes none. is_ahead: whether the tokens of the step in flight are not known yet.
        """
        device, count, step = self.device, len(entries), self._step + 1
        if device is None or not count or (is_ahead and not device.goes_on(table.id_S[entries])):
            return 0
        if not every(table.num_tokens_S[entries] >= table.min_len_S[entries]):
            return 0  # tokens are forbidden by position
        if all(self._pauses_in(request, step) for request in table.requests(entries)):
            return 0
        if not is_ahead and not all(request.is_plain for request in table.requests(entries)):
            return 0  # while it goes on, they are the same requests
        return self._depth(count, min(MOST_DRAFTS - 1, self._room(count, count)), step)

    def draft_on_device(self, table: RunningTable, entries: IntArray, num_drafts: int) -> list[DraftedRow]:
        """Begin a step in which the device makes so many drafts for each of these decodes."""
        assert self.device is not None
        self._begin_step(num_drafts)
        self.device.begin(table.id_S[entries], num_drafts)
        rows = [DraftedRow(request, 0, [0] * (1 + num_drafts)) for request in table.requests(entries)]
        self.launched(rows)
        return rows

    def note_known(self, requests: Iterable[Request]) -> None:
        """Note that the device has all known tokens of these requests, since it drafted for them."""
        assert self.device is not None
        for request in requests:
            self.device.note(request)

    def _begin_step(self, depth: int = 0) -> None:
        self._step += 1
        self.depth = depth
        if self.device is not None:
            self.device.begin(no_ints(), 0)

    def awaits_tokens(self, requests: Collection[Request]) -> bool:
        """Whether the next step needs the tokens of the step in flight: if requests may have drafts, or if the device
        lacks their newest token. requests: all running ones.
        """
        if self._chunked:
            return True
        room = self._room(len(requests), len(requests))
        if not self._depth(len(requests), room, self._step + 1):
            return False
        return any(
            self._refused(request) is None and not self._pauses_in(request, self._step + 1) for request in requests
        )

    def launched(self, rows: Sequence[DraftedRow]) -> None:
        """Note the rows of a step that is launched: a row without drafts holds its newest token from then on."""
        for row in rows:
            (self._chunked.add if row.num_drafts else self._chunked.discard)(row.request.id)

    def num_right(self, row: DraftedRow, drawn: list[int]) -> int:
        """How many drafts of a row, whose request is live, are kept; its next steps have drafts or a pause.

        drawn: all 1 + k draws.
        """
        if row.kept is not None:
            num_right = row.kept
            self._note_proposal(row.request, row.num_drafts)
        elif self._pretended is None:
            num_right = row.num_right(drawn)
        elif not row.num_drafts:
            return 0
        else:  # What a row with fewer than k drafts cannot keep is not made up for.
            self._due += self._pretended - 1
            due = int(self._due + 1e-6)
            self._due -= due
            num_right = min(due, row.num_drafts)
        if self._adapts and row.num_drafts:
            pause = self._pauses.setdefault(row.request.id, _Pause())
            if num_right:
                pause.until, pause.period = 0, 1
            else:
                pause.lengthen(self._step, MAX_PERIOD)
        return num_right

    def count_step(self, rows: Sequence[DraftedRow], num_kept: Mapping[int, int]) -> None:
        """Count the drafts of a step's rows. num_kept: how many were kept, by the request's id; empty without rows."""
        self.kept_ids = [id_ for id_, count in num_kept.items() for _ in range(count)]
        counted = Counter((row.num_drafts, num_kept[row.request.id]) for row in rows)
        for (num_drafts, kept), num_rows in counted.items():
            self.counts.add(num_drafts, kept, num_rows)

    def time_step(
        self, num_decodes: int, depth: int, now_s: float, num_kept: Collection[int], *, has_prompts: bool
    ) -> None:
        """Note that a step was committed now. depth: as it was when the step was begun. num_kept: how many drafts were
        kept of each row that had some.
        """
        if self._depths is None:
            return
        last, self._last_commit = self._last_commit, None if has_prompts else (now_s, depth)
        if has_prompts or not num_decodes:
            return
        self._depths.count(num_decodes, depth, num_kept)
        # A step without drafts behind one with drafts could not be launched before that one's tokens were known.
        if last is not None and (depth or not last[1]):
            self._depths.note(num_decodes, depth, self._step, now_s - last[0])

    def _room(self, num_requests: int, num_tokens: int) -> int:
        """Most drafts of each of so many requests in a step of so many tokens without drafts; may be negative."""
        return (self._most_tokens - num_tokens) // max(1, num_requests)

    def _depth(self, num_requests: int, room: int, step: int) -> int:
        """Most drafts of each of so many requests. room: for each."""
        most = max(0, min(self._drafter.k, room))
        return most if self._depths is None else self._depths.choose(num_requests, most, step)

    def show(
        self,
        live: Mapping[int, Request],
        owners: tuple[IntArray, IntArray],
        layers: Mapping[int, Any],
        num_running: int,
    ) -> None:
        """Give the drafter the hidden states of a committed step, except at the positions of wrong drafts.

        owners: for each of the step's tokens, the request's id and the position. layers: the states by layer.
        """
        ids_T, positions_T = owners
        if self._room(num_running, num_running) < 1 or not len(ids_T):
            return
        starts = [0, *(np.flatnonzero(np.diff(ids_T)) + 1).tolist()]
        ids, positions, rows = ids_T[starts].tolist(), positions_T[starts].tolist(), []
        for id_, start, first, end in zip(ids, positions, starts, [*starts[1:], len(ids_T)], strict=True):
            request = live.get(id_)
            if request is None or not request.is_drawn_for or self._refused(request) is not None:
                continue
            known_L = _known_tokens(request)
            count = min(end - first, len(known_L) - 1 - start)  # behind them are wrong drafts
            if count > 0:
                rows.append(ComputedRow(request.id, known_L, start, layers, first, count))
        try:
            self._drafter.observe(rows)
        except Exception as error:
            self._blame(failure(self._name, "observe", error), error)

    def look_ahead(self, rows: Sequence[DraftedRow]) -> None:
        """While a step computes these rows: ask for the drafts that follow if all of its drafts and one more are right,
        if the drafter goes by tokens alone.
        """
        self._ahead.clear()
        for row in rows if self._drafter.by_tokens else ():
            request, newest = row.request, self._newest.get(row.request.id, [])
            if row.num_drafts and newest[:-1] == row.tokens[1:]:
                tokens = np.append(request.tokens[: row.start + 1], np.array(newest, dtype=np.int32))
                drafts = self._checked(self._proposal(_draft_row(request, len(newest), tokens)), len(newest))
                self._ahead[request.id] = len(tokens), newest, drafts

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended, here and in the drafter."""
        self._chunked.discard(request.id)
        self._newest.pop(request.id, None)
        self._pauses.pop(request.id, None)
        if self._forgets:
            try:
                self._drafter.forget(request.id)
            except Exception as error:
                self._blame(failure(self._name, "forget", error), error)

    def close(self) -> None:
        """Close the drafter, if it has a `close`."""
        if is_offered(type(self._drafter).close):
            try:
                self._drafter.close()
            except Exception as error:
                self._blame(failure(self._name, "close", error), error)

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
        if prepared.bits and any(kind != PROCESSOR for kind in self._used(prepared.bits)):
            return "step extensions"
        if prepared.stateful or prepared.layer_bits:
            return "step extensions"
        return None

    def _used(self, bits: int) -> list[str]:
        return [kind for index, kind in enumerate(self._kinds) if bits >> index & 1]

    def _proposed(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """The drafter's drafts for each of these (request, most drafts); empty where the drafter fails."""
        if self._drafter.by_tokens:
            return [self._looked_up(request, most) for request, most in asked]
        rows = [_draft_row(request, most) for request, most in asked]
        if not self._proposes_all:
            return [self._checked(self._proposal(row), row.num_drafts) for row in rows]
        try:
            proposals = list(self._drafter.propose_all(rows)) if rows else []
        except Exception as error:
            self._blame(failure(self._name, "propose_all", error), error)
            proposals = [()] * len(rows)
        if len(proposals) != len(rows):
            told = f"it returned {len(proposals)} proposals for {len(rows)} requests"
            self._blame(breach(self._name, "propose_all", told), None)
            proposals = [()] * len(rows)
        return [self._checked(proposal, row.num_drafts) for proposal, row in zip(proposals, rows, strict=True)]

    def _looked_up(self, request: Request, most: int) -> list[int]:
        """The drafts of one request from a drafter that goes by tokens alone: the drafts that were looked up ahead, if
        the request's tokens came as expected.
        """
        num_tokens, newest, drafts = self._ahead.get(request.id, (0, [], []))
        known = request.num_known_tokens
        if num_tokens != known or len(newest) <= most or request.tokens[known - len(newest) : known].tolist() != newest:
            drafts = self._checked(self._proposal(_draft_row(request, most + 1)), most + 1)
        self._newest[request.id] = drafts = drafts[: most + 1]
        return drafts[:most]

    def _proposal(self, row: DraftRow) -> Any:
        try:
            return self._drafter.propose(row)
        except Exception as error:
            self._blame(failure(self._name, "propose", error), error)
            return ()

    def _checked(self, proposed: Any, most: int) -> list[int]:
        """A proposal as a list; no drafts if it is none."""
        size = self._vocab_size
        if type(proposed) is list and len(proposed) <= most and _INT.issuperset(map(type, proposed)):
            if not proposed or (min(proposed) >= 0 and max(proposed) < size):
                return proposed  # for few numbers, numpy's checks are slower
        try:
            drafts = np.asarray(proposed)
            is_sound = drafts.ndim == 1 and (not len(drafts) or drafts.dtype.kind in "iu") and len(drafts) <= most
            is_sound = is_sound and bool(((drafts >= 0) & (drafts < size)).all())
        except Exception:
            is_sound = False
        if not is_sound:
            told = f"it proposed what is not at most {most} token ids from 0 to {size - 1}"
            self._blame(breach(self._name, "propose", told), None)
            return []
        return [int(token) for token in drafts]

    def _blame(self, told: str, error: Exception | None) -> None:
        """Name the drafter in the log, once."""
        if not self._is_blamed:
            self._is_blamed = True
            logger.warning("%s; the requests go on without its drafts, and their tokens stay the same", told)
            if error is not None:
                show_traceback(error)


def _draft_row(request: Request, num_drafts: int, tokens: TokenArray | None = None) -> DraftRow:
    """A request as the drafter is given it. tokens: the tokens to draft for; None takes the request's known tokens."""
    tokens = _known_tokens(request) if tokens is None else tokens
    return DraftRow(request.id, tokens, request.num_prompt_tokens, num_drafts, request.params, request.seed)


def _known_tokens(request: Request) -> Any:
    """The tokens of a request whose values are known, read-only."""
    tokens = request.tokens[: request.num_known_tokens].view()
    tokens.setflags(write=False)
    return tokens
