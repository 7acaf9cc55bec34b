"""Drafters that look a request's newest tokens up in its earlier ones: copied text, code and lists repeat themselves.

Both keep nothing between steps. On the host they take a few comparisons of the whole request, about 10 µs at 4,096
tokens; lookup_on_device.py does the same on a GPU. Legend: L tokens of the request, P places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hookline.core.contracts import Drafter, DrafterSpec, DraftRow
from hookline.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.plugins.drafters import LookupConfig

Array = np.ndarray[Any, np.dtype[Any]]
MOST_AT_ONCE = 256
"""Most places at which max_match tokens are compared at once; of more places most fail at the first tokens."""


class _Lookup(Drafter):
    """Base class of both drafters: finds the places where the newest tokens came before."""

    by_tokens = True
    counts: ClassVar[bool]
    """Whether the most frequent continuation is drafted."""

    def __init__(self, config: LookupConfig, spec: DrafterSpec) -> None:
        for name, low in (("k", 1), ("min_match", 1), ("max_match", config.min_match)):
            if (value := getattr(config, name)) < low:
                raise ConfigError(f"drafter.{name}={value} must be at least {low}")
        self.k, self._min, self._max = config.k, config.min_match, config.max_match
        self.adaptive = config.adaptive

    def propose_on_device(self, tokens_RL: Tensor, rows_B: Tensor, lengths_B: Tensor, num_drafts: int) -> Tensor:
        """See Drafter."""
        from hookline.plugins.drafters.lookup_on_device import look_up  # imports torch and Triton

        matches = range(self._min, self._max + 1)
        return look_up(tokens_RL, rows_B, lengths_B, num_drafts, matches=matches, counts=self.counts)

    def _places(self, tokens_L: Array) -> Array:
        """The places, ascending, of the last token of the longest suffix that came before; none if it is too short."""
        last, length = len(tokens_L) - 1, 1
        places_P: Array = np.flatnonzero(tokens_L[:last] == tokens_L[last])
        while length < self._max and (num_places := len(places_P)):
            if length >= self._min:
                if num_places == 1:
                    break  # no other place has more
                if length == self._min and num_places <= MOST_AT_ONCE and last >= self._max:
                    longest_P = self._longest(tokens_L, places_P)
                    if len(longest_P):
                        return longest_P
            longer = places_P if places_P[0] >= length else places_P[places_P >= length]
            longer = longer[tokens_L[longer - length] == tokens_L[last - length]]
            if not len(longer):
                break
            places_P, length = longer, length + 1
        return places_P if length >= self._min else places_P[:0]

    def _longest(self, tokens_L: Array, places_P: Array) -> Array:
        """Those of these places that end max_match tokens which are the newest ones."""
        beyond = self._max - 1
        found = _windows(tokens_L, self._max)[np.maximum(places_P - beyond, 0)]
        are_equal = np.logical_and.reduce(found == tokens_L[-self._max :], axis=1)
        longest_P: Array = places_P[are_equal & (places_P >= beyond)]
        return longest_P


def _windows(tokens_L: Array, size: int) -> Array:
    """All runs of so many tokens one behind the other, without a copy: (L - size + 1, size)."""
    return np.ndarray((len(tokens_L) - size + 1, size), tokens_L.dtype, tokens_L, strides=tokens_L.strides * 2)


class Ngram(_Lookup):
    """Drafts the tokens that followed at the latest of these places.

    Source: prompt lookup decoding, Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding.
    """

    counts = False

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        places_P = self._places(row.tokens)
        if not len(places_P):
            return ()
        first = int(places_P[-1]) + 1
        found: list[int] = row.tokens[first : first + row.num_drafts].tolist()
        return found


class Suffix(_Lookup):
    """Drafts the most frequent continuation, token by token; of equally frequent tokens the latest. A continuation that
    reaches the newest token goes on with the drafts themselves.

    Source: after SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975; of the request's own tokens alone.
    """

    counts = True

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        places_P, num_drafts = self._places(row.tokens), row.num_drafts
        if not len(places_P):
            return ()
        latest = int(places_P[-1]) + 1
        drafts: list[int] = row.tokens[latest : latest + num_drafts].tolist()
        while len(drafts) < num_drafts:
            drafts += drafts[: num_drafts - len(drafts)]
        if len(places_P) == 1:
            return drafts
        known = np.concatenate([row.tokens, np.array(drafts, dtype=row.tokens.dtype)])
        following = _windows(known, num_drafts)[places_P + 1]
        if np.count_nonzero(following == following[-1]) == following.size:
            return drafts
        return self._most_frequent(known, places_P, num_drafts)

    def _most_frequent(self, known: Array, places_P: Array, num_drafts: int) -> list[int]:
        """The drafts where continuations differ. known: the request's tokens, and room for the drafts behind them."""
        length = len(known) - num_drafts
        for place in range(num_drafts):
            following_P = known[places_P + 1 + place]
            known[length + place] = following_P[-1]
            if (following_P == following_P[-1]).all():
                continue
            tokens, counts = np.unique(following_P, return_counts=True)
            frequent = tokens[counts == counts.max()]
            token = following_P[np.flatnonzero(np.isin(following_P, frequent))[-1]]
            known[length + place], places_P = token, places_P[following_P == token]
        drafts: list[int] = known[length:].tolist()
        return drafts
