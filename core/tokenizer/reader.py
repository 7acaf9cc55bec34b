"""Converts a request's tokens to text one by one, and looks for stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hookline.core.outputs import FinishReason
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.detokenizer import Detokenizer
from hookline.core.util.stop_strings import StopSearch


def textless_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int] | None:
    """Stop tokens without text; None: all of them. With a grammar, the token that completes it has a text."""
    return None if params.structured_outputs is None else frozenset((*eos_token_ids, *params.stop_token_ids))


class TextReader:
    """The text of a growing completion, and its stop strings. stop_ids: see `textless_ids`."""

    def __init__(
        self, params: SamplingParams, detokenizer: Detokenizer | None, stop_ids: frozenset[int] | None
    ) -> None:
        self._params, self._detokenizer, self._stop_ids = params, detokenizer, stop_ids
        self._stops = StopSearch(params.stop_strings, include=params.include_stop_str_in_output)
        self._parts: list[str] = []
        self._num_taken_parts = 0
        self.num_tokens = 0
        """Tokens seen."""
        self._is_flushed = False

    def see(self, token_id: int, reason: FinishReason | None) -> str | None:
        """Add a token. reason: why the completion ends with it, if so. Returns the stop string that it completes, if
        any.
        """
        self.num_tokens += 1
        if self._detokenizer is None:
            return None
        is_text = reason is not FinishReason.STOP or (self._stop_ids is not None and token_id not in self._stop_ids)
        text = self._detokenizer.push(token_id) if is_text else ""
        if reason is not None:
            text += self._detokenizer.flush()
        return self._show(text)

    def read(self, token_ids: Sequence[int]) -> str:
        """Add tokens before the last one and return their text: `see` and `take` in one, without stop strings."""
        assert not self._params.stop
        if self._detokenizer is None:
            return ""
        push = self._detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        self.num_tokens += len(token_ids)
        self._parts.append(text)
        self._num_taken_parts = len(self._parts)
        return text

    def _show(self, text: str) -> str | None:
        stop = None
        if self._params.stop:
            text, stop = self._stops.push(text, may_stop=self.num_tokens >= self._params.min_tokens)
            self._is_flushed = stop is not None
        if text:
            self._parts.append(text)
        return stop

    def take(self) -> str:
        """The text since the last call."""
        text, self._num_taken_parts = "".join(self._parts[self._num_taken_parts :]), len(self._parts)
        return text

    def finish(self) -> str:
        """The whole text, including the end that was held back while more tokens could come."""
        if not self._is_flushed and self._detokenizer is not None:
            self._show(self._detokenizer.flush())
            if not self._is_flushed:
                self._parts.append(self._stops.flush())
            self._is_flushed = True
        return self.text

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)
