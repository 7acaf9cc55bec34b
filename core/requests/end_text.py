"""The free part of a completion, before a grammar takes over: until a text, or a token, has come.

A token that reaches beyond the end of the text is not allowed, so that the grammar begins exactly behind it.
Legend: V tokens, W int32 words of a mask, K characters (bytes) of the text, of which a state has matched some.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hookline.core.contracts import GrammarVocabulary
from hookline.core.util.arrays import WordArray


def mask_of(allowed_V: np.ndarray[Any, np.dtype[np.bool_]], num_words: int) -> WordArray:
    """The mask with these tokens allowed."""
    bits = np.zeros(32 * num_words, dtype=np.bool_)
    bits[: len(allowed_V)] = allowed_V
    return np.packbits(bits, bitorder="little").view(np.int32)


class EndText:
    """Finds one end text, or token, in completions: prepared once for a vocabulary, shared by all requests."""

    def __init__(self, after: str | int, vocabulary: GrammarVocabulary, num_words: int) -> None:
        self.token_id = after if isinstance(after, int) else None
        self.text = after.encode() if isinstance(after, str) else b""
        self.tokens = vocabulary.tokens
        free_V = np.array([len(token) > 0 for token in self.tokens], dtype=np.bool_)
        free_V[[one for one in vocabulary.stop_ids if one < len(free_V)]] = False
        self._borders = _borders(self.text)
        num_states = max(1, len(self.text))
        self.masks_KW = np.stack([mask_of(free_V & ~self._past(state), num_words) for state in range(num_states)])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that this takes."""
        return int(self.masks_KW.nbytes)

    def _past(self, state: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tokens that go past the end of the text, from this state."""
        text = self.text
        if not text:
            return np.zeros(len(self.tokens), dtype=np.bool_)
        ends = []
        while state:
            ends.append(text[state:])
            state = self._borders[state]
        starts = tuple(ends)
        found = [
            text in token[:-1] or any(token.startswith(end) and len(token) > len(end) for end in starts)
            for token in self.tokens
        ]
        return np.array(found, dtype=np.bool_)

    def follow(self, state: int, token_id: int) -> int | None:
        """The state after a token; None once the end has come."""
        if not self.text:
            return None if token_id == self.token_id else state
        token = self.tokens[token_id] if token_id < len(self.tokens) else b""
        for byte in token:
            while state and self.text[state] != byte:
                state = self._borders[state]
            state += self.text[state] == byte
            if state == len(self.text):
                return None
        return state


def _borders(text: bytes) -> list[int]:
    """For each length of a prefix of the text, the longest shorter prefix that is its suffix (Knuth, Morris, Pratt)."""
    borders = [0] * (len(text) + 1)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length]
        length += text[place] == text[length]
        borders[place + 1] = length
    return borders
