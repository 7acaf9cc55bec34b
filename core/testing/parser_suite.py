"""The conformance suite of parsers: subclass it in your tests, name the class, and texts with their parts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from hookline.core.contracts import Arguments, ParsedPart, ParserContext, Reasoning, Text, ToolCall
from hookline.core.parsing import merged
from hookline.core.testing.checks import check, check_contract

NUM_SPLITS = 40
"""Random ways to cut each example into pieces."""


class ParserSuite:
    """`class TestMine(ParserSuite): parser = Mine; examples = {"some text": [Text("some text")]}`.

    examples: texts, each with its parts, neighbours of one kind joined. config, context: the arguments with which the
    parser is constructed.
    """

    parser: ClassVar[Any]
    examples: ClassVar[Mapping[str, Sequence[ParsedPart]]]
    config: ClassVar[Any] = None
    context: ClassVar[ParserContext] = ParserContext()

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("reasoning_parser", self.parser)

    def test_every_example_has_its_parts(self) -> None:
        """Given as a whole."""
        for text, wanted in self.examples.items():
            found = self._parsed([text])
            check(found == list(wanted), f"{text!r} has the parts {found} and must have {list(wanted)}")

    def test_any_split_gives_the_same(self) -> None:
        """Character by character, cut once at every place, and at random."""
        for text in self._texts():
            whole = self._parsed([text])
            for pieces in _splits(text):
                found = self._parsed(pieces)
                check(found == whole, f"{pieces} gives {found}, and the whole text {whole}")

    def test_no_part_is_empty(self) -> None:
        """And arguments follow a call."""
        for text in self._texts():
            for pieces in _splits(text):
                has_call = False
                for part in self._parts(pieces):
                    has_call = has_call or isinstance(part, ToolCall)
                    is_empty = isinstance(part, Text | Reasoning | Arguments) and not part.text
                    check(not is_empty, f"{pieces} gives an empty {type(part).__name__}")
                    check(has_call or not isinstance(part, Arguments), f"{pieces} gives arguments without a call")

    def test_two_completions_do_not_know_each_other(self) -> None:
        """A parser in the middle of one text changes nothing for another."""
        for text, wanted in self.examples.items():
            one, other = self._new(), self._new()
            one.push(text[: len(text) // 2])
            parts = other.push(text)
            found = merged(parts if other.is_done else [*parts, *other.finish()])
            check(found == list(wanted), f"{text!r} has the parts {found} while another text is half read")

    def _texts(self) -> list[str]:
        """The examples, the first two thirds of each, and two of them in a row."""
        texts = list(self.examples)
        return [*texts, *(text[: len(text) * 2 // 3] for text in texts), "".join(texts[:2]), ""]

    def _new(self) -> Any:
        return self.parser(self.config, self.context)

    def _parts(self, pieces: Iterable[str]) -> list[ParsedPart]:
        """As core asks for them: a parser that is done is not asked again."""
        parser = self._new()
        parts: list[ParsedPart] = []
        for piece in pieces:
            if not parser.is_done:
                parts += parser.push(piece)
            elif piece:
                parts.append(Text(piece))
        return parts if parser.is_done else [*parts, *parser.finish()]

    def _parsed(self, pieces: Iterable[str]) -> list[ParsedPart]:
        return merged(self._parts(pieces))


def _splits(text: str) -> list[list[str]]:
    """The same ones every time."""
    draws = random.Random(len(text))
    splits = [list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for _ in range(NUM_SPLITS):
        cuts = sorted(draws.randrange(len(text) + 1) for _ in range(draws.randrange(1, 6)))
        splits.append([text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return splits
