"""A correct parser, and ones with one planted fault each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hookline.core.contracts import Arguments, OutputParser, ParsedPart, ParserContext, Text, ToolCall
from hookline.core.parsing import split_before

TAG = "CALL "


class PlainParser(OutputParser):
    """`CALL name` at a text's end is a call without arguments."""

    def __init__(self, config: Any, context: ParserContext) -> None:
        self._kept = ""

    def push(self, text: str) -> Sequence[ParsedPart]:
        self._kept += text
        if TAG in self._kept:
            shown, _, rest = self._kept.partition(TAG)
            self._kept = TAG + rest
        else:
            shown, self._kept = split_before(self._kept, TAG)
        return [Text(shown)] if shown else []

    def finish(self) -> Sequence[ParsedPart]:
        if self._kept.startswith(TAG):
            return [ToolCall(self._kept.removeprefix(TAG)), Arguments("{}")]
        return [Text(self._kept)] if self._kept else []


class KeepsNothingBack(PlainParser):
    def push(self, text: str) -> Sequence[ParsedPart]:
        if TAG in text:
            return super().push(text)
        return [Text(text)] if text else []


class ForgetsItsEnd(PlainParser):
    def finish(self) -> Sequence[ParsedPart]:
        return [] if TAG.startswith(self._kept.strip()) else super().finish()


class GivesEmptyText(PlainParser):
    def push(self, text: str) -> Sequence[ParsedPart]:
        return super().push(text) or [Text("")]


class ArguesWithoutACall(PlainParser):
    def finish(self) -> Sequence[ParsedPart]:
        return [part for part in super().finish() if not isinstance(part, ToolCall)]


class SharesItsText(PlainParser):
    _shared: ClassVar[list[str]] = [""]

    def __init__(self, config: Any, context: ParserContext) -> None:
        pass

    @property
    def _kept(self) -> str:  # type: ignore[override]
        return self._shared[0]

    @_kept.setter
    def _kept(self, text: str) -> None:
        self._shared[0] = text


class IsDoneTooSoon(PlainParser):
    def push(self, text: str) -> Sequence[ParsedPart]:
        self.is_done = True
        return super().push(text)


EXAMPLES = {"Hello CALL f": [Text("Hello "), ToolCall("f"), Arguments("{}")], "Hello CAL": [Text("Hello CAL")]}
FAULTS = {
    KeepsNothingBack: "test_any_split_gives_the_same: and the whole text",
    ForgetsItsEnd: "test_every_example_has_its_parts: must have",
    GivesEmptyText: "test_no_part_is_empty: gives an empty Text",
    ArguesWithoutACall: "test_every_example_has_its_parts: must have",
    SharesItsText: "test_two_completions_do_not_know_each_other: while another text is half read",
    IsDoneTooSoon: "test_every_example_has_its_parts: must have",
}
