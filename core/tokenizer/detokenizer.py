"""Decodes a growing list of tokens: only whole characters are returned, and in the end exactly what decoding all tokens
gives.

Decoding from the start for each token would take time quadratic in the length. So only a short window of tokens is
decoded, which begins at the beginning of a character; the first window begins with tokens of the prompt, for decoders
that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence

REPLACEMENT = "�"
"""The character that decoders write for bytes that are not, or not yet, a character."""
WINDOW = 8
"""Tokens after which the window is moved, if possible."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Converts tokens to text as they come.

    byte_ids: tokens for single bytes (SentencePiece's byte fallback). A decoder reads a run of them as a whole, so a
    run has no text before it ends. texts: a cache of tokens' texts, which may be shared; for decoders that only join
    bytes, where most tokens have the same text anywhere. None for other decoders. context: returns the tokens in front
    of the text, which are not part of it; called at the first token. None: there are none.
    """

    def __init__(
        self,
        decode: Decode,
        byte_ids: Collection[int] = (),
        texts: MutableMapping[int, str] | None = None,
        context: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._texts = texts
        self._context = context
        self._tokens: list[int] = []
        self._num_shown = 0
        """Characters of the window's text that were returned already, or belong to the context."""
        self._boundary = 0
        """Tokens of the window before the latest place where its text was complete."""
        self._boundary_before = 0
        """Tokens of the window before the place before that."""
        self._is_in_run = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; it never changes later."""
        if self._texts is not None and not self._tokens:
            text = self._texts.get(token_id)
            if text is None:
                text = self._texts[token_id] = self._decode([token_id])
            if REPLACEMENT not in text:
                return text
        return self._push(token_id)

    def _begin(self) -> None:
        context, self._context = self._context, None
        self._tokens = [] if context is None else list(context())
        self._boundary, self._num_shown = len(self._tokens), len(self._decode(self._tokens)) if self._tokens else 0

    def _push(self, token_id: int) -> str:
        if self._context is not None:
            self._begin()
        self._tokens.append(token_id)
        if token_id in self._byte_ids or (self._is_in_run and not self._decode([token_id])):
            self._is_in_run = True  # a token without text of its own does not end a run
            return ""
        self._is_in_run = False
        text = self._decode(self._tokens)
        # A character of several tokens reads as one REPLACEMENT until its last byte is there.
        is_whole = not text.endswith(REPLACEMENT)
        added = text[self._num_shown : len(text) if is_whole else -1]
        self._num_shown += len(added)
        if is_whole:
            self._move()
        return added

    def flush(self) -> str:
        """The rest of the text when no more tokens come."""
        text = self._decode(self._tokens)[self._num_shown :]
        self._num_shown += len(text)
        return text

    def _move(self) -> None:
        """Begin the window at the place before the latest one, because some decoders strip a space at the beginning of
        text. The tokens that are kept must have a text; in a run of spaces, that takes two tokens.
        """
        start = 0
        if self._texts is not None:
            self._tokens, self._num_shown = [], 0
        elif len(self._tokens) >= WINDOW:
            for start in (self._boundary, self._boundary_before, 0):
                text = self._decode(self._tokens[start:]) if start else ""
                if text:
                    self._tokens, self._num_shown = self._tokens[start:], len(text)
                    break
        self._boundary_before, self._boundary = max(0, self._boundary - start), len(self._tokens)
