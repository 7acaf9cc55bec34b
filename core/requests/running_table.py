"""The host's table of running requests: their counts and tokens in arrays, so that a decode step advances all at once.

A request reads and writes its counts as attributes, which lie in its own array while it waits, and in its entry here
from admission to its end. Legend: S entries, N samples, L the longest sequence in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hookline.core.requests.request import COUNTS, Request
from hookline.core.util.arrays import BoolArray, FloatArray, IntArray, TokenArray, every

NO_REQUEST = -1
"""The id of a free entry."""


@dataclass(slots=True)
class Sampled:
    """The requests for which a step samples tokens, in order: their entries, and the ids in these at launch.

    The ids tell later whether an entry still has the same request.
    """

    entries_N: IntArray
    ids_N: IntArray
    num_departures: int = -1
    """RunningTable.num_departures at that moment; -1 if it is not known."""


class RunningTable:
    """Counts and tokens of at most `num_entries` running requests.

    Each count in `core.requests.request.COUNTS` is an array here under its name and `_S`. Of tokens_SL only the pages
    that were written to take memory.
    """

    def __init__(self, num_entries: int, max_len: int) -> None:
        self._counts_SC = np.zeros((num_entries, len(COUNTS)), dtype=np.int64)
        views = dict(zip(COUNTS, self._counts_SC.T, strict=True))
        self.id_S, self.row_S = views["id"], views["row"]
        self.num_tokens_S, self.num_known_tokens_S = views["num_tokens"], views["num_known_tokens"]
        self.num_computed_tokens_S, self.prefill_target_S = views["num_computed_tokens"], views["prefill_target"]
        self.high_water_S, self.num_block_tokens_S = views["high_water"], views["num_block_tokens"]
        self.num_cached_block_tokens_S = views["num_cached_block_tokens"]
        self.min_len_S, self.max_len_S = views["min_len"], views["max_len"]
        self.last_token_us_S = views["last_token_us"]
        self.is_greedy_S, self.is_watched_S = views["is_greedy"], views["is_watched"]
        self.is_late_S = views["is_late"]
        self.num_late = 0
        """How many requests here have a late input."""
        self.num_reading = 0
        """How many requests here have a reader of their prompts."""
        self.num_delaying = 0
        """How many requests here have min_tokens."""
        self.num_departures = 0
        """How many requests have left so far."""
        self.id_S[:] = NO_REQUEST
        self.tokens_SL: TokenArray = np.empty((num_entries, max_len), dtype=np.int32)
        self._requests: list[Request | None] = [None] * num_entries
        self._free = list(reversed(range(num_entries)))
        self._num_stopping = np.zeros(1, dtype=np.int64)
        """For each token id up to the largest stop id: how many requests here it ends."""

    def take(self, request: Request) -> None:
        """Give a request an entry and move its counts and tokens there."""
        entry = self._free.pop()
        self._requests[entry] = request
        self._counts_SC[entry] = request.counts
        tokens = self.tokens_SL[entry, : len(request.tokens)]
        tokens[: request.num_known_tokens] = request.tokens[: request.num_known_tokens]
        request.move_to(entry, self._counts_SC[entry], tokens)
        self.num_late += request.is_late
        self.num_reading += request.reader is not None
        self.num_delaying += request.params.min_tokens > 0
        self._watch(request, 1)

    def leave(self, request: Request) -> None:
        """Move a request's counts and tokens back out of its entry, if it has one."""
        entry = request.entry
        if entry < 0:
            return
        request.move_to(-1, request.counts.copy(), request.tokens.copy())
        self._requests[entry] = None
        self.id_S[entry] = NO_REQUEST
        self.num_departures += 1
        self._free.append(entry)
        self.num_late -= request.is_late
        self.num_reading -= request.reader is not None
        self.num_delaying -= request.params.min_tokens > 0
        self._watch(request, -1)

    def requests(self, entries: IntArray) -> Iterator[Request]:
        """The requests in these entries."""
        for entry in entries.tolist():
            request = self._requests[entry]
            assert request is not None, f"entry {entry} is free"
            yield request

    def sampled(self, entries_N: IntArray) -> Sampled:
        """The requests in these entries, for which a step draws."""
        return Sampled(entries_N, self.id_S[entries_N], self.num_departures)

    def still_there(self, sampled: Sampled) -> Sampled:
        """The sampled requests that are still in their entries, without the ones that left since."""
        if sampled.num_departures == self.num_departures:
            return sampled
        is_here = self.id_S[sampled.entries_N] == sampled.ids_N
        return Sampled(sampled.entries_N[is_here], sampled.ids_N[is_here])

    def can_decode(self, entries: IntArray) -> BoolArray:
        """Which of these entries hold requests that can decode: (N,) bool."""
        is_ready: BoolArray = self.num_computed_tokens_S[entries] >= self.prefill_target_S[entries]
        return is_ready

    def commit(self, sampled: Sampled, tokens_N: IntArray) -> tuple[IntArray, IntArray]:
        """Fill in each request's oldest unknown token; returns (entries, tokens) of the requests still in the table."""
        assert len(sampled.entries_N) == len(tokens_N), (
            "an executor returned another number of tokens than it was to draw"
        )
        entries_N = sampled.entries_N
        if sampled.num_departures != self.num_departures:
            is_here = self.id_S[entries_N] == sampled.ids_N
            entries_N, tokens_N = entries_N[is_here], tokens_N[is_here]  # the others were aborted or have ended
        places = self.num_known_tokens_S[entries_N]
        assert every(places < self.num_tokens_S[entries_N]), "a token arrives that no launched step counted"
        self.tokens_SL[entries_N, places] = tokens_N
        self.num_known_tokens_S[entries_N] = places + 1
        return entries_N, tokens_N

    def commit_several(self, sampled: Sampled, more_N: IntArray, tokens_T: IntArray) -> bool:
        """Fill in each request's oldest unknown token and more_N[n] tokens behind it, which no step has counted yet;
        tokens_T has them in this order.

        Returns False, and does nothing, if a request has left, or a token may end its request or must be shown to a
        watcher.
        """
        entries_N = sampled.entries_N
        if sampled.num_departures != self.num_departures:
            return False
        num_tokens_N = self.num_tokens_S[entries_N] + more_N
        is_apart_N = num_tokens_N >= self.max_len_S[entries_N]
        is_apart_N |= self.is_watched_S[entries_N] + self.is_late_S[entries_N] > 0
        may_end_T = self._num_stopping.take(tokens_T, mode="clip") + (tokens_T < 0)
        if np.count_nonzero(is_apart_N) or np.count_nonzero(may_end_T):
            return False
        places_N, counts_N = self.num_known_tokens_S[entries_N], more_N + 1
        ends_N = counts_N.cumsum()
        places_T = (places_N - ends_N + counts_N).repeat(counts_N) + np.arange(len(tokens_T))
        self.tokens_SL[entries_N.repeat(counts_N), places_T] = tokens_T
        self.num_known_tokens_S[entries_N] = places_N + counts_N
        self.num_tokens_S[entries_N] = num_tokens_N
        return True

    def gaps_s(self, entries_N: IntArray, now_s: float) -> FloatArray:
        """Note that these requests get a token now; returns the seconds since their last one, if they had one."""
        now_us = int(now_s * 1e6)
        last_N = self.last_token_us_S[entries_N]
        self.last_token_us_S[entries_N] = now_us
        gaps_s: FloatArray = (now_us - last_N[last_N > 0]) / 1e6
        return gaps_s

    def to_look_at(self, entries_N: IntArray, tokens_N: IntArray, is_over_N: BoolArray | None = None) -> IntArray:
        """Indices of committed tokens whose requests are watched or may end: by max_len, a stop token or NO_TOKEN.

        is_over_N: tokens that end their requests in any case.
        """
        is_candidate = self.num_known_tokens_S[entries_N] >= self.max_len_S[entries_N]
        is_candidate |= self.is_watched_S[entries_N].astype(np.bool_)
        is_candidate |= self._num_stopping.take(tokens_N, mode="clip") > 0
        is_candidate |= tokens_N < 0
        if is_over_N is not None:
            is_candidate |= is_over_N
        return is_candidate.nonzero()[0]

    def _watch(self, request: Request, change: int) -> None:
        """Count, for each stop token, the requests here that it may end. change: 1 for a new request, -1 for one that
        leaves.
        """
        num_missing = int(request.stops_X.max(initial=-1)) + 2 - len(self._num_stopping)
        if num_missing > 0:
            self._num_stopping = np.pad(self._num_stopping, (0, num_missing))
        self._num_stopping[request.stops_X] += change
