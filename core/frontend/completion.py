"""Assembles one completion: from its tokens, one by one, to Deltas and in the end the output with its text.

The same for engines in this process, whose commits bring the tokens, and in another, whose messages do. Only stop
strings need each token's text at once; otherwise tokens are detokenized when their text is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hookline.core.outputs import Delta, FinishReason, RequestOutput, TokenLogprob, Told, joined_told
from hookline.core.tokenizer.reader import TextReader, textless_ids

if TYPE_CHECKING:
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.tokenizer.codec import Codec


class Completion:
    """`core.requests.request.Watcher` of one request. index: of the prompt's completions.

    on_news: called with the completion when there is something to `take`, and not again until that was done.
    is_cumulative: a Delta's text is all text so far.
    """

    def __init__(self, index: int, *, prompt_index: int = 0, is_cumulative: bool = False) -> None:
        self.index, self._prompt_index, self._is_cumulative = index, prompt_index, is_cumulative
        self.request_id = -1
        self.token_ids: list[int] = []
        self.stop: str | None = None
        """The stop string that ended it, behind which tokens are ignored."""
        self._logprobs: list[TokenLogprob] | None = None
        self._told: Told = {}
        """Values of step extensions, one a token, by the extensions' names."""
        self._num_taken = 0
        self._has_stops = False
        self._reader: TextReader | None = None
        """None until a Delta's text is read: a completion whose text is read only at its end is decoded at once."""
        self._reason: FinishReason | None = None
        """Why the last token is the last."""
        self._ended: RequestOutput | None = None

    def begin(self, request_id: int, on_news: Callable[[Completion], object]) -> None:
        """The completion is queued as this request. on_news: see the class."""
        self.request_id, self._on_news = request_id, on_news

    def prepare(self, prompt: Sequence[int], params: SamplingParams, codec: Codec, eos_ids: Iterable[int]) -> None:
        """Set the prompt's tokens and the parameters, before the first token. eos_ids: tokens that end a completion."""
        self._prompt, self._params, self._codec = prompt, params, codec
        self._stop_ids = textless_ids(params, eos_ids)
        self._logprobs = None if params.logprobs is None else []
        if params.stop:
            self._has_stops, self._reader = True, self._make_reader()

    def see(self, token_id: int, reason: FinishReason | None) -> str | None:
        """See Watcher."""
        if self.stop is not None:
            return None
        self.token_ids.append(token_id)
        if self._has_stops:
            assert self._reader is not None
            self.stop = self._reader.see(token_id, reason)
        else:
            self._reason = reason
        if len(self.token_ids) == self._num_taken + 1:
            self._on_news(self)
        return self.stop

    @property
    def num_logprobs(self) -> int:
        """Tokens whose log-probabilities have come."""
        return len(self._logprobs or ())

    def add_logprobs(self, rows: Iterable[TokenLogprob]) -> None:
        """Add the next tokens' log-probabilities; ignored if the request did not ask for any."""
        if self._logprobs is not None:
            self._logprobs.extend(rows)

    @property
    def num_told(self) -> int:
        """Tokens for which the values of step extensions have come."""
        return max(map(len, self._told.values()), default=0)

    def add_told(self, told: Told) -> None:
        """Add step extensions' values for the next tokens."""
        self._told = joined_told(self._told, told) or {}

    def end(self, output: RequestOutput) -> None:
        """The request has ended. Its output's tokens count if `see` was never called; the text is made here."""
        if not self.token_ids:
            self.token_ids = output.token_ids
        if output.logprobs is not None:
            self._logprobs = output.logprobs
        if output.extensions is not None:
            self._told = output.extensions
        self._ended = output
        if len(self.token_ids) == self._num_taken:
            self._on_news(self)

    def take(self) -> Delta:
        """The tokens and text since the last call; the completion's last Delta has its output."""
        first, self._num_taken = self._num_taken, len(self.token_ids)
        ids, ended = self.token_ids[first:], self._ended
        if ended is None:
            text = self._next_text(ids)
        else:
            whole = self._finish_text(first, ids, ended.finish_reason)
            text = whole if self._reader is None else self._reader.take()
            ended = replace(
                ended, index=self.index, text=whole, logprobs=self._logprobs_from(0), extensions=self._told_from(0)
            )
        if self._is_cumulative:
            text = self._text_reader.text if ended is None else ended.text
        logprobs, told = self._logprobs_from(first), self._told_from(first)
        return Delta(self.request_id, self._prompt_index, self.index, text, ids, ended, logprobs, told)

    def _next_text(self, ids: list[int]) -> str:
        reader = self._text_reader
        if self._has_stops:
            return reader.take()
        if self._reason is None:
            return reader.read(ids)
        self._see_all(reader, ids)
        return reader.take()

    def _finish_text(self, first: int, ids: list[int], reason: FinishReason) -> str:
        """The whole text. ids: the tokens from number `first` on, which were not taken before."""
        if self._reader is None and not first:  # no text was read before: all tokens are decoded at once
            return self._decode(ids, reason)
        reader = self._text_reader
        if not self._has_stops:
            self._see_all(reader, ids)
        return reader.finish()

    def _decode(self, ids: list[int], reason: FinishReason) -> str:
        if ids and reason is FinishReason.STOP and (self._stop_ids is None or ids[-1] in self._stop_ids):
            ids = ids[:-1]
        skips = self._params.skip_special_tokens
        return self._codec.decode(ids, skip_special_tokens=skips, behind=self._prompt)

    def _see_all(self, reader: TextReader, ids: list[int]) -> None:
        for number, token_id in enumerate(ids, 1):
            reader.see(token_id, self._reason if number == len(ids) else None)

    @property
    def _text_reader(self) -> TextReader:
        if self._reader is None:
            self._reader = self._make_reader()
        return self._reader

    def _make_reader(self) -> TextReader:
        detokenizer = self._codec.detokenizer(self._prompt, skip_special_tokens=self._params.skip_special_tokens)
        return TextReader(self._params, detokenizer, self._stop_ids)

    def _told_from(self, first: int) -> Told | None:
        last = len(self.token_ids)
        return {name: values[first:last] for name, values in self._told.items()} or None

    def _logprobs_from(self, first: int) -> list[TokenLogprob] | None:
        return None if self._logprobs is None else self._logprobs[first : len(self.token_ids)]
