"""The counts and tokens of the running requests in arrays, one entry each, so that a decode step advances all at once.

A request reads and writes its own counts as attributes wherever they are: in an array of its own while it waits, and in
its slot here from admission to its end. Knows no blocks, no policy and no tensors. Legend: S slots, N draws of a step,
L the longest sequence in tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hookline.core.requests.request import COUNTS, Request, TokenArray
from hookline.core.util.arrays import IntArray

NOBODY = -1
"""The id of a free slot."""


@dataclass(frozen=True)
class Drawn:
    """Whose next tokens a step draws, in the order of the draws: slots, and the ids that held them at the launch."""

    slots_N: IntArray
    ids_N: IntArray


class Slots:
    """`num_slots` columns of counts and rows of tokens.

    Each count in `core.requests.request.COUNTS` is an array here under its name and `_S`. tokens_SL takes memory as far
    as it is written to.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._counts_SC = np.zeros((num_slots, len(COUNTS)), dtype=np.int64)
        views = dict(zip(COUNTS, self._counts_SC.T, strict=True))
        self.id_S, self.row_S = views["id"], views["row"]
        self.num_tokens_S, self.num_known_tokens_S = views["num_tokens"], views["num_known_tokens"]
        self.num_computed_tokens_S, self.prefill_target_S = views["num_computed_tokens"], views["prefill_target"]
        self.high_water_S, self.num_block_tokens_S = views["high_water"], views["num_block_tokens"]
        self.num_registered_tokens_S = views["num_registered_tokens"]
        self.min_len_S, self.max_len_S = views["min_len"], views["max_len"]
        self.is_greedy_S, self.is_watched_S = views["is_greedy"], views["is_watched"]
        self.id_S[:] = NOBODY
        self.tokens_SL: TokenArray = np.empty((num_slots, max_len), dtype=np.int32)
        self._requests: list[Request | None] = [None] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._num_stopping = np.zeros(1, dtype=np.int64)
        """How many requests here each token id ends, up to the largest such id and 0 behind it."""

    def take(self, request: Request) -> None:
        """Give a request a slot and move its counts and tokens there."""
        slot = self._free.pop()
        self._requests[slot], request.slot = request, slot
        self._counts_SC[slot] = request.counts
        request.counts = self._counts_SC[slot]
        tokens = self.tokens_SL[slot, : len(request.tokens)]
        tokens[: request.num_known_tokens] = request.tokens[: request.num_known_tokens]
        request.tokens = tokens
        self._watch(request, 1)

    def leave(self, request: Request) -> None:
        """Move a request's counts and tokens back out of its slot, if it has one."""
        slot = request.slot
        if slot < 0:
            return
        request.counts, request.tokens = request.counts.copy(), request.tokens.copy()
        self._requests[slot], request.slot = None, -1
        self.id_S[slot] = NOBODY
        self._free.append(slot)
        self._watch(request, -1)

    def requests(self, slots: IntArray) -> Iterator[Request]:
        """The requests in these slots."""
        for slot in slots.tolist():
            request = self._requests[slot]
            assert request is not None, f"slot {slot} is free"
            yield request

    def drawn(self, slots_N: IntArray) -> Drawn:
        """Note that a step draws for these slots."""
        return Drawn(slots_N, self.id_S[slots_N])

    def can_decode(self, slots: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of these slots hold requests that are past their known tokens."""
        is_ready: np.ndarray[tuple[int], np.dtype[np.bool_]]
        is_ready = self.num_computed_tokens_S[slots] >= self.prefill_target_S[slots]
        return is_ready

    def commit(self, drawn: Drawn, tokens_N: IntArray) -> tuple[IntArray, IntArray]:
        """Fill in the oldest unknown token of each; returns (slots, tokens) without those who left since the launch."""
        assert len(drawn.slots_N) == len(tokens_N), "an executor returned another number of tokens than it was to draw"
        slots_N = drawn.slots_N
        is_here = self.id_S[slots_N] == drawn.ids_N
        if not is_here.all():  # some were aborted, or their last token was one too many
            slots_N, tokens_N = slots_N[is_here], tokens_N[is_here]
        places = self.num_known_tokens_S[slots_N]
        assert (places < self.num_tokens_S[slots_N]).all(), "a token arrives that nobody expects"
        self.tokens_SL[slots_N, places] = tokens_N
        self.num_known_tokens_S[slots_N] = places + 1
        return slots_N, tokens_N

    def to_look_at(self, slots_N: IntArray, tokens_N: IntArray) -> IntArray:
        """Places among committed tokens that are watched, or may end their request: its last, or a stop token."""
        is_candidate = self.num_known_tokens_S[slots_N] >= self.max_len_S[slots_N]
        is_candidate |= self.is_watched_S[slots_N].astype(np.bool_)
        is_candidate |= self._num_stopping.take(tokens_N, mode="clip") > 0
        return np.flatnonzero(is_candidate)

    def _watch(self, request: Request, change: int) -> None:
        """Keep `_num_stopping` up to date."""
        num_missing = int(request.stops_X.max(initial=-1)) + 2 - len(self._num_stopping)
        if num_missing > 0:
            self._num_stopping = np.pad(self._num_stopping, (0, num_missing))
        self._num_stopping[request.stops_X] += change
