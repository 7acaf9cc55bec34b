"""Which requests' tokens the device knows, so that it makes drafts itself: the host's half of `Step.drafting_rows`.

Such a step needs nothing of the tokens before it from the host. So it is planned and launched while the step before it
is computed, on bounds: with blocks for all drafts of both steps, and at the fewest tokens that the request can have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hookline.core.requests.request import Request
from hookline.core.util.arrays import IntArray, every, ints, no_ints


class DeviceDrafting:
    """For each row of one engine's request table, the request whose tokens the device has, and how many of them."""

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
