"""Reasoning between <think> and </think> in front of the answer, as Qwen3 and DeepSeek R1 write it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from hookline.core.contracts import OutputParser, ParsedPart, ParserContext, Reasoning, Text
from hookline.core.parsing import split_before

OPEN, CLOSE = "<think>", "</think>"


class _At(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()


class Think(OutputParser):
    """Reasoning is the text between the tags, if the completion begins with the first tag or the prompt ends with it.
    White space around the tags is removed. Text without a closing tag is reasoning.
    """

    closing_tag = CLOSE

    def __init__(self, config: None, context: ParserContext) -> None:
        self._is_open = context.prompt_end.rstrip().endswith(OPEN)
        self._at = _At.START
        self._kept = ""
        self._strips = True

    def push(self, text: str) -> Sequence[ParsedPart]:
        """See OutputParser."""
        self._kept += text
        parts: list[ParsedPart] = []
        if self._at is _At.START:
            self._start()
        if self._at is _At.REASONING:
            self._reason(parts)
        if self._at is _At.ANSWER:
            self._answer(parts)
        return parts

    def _start(self) -> None:
        begin = self._kept.lstrip()
        if OPEN.startswith(begin) and begin != OPEN:
            return
        if begin.startswith(OPEN):
            self._at, self._kept = _At.REASONING, begin.removeprefix(OPEN)
        elif self._is_open:
            self._at = _At.REASONING
        else:
            self._at, self._strips = _At.ANSWER, False

    def _reason(self, parts: list[ParsedPart]) -> None:
        if self._strips:
            self._kept = self._kept.lstrip()
        shown, close, rest = self._kept.partition(CLOSE)
        if close:
            self._at, self._kept = _At.ANSWER, rest
            shown, self._strips = shown.rstrip(), True
        else:
            shown, self._kept = split_before(self._kept, CLOSE)
            self._strips = self._strips and not shown
        if shown:
            parts.append(Reasoning(shown))

    def _answer(self, parts: list[ParsedPart]) -> None:
        text = self._kept.lstrip() if self._strips else self._kept
        self._kept = ""
        if text:
            self._strips, self.is_done = False, True
            parts.append(Text(text))

    def finish(self) -> Sequence[ParsedPart]:
        """See OutputParser."""
        kept, self._kept = self._kept, ""
        if not kept:
            return []
        return [Reasoning(kept) if self._at is _At.REASONING or self._is_open else Text(kept)]
