"""Log-probabilities in OpenAI's two formats and in vLLM's of the prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hookline.core.outputs import TokenLogprob
from hookline.core.tokenizer.token_spelling import SpeltText, TokenSpelling

LEAST = -9999.0
"""In place of minus infinity, which JSON has no word for."""


class CompletionLogprobs:
    """tokens, token_logprobs, top_logprobs and text_offset, of one completion whose text may come in pieces.

    prompt: its token ids. as_ids: tokens are written `token_id:N`. echoed: the prompt's text, if it stands before the
    completion's; the prompt's tokens come first then. offset: characters of the prompt. skips_special: whether the
    completion's text is without special tokens.
    text_offset counts characters. Of several tokens that make up one, each has the place where it begins.
    """

    def __init__(
        self,
        texts: TokenSpelling,
        prompt: Sequence[int] = (),
        *,
        as_ids: bool = False,
        echoed: str = "",
        offset: int = 0,
        skips_special: bool = True,
    ) -> None:
        self._as_ids, self._echoed, self._skips_special = as_ids, echoed, skips_special
        self._behind = texts.behind(prompt, shows_special=not skips_special)
        self._num_left = len(prompt) if echoed else 0
        """Tokens of the prompt that come before the completion's."""
        self._begin(self._echoed_prompt(texts, prompt) if self._num_left else self._behind)
        self._offset = 0 if self._num_left else offset

    def _begin(self, texts: SpeltText) -> None:
        self._texts, self._offset = texts, 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def _echoed_prompt(self, texts: TokenSpelling, prompt: Sequence[int]) -> SpeltText:
        """The prompt's tokens as the echo has them. Many tokenizers put a space before a text's first word, which is
        not in the echo of a text; of ids it may be.
        """
        faults = []
        for is_start in (False, True) if texts.is_start(()) else ():
            self._begin(SpeltText(texts, is_start, shows_special=False))
            for token_id in prompt:
                self._offset += self._length(token_id)
            faults.append(abs(self._offset - len(self._echoed)))
        return SpeltText(texts, bool(faults) and faults[1] < faults[0], shows_special=False)

    def of(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """Of the next tokens; None where there is no log-probability, as for a prompt's first token."""
        names: list[str] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, one in zip(token_ids, logprobs, strict=True):
            names.append(self._name(token_id))
            tops.append(None if one is None else self._top(one))
            offsets.append(self._offset)
            self._offset += self._length(token_id)
            self._num_left -= 1
            if self._num_left == 0:  # the prompt's last one
                self._begin(self._behind)
                self._offset = len(self._echoed)
        return {
            "tokens": names,
            "token_logprobs": [None if one is None else max(one.logprob, LEAST) for one in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _length(self, token_id: int) -> int:
        """How many characters are complete with this token that were not before."""
        texts = self._texts
        if texts.is_special(token_id):
            text = texts.text(token_id)
            is_of_prompt = self._num_left > 0
            is_shown = self._echoed.startswith(text, self._offset) if is_of_prompt else not self._skips_special
            length = len(text) if is_shown else 0
        else:
            length = len(self._decoder.decode(texts.data(token_id)))
        texts.go_past(token_id)
        return length

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.text(token_id)

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """The token itself and the most likely ones. Of two with one text the second goes by its id."""
        found = {self._name(one.token_id): max(one.logprob, LEAST)}
        for token_id, logprob in one.top:
            if token_id != one.token_id:
                name = self._name(token_id)
                found[f"token_id:{token_id}" if name in found else name] = max(logprob, LEAST)
        return found


def chat_logprobs(texts: SpeltText, logprobs: Sequence[TokenLogprob], *, as_ids: bool = False) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}` of a completion's next tokens."""

    def _entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = f"token_id:{token_id}" if as_ids else texts.text(token_id)
        return {"token": name, "logprob": max(logprob, LEAST), "bytes": list(texts.data(token_id))}

    content = []
    for one in logprobs:
        top = [_entry(*alternative) for alternative in one.top]
        content.append(_entry(one.token_id, one.logprob) | {"top_logprobs": top})
        texts.go_past(one.token_id)
    return {"content": content, "refusal": None}


class WaitingLogprobs:
    """chat_logprobs' entries of tokens whose text has not come: stop strings, characters of several tokens and parsers
    hold it back.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def rest(self) -> list[dict[str, Any]]:
        """Those that wait still. They wait no longer."""
        rest, self._entries = self._entries, []
        return rest

    def add(self, entries: Sequence[dict[str, Any]]) -> None:
        """Further tokens, in their order."""
        self._entries += entries

    def take(self, text: str, *, takes_before: bool, behind: str = "") -> list[dict[str, Any]]:
        """Those of a text, up to its last token; of all that wait if it is not found. They wait no longer.

        takes_before: whether the text goes on where the one before ended, so that tokens in front of it, which have no
        text, count as its own; else they are a tag's, and dropped. behind: what is known to come after it.
        """
        if not text or not self._entries:
            return []
        ends = list(accumulate(len(entry["bytes"]) for entry in self._entries))
        data, waiting = text.encode(), b"".join(bytes(entry["bytes"]) for entry in self._entries)
        before = waiting.rfind(behind.encode()) if behind else -1
        before = len(waiting) if before < 0 else before
        start = waiting.find(data) if takes_before else waiting.rfind(data, 0, before)
        first, last = 0, len(ends)
        if start >= 0:
            last = bisect_left(ends, start + len(data)) + 1
            first = 0 if takes_before else bisect_right(ends, start)
        taken, self._entries = self._entries[first:last], self._entries[last:]
        return taken


def prompt_logprobs(texts: TokenSpelling, logprobs: Sequence[TokenLogprob | None]) -> list[Any]:
    """A mapping of token ids for each token of a prompt, None for the first."""

    def _entry(token_id: int, logprob: float) -> tuple[str, dict[str, Any]]:
        return str(token_id), {"logprob": max(logprob, LEAST), "decoded_token": texts.text(token_id)}

    return [
        None if one is None else dict([_entry(one.token_id, one.logprob), *(_entry(*top) for top in one.top)])
        for one in logprobs
    ]
