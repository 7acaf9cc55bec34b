"""Log-probabilities in OpenAI's two formats, and prompt log-probabilities in vLLM's format."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hookline.core.outputs import TokenLogprob
from hookline.core.serving import SpeltText, TokenSpelling

LEAST = -9999.0
"""The value for minus infinity, which JSON cannot represent."""


class CompletionLogprobs:
    """Makes tokens, token_logprobs, top_logprobs and text_offset of one completion, whose text may come in pieces.

    prompt: its token ids. as_ids: write tokens as `token_id:N`. echoed: the prompt's text if the completion's text
    begins with it; the prompt's tokens come first then. offset: number of characters of the prompt. skips_special:
    whether the completion's text lacks special tokens. text_offset counts characters; tokens that together make one
    character all have its offset.
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
        """The prompt's tokens, to be put in front of the completion's."""
        self._begin(self._echoed_prompt(texts, prompt) if self._num_left else self._behind)
        self._offset = 0 if self._num_left else offset

    def _begin(self, texts: SpeltText) -> None:
        self._texts, self._offset = texts, 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def _echoed_prompt(self, texts: TokenSpelling, prompt: Sequence[int]) -> SpeltText:
        """The texts of the prompt's tokens in the echo. Many tokenizers add a space before the first word of a text,
        which the echo of a text must not have.
        """
        faults = []
        for is_start in (False, True) if texts.is_start(()) else ():
            self._begin(SpeltText(texts, is_start, shows_special=False))
            for token_id in prompt:
                self._offset += self._length(token_id)
            faults.append(abs(self._offset - len(self._echoed)))
        return SpeltText(texts, bool(faults) and faults[1] < faults[0], shows_special=False)

    def of(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The fields for the next tokens; None where a token has no log-probability, as a prompt's first token."""
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
        """How many more characters are complete once this token is known."""
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
        """The token itself and the most likely tokens. If two of them have the same text, the second is named by its
        id.
        """
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
    """Holds chat_logprobs' entries of tokens whose text has not been sent: stop strings, incomplete characters and
    parsers delay it.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []

    def rest(self) -> list[dict[str, Any]]:
        """Return and remove all entries."""
        rest, self._entries = self._entries, []
        return rest

    def add(self, entries: Sequence[dict[str, Any]]) -> None:
        """Add entries of further tokens."""
        self._entries += entries

    def take(self, text: str, *, takes_before: bool, behind: str = "") -> list[dict[str, Any]]:
        """Return and remove the entries of a text, up to its last token; all entries if the text is not found.

        takes_before: the text continues the text before it, so that tokens before it without text belong to it;
        otherwise they belong to a tag, and are dropped. behind: the text known to follow.
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
    """For each token of a prompt a mapping of token ids to log-probabilities, None for the first."""

    def _entry(token_id: int, logprob: float) -> tuple[str, dict[str, Any]]:
        return str(token_id), {"logprob": max(logprob, LEAST), "decoded_token": texts.text(token_id)}

    return [
        None if one is None else dict([_entry(one.token_id, one.logprob), *(_entry(*top) for top in one.top)])
        for one in logprobs
    ]
