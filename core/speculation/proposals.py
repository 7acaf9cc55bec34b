"""The proposals of a drafter, checked: whatever it returns or raises, requests go on, and the log names it once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from hookline.core.contracts import ComputedRow, Drafter, DraftRow, is_offered
from hookline.core.engine.step_builder import MultiTokenDecode
from hookline.core.errors import show_traceback
from hookline.core.plugin.blame import breach, failure
from hookline.core.requests.request import Request
from hookline.core.util.arrays import TokenArray

logger = logging.getLogger("hookline")
_INT = frozenset({int})


class Proposals:
    """Asks one engine's drafter. name: of the drafter, for errors."""

    def __init__(self, drafter: Drafter, name: str, vocab_size: int) -> None:
        self._drafter, self._name, self._vocab_size = drafter, name, vocab_size
        self._forgets = is_offered(type(drafter).forget)
        self._proposes_all = is_offered(type(drafter).propose_all)
        self._newest: dict[int, list[int]] = {}
        """If the drafter goes by tokens alone: the newest drafts of each request, by its id, and one draft more."""
        self._ahead: dict[int, tuple[int, list[int], list[int]]] = {}
        """By a request's id: how many tokens it should then have, the last of them, and the drafts that follow."""
        self._is_blamed = False

    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """Show the drafter the hidden states of a committed step."""
        self._tell("observe", rows)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended, here and in the drafter."""
        self._newest.pop(request.id, None)
        if self._forgets:
            self._tell("forget", request.id)

    def close(self) -> None:
        """Close the drafter, if it has a `close`."""
        if is_offered(type(self._drafter).close):
            self._tell("close")

    def _tell(self, method: str, *given: Any) -> None:
        try:
            getattr(self._drafter, method)(*given)
        except Exception as error:
            self._blame(failure(self._name, method, error), error)

    def look_ahead(self, rows: Sequence[MultiTokenDecode]) -> None:
        """While a step computes these rows: ask for the drafts that follow if all of its drafts and one more are right,
        if the drafter goes by tokens alone.
        """
        self._ahead.clear()
        for row in rows if self._drafter.by_tokens else ():
            request, newest = row.request, self._newest.get(row.request.id, [])
            if row.num_behind and newest[:-1] == row.tokens[1:]:
                tokens = np.append(request.tokens[: row.start + 1], np.array(newest, dtype=np.int32))
                drafts = self._checked(self._proposal(_draft_row(request, len(newest), tokens)), len(newest))
                self._ahead[request.id] = len(tokens), newest, drafts

    def of(self, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
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
    tokens = known_tokens(request) if tokens is None else tokens
    return DraftRow(request.id, tokens, request.num_prompt_tokens, num_drafts, request.params, request.seed)


def known_tokens(request: Request) -> Any:
    """The tokens of a request whose values are known, read-only."""
    tokens = request.tokens[: request.num_known_tokens].view()
    tokens.setflags(write=False)
    return tokens
