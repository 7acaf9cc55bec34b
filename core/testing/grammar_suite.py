"""The conformance suite of grammar back ends: subclass it in your tests and return your back end from `make`.

For finite languages, masks are compared with the result of trying every token of a small vocabulary.
Legend: as in core/contracts/grammar.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hookline.core.contracts import (
    Grammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarVocabulary,
    StructuredOutputs,
    is_offered,
)
from hookline.core.errors import RequestError
from hookline.core.testing.checks import check, check_contract
from hookline.core.testing.plain_grammar import allowed_in, allowed_tokens, small_vocabulary
from hookline.core.testing.stopwatch import Stopwatch
from hookline.core.util.arrays import WordArray

MOST_COMPILE_S = 2.0
"""Seconds, measured by Stopwatch, within which any grammar, also a hostile one, must be compiled or refused."""
MOST_FILL_S = 0.5
"""Seconds within which any mask must be filled."""
NUM_WALKS = 6
"""Random completions for which the masks of each case are checked."""
MOST_STEPS = 64
"""Most tokens of a walk through a finite language."""


@dataclass(frozen=True)
class Case:
    """A finite grammar. wanted: the request's parameter. language: all texts that it allows."""

    wanted: StructuredOutputs
    language: frozenset[bytes]


def _case(texts: Sequence[str], **wanted: Any) -> Case:
    return Case(StructuredOutputs(**wanted), frozenset(text.encode() for text in texts))


_OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 7]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CASES = (
    _case(["yes", "no", "yes sir", "né"], choice=("yes", "no", "yes sir", "né")),
    _case(['it"s\\', "a\nb", "<end>"], choice=('it"s\\', "a\nb", "<end>")),
    _case(["ab", "acc", "abd", "accd"], regex="a(b|cc)d?"),
    _case(["x", "xz", "y", "yz"], grammar='root ::= ("x" | "y") "z"?\n'),
    _case([f'{{"a":{a},"b":{b}}}' for a in ("true", "false") for b in ('"x"', "7")], json=_OBJECT, whitespace=False),
)
"""Finite grammars, of which every text is known."""
INVALID = (
    {"regex": "(ab"},
    {"json": {"type": 5}},
    {"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}, "required": ["a"]}},
    {"grammar": 'root ::= ("x"'},
    {"structural_tag": {"structures": 3}},
)
"""Grammars that a back end must refuse with a RequestError."""


KEYWORDS = (
    ("type", ["string", "null"]),
    ("enum", [1, "a"]),
    ("minimum", 3),
    ("multipleOf", 2),
    ("maxLength", 3),
    ("pattern", "^a+$"),
    ("pattern", "^(?!a)b"),
    ("format", "date"),
    ("format", "password"),
    ("minItems", 1),
    ("uniqueItems", True),
    ("contains", {"type": "string"}),
    ("minProperties", 1),
    ("propertyNames", {"type": "string"}),
    ("not", {"type": "string"}),
    ("if", {"type": "string"}),
    ("dependentRequired", {"a": ["b"]}),
)
"""Keywords of schemas that not every back end holds, with a value each."""


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"a{level}": schema, f"b{level}": schema}}
    return schema


HOSTILE = (
    {"json": json.dumps(_nested(10))},
    {"json": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}},
    {"json": {"type": "string", "minLength": 999_999, "maxLength": 1_000_000}},
    {"json": {"type": "string", "pattern": "^(a+)+(b|c|d){1,1000}$"}},
    {"json": {"enum": [f"x{number}" * 8 for number in range(3000)]}},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(a|aa)*b(.*c){50}"},
    {"regex": "(.*a.{200})"},
    {"regex": "(" * 500 + "a" + ")*" * 500},
    {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    {"grammar": 'root ::= a a a a a a\na ::= b b b b b b\nb ::= c c c c c c\nc ::= "x" | "y" c | c c\n'},
    {"choice": [f"{number:>60}" for number in range(1000)]},
)
"""Grammars that take much time or memory unless both are bounded: each is compiled or refused in MOST_COMPILE_S."""


class GrammarSuite:
    """`class TestMine(GrammarSuite)` with `make`. kinds: the kinds that the back end supports; it must refuse others.

    vocabulary: small, with several tokens that spell the same text.
    """

    kinds: ClassVar[Sequence[str]] = ("json", "regex", "choice", "grammar", "structural_tag")
    vocabulary: ClassVar[GrammarVocabulary] = small_vocabulary()

    def make(self, vocabulary: GrammarVocabulary) -> Any:
        """A new back end for a vocabulary."""
        raise NotImplementedError

    def test_has_the_methods_of_its_contract(self) -> None:
        """It has the methods that the engine checks when it is chosen, correctly spelt."""
        check_contract("grammars", type(self.make(self.vocabulary)))

    def test_masks_allow_what_trying_every_token_does(self) -> None:
        """A token is allowed only if the text can still become one of the language's; each of those can be reached.

        If several sequences of tokens spell the same text, tokens that the tokenizer would not choose may be forbidden.
        The end is allowed exactly where the text is complete.
        """
        for case in self._cases():
            grammar = self.make(self.vocabulary).compile(case.wanted)
            for seed in range(NUM_WALKS):
                matcher = grammar.matcher()
                for taken in self._walk(grammar, seed):
                    what = f"{case.wanted.kind} after {self._text(taken)!r}"
                    if taken:
                        check(matcher.advance(taken[-1:]) is True, f"{what}: a token that fits was refused")
                    found = allowed_in(self._filled(matcher))
                    allowed = allowed_tokens(self.vocabulary, case.language, self._text(taken))
                    self._check_mask(what, case, taken, found, allowed)
                    is_complete = self._text(taken) in case.language
                    check(matcher.is_accepting is is_complete, f"{what}: is_accepting is not {is_complete}")
                    is_over = allowed == set(self.vocabulary.stop_ids)
                    check(matcher.is_terminated is is_over, f"{what}: is_terminated is not {is_over}")

    def test_tokens_that_do_not_fit_are_refused(self) -> None:
        """Each of them, from a fresh matcher: text, padding, and the end of a text that is not complete."""
        for case in self._cases():
            grammar = self.make(self.vocabulary).compile(case.wanted)
            allowed = allowed_tokens(self.vocabulary, case.language, b"")
            wrong = [token_id for token_id in range(len(self.vocabulary.tokens)) if token_id not in allowed]
            for token_id in random.Random(0).sample(wrong, 24):
                check(not grammar.matcher().advance([token_id]), f"{case.wanted.kind}: token {token_id} was taken")

    def test_a_stop_token_ends_a_complete_text(self) -> None:
        """`advance` takes a stop token where the text is complete."""
        for case in self._cases():
            grammar = self.make(self.vocabulary).compile(case.wanted)
            for text in sorted(case.language)[:4]:
                matcher = grammar.matcher()
                taken = matcher.advance(self.vocabulary.encode(text.decode()))
                check(taken is True, f"{case.wanted.kind}: {text!r} was refused")
                if not matcher.is_terminated:
                    done = matcher.advance([min(self.vocabulary.stop_ids)])
                    check(done is True, f"{case.wanted.kind}: the end of {text!r} was refused")

    def test_rollback_restores_masks(self) -> None:
        """After a rollback of one, several or all tokens, the same tokens lead to the same masks again."""
        for case in self._cases():
            grammar = self.make(self.vocabulary).compile(case.wanted)
            matcher, steps = grammar.matcher(), self._walk(grammar, 1)
            if not is_offered(matcher.rollback):
                return
            masks = [self._filled(matcher)]
            for taken in steps[1:]:
                matcher.advance(taken[-1:])
                masks.append(self._filled(matcher))
            count = len(steps) - 1
            for back in sorted({1, 2, count} & set(range(1, count + 1))):
                matcher.rollback(back)
                same = np.array_equal(self._filled(matcher), masks[count - back])
                check(same, f"{case.wanted.kind}: {back} tokens back, the mask is another one")
                check(matcher.advance(steps[-1][count - back :]) is True, f"{case.wanted.kind}: no way on again")
                check(np.array_equal(self._filled(matcher), masks[-1]), f"{case.wanted.kind}: another mask further on")

    def test_drafts_leave_nothing_behind(self) -> None:
        """From everywhere in a text: a few tokens ahead, with the mask behind each, and back, which is as if they had
        not been; so is a token that does not fit.
        """
        for case in self._cases():
            grammar = self.make(self.vocabulary).compile(case.wanted)
            matcher, rng = grammar.matcher(), random.Random(3)
            for taken in self._walk(grammar, 3):
                matcher.advance(taken[-1:])
                before, fitting = self._standing(matcher), allowed_in(self._filled(matcher))
                what = f"{case.wanted.kind} after {self._text(taken)!r}"
                if matcher.is_terminated or not is_offered(matcher.rollback):
                    break
                wrong = [one for one in range(len(self.vocabulary.tokens)) if one not in fitting]
                fits = matcher.advance([rng.choice(wrong)])
                if fits is True:  # it spells a text that another token spells, which the mask has in its place
                    matcher.rollback(1)
                check(self._standing(matcher) == before, f"{what}: a token that does not fit leaves something behind")
                count = 0
                while count < 4 and not matcher.is_terminated:
                    count += matcher.advance([rng.choice(sorted(allowed_in(self._filled(matcher))))])
                matcher.rollback(count)
                check(self._standing(matcher) == before, f"{what}: {count} tokens that were taken back leave something")

    def test_matchers_do_not_share_their_state(self) -> None:
        """Advancing a matcher does not change another, and filling both at once gives the same masks as one by one."""
        for case in self._cases():
            backend = self.make(self.vocabulary)
            grammar = backend.compile(case.wanted)
            still, moved = grammar.matcher(), grammar.matcher()
            before = self._filled(still)
            moved.advance(self._walk(grammar, 2)[1])
            check(np.array_equal(self._filled(still), before), f"{case.wanted.kind}: another matcher moved this one")
            if is_offered(backend.fill):
                masks_NW = np.zeros((2, len(before)), dtype=np.int32)
                backend.fill([moved, still], masks_NW)
                check(np.array_equal(masks_NW[1], before), "fill of several gives another mask than fill of one")
                check(np.array_equal(masks_NW[0], self._filled(moved)), "fill of several mixes its rows up")

    def test_masks_of_any_width_leave_the_rest_alone(self) -> None:
        """Words beyond the vocabulary stay zero, alone and in a batch."""
        backend = self.make(self.vocabulary)
        case = self._cases()[0]
        grammar = backend.compile(case.wanted)
        matcher = grammar.matcher()
        for num_words in (self._num_words, self._num_words + 1):
            masks_NW = np.zeros((2, num_words), dtype=np.int32)
            matcher.fill(masks_NW[1])
            expected = allowed_tokens(self.vocabulary, case.language, b"")
            check(allowed_in(masks_NW[1]) == expected, f"a mask of {num_words} words is another one")
            if is_offered(backend.fill):
                masks_NW[:] = 0
                backend.fill([grammar.matcher(), matcher], masks_NW)
                check(allowed_in(masks_NW[1]) == expected, f"masks of {num_words} words are others")

    def test_what_is_invalid_is_refused_in_one_line(self) -> None:
        """The error is a RequestError with one line."""
        backend = self.make(self.vocabulary)
        for wanted in INVALID:
            self._refused_or_compiled(backend, StructuredOutputs(**wanted), must_refuse=True)

    def test_hostile_grammars_end_in_time(self) -> None:
        """They are refused, or compiled, and their masks filled, within the limits; nothing else is raised."""
        backend = self.make(self.vocabulary)  # outside the measured time: it may start a process
        for wanted in HOSTILE:
            asked = StructuredOutputs(**wanted)
            watch = Stopwatch()
            grammar = self._refused_or_compiled(backend, asked)
            taken_s = watch.seconds
            check(taken_s < MOST_COMPILE_S, f"{_short(wanted)} takes {taken_s:.1f} s; refuse it by its size")
            if grammar is not None:
                self._walk_blindly(grammar.matcher(), _short(wanted))

    def test_what_it_does_not_say_it_cannot_hold_it_holds(self) -> None:
        """`cannot_hold` is True or False of each keyword of a schema, and `compile` refuses none that it may hold."""
        backend = self.make(self.vocabulary)
        if not is_offered(backend.cannot_hold):
            return
        for keyword, value in KEYWORDS:
            found = backend.cannot_hold(keyword, value)
            check(isinstance(found, bool), f"cannot_hold({keyword!r}, {value!r}) is {found!r}, not a bool")
            compiled = None if found else self._refused_or_compiled(backend, StructuredOutputs(json={keyword: value}))
            check(found or compiled is not None, f"{keyword}={value!r} is refused, and cannot_hold does not say so")

    def test_a_grammar_says_how_large_it_is(self) -> None:
        """num_bytes is a positive number, with which the engine bounds the memory of cached grammars."""
        for case in self._cases():
            num_bytes = self.make(self.vocabulary).compile(case.wanted).num_bytes
            check(isinstance(num_bytes, int) and num_bytes > 0, f"num_bytes is {num_bytes!r}")

    # -------------------------------------------------------------------------------------------------------- helpers

    @property
    def _num_words(self) -> int:
        return -(-len(self.vocabulary.tokens) // 32)

    def _cases(self) -> list[Case]:
        return [case for case in CASES if case.wanted.kind in self.kinds]

    def _filled(self, matcher: GrammarMatcher) -> WordArray:
        mask_W = np.zeros(self._num_words, dtype=np.int32)
        matcher.fill(mask_W)
        return mask_W

    def _standing(self, matcher: GrammarMatcher) -> tuple[frozenset[int], bool, bool]:
        return frozenset(allowed_in(self._filled(matcher))), matcher.is_accepting, matcher.is_terminated

    def _text(self, taken: Sequence[int]) -> bytes:
        return b"".join(self.vocabulary.tokens[token_id] for token_id in taken)

    def _walk(self, grammar: Grammar, seed: int) -> list[list[int]]:
        """The tokens of a random text that masks lead to: all its beginnings."""
        rng, matcher, taken = random.Random(seed), grammar.matcher(), list[int]()
        steps = [list(taken)]
        while going_on := sorted(allowed_in(self._filled(matcher)) - self.vocabulary.stop_ids):
            check(len(steps) < MOST_STEPS, "a text of a finite language does not end")
            taken.append(rng.choice(going_on))
            check(matcher.advance(taken[-1:]) is True, f"token {taken[-1]}, which the mask allows, was refused")
            steps.append(list(taken))
        return steps

    def _check_mask(self, what: str, case: Case, taken: Sequence[int], found: set[int], allowed: set[int]) -> None:
        check(found <= allowed, f"{what}: {self._named(found - allowed)} must not be allowed")
        stops = self.vocabulary.stop_ids
        check(found & stops == allowed & stops, f"{what}: {self._named(allowed & stops - found)} must be allowed")
        done = len(self._text(taken))
        for text in case.language:
            is_reached = text[:done] != self._text(taken) or not text[done:]
            ways = [one for one in found - stops if text[done:].startswith(self.vocabulary.tokens[one])]
            check(is_reached or bool(ways), f"{what}: nothing leads to {text!r}; allowed are {self._named(found)}")

    def _named(self, ids: set[int]) -> str:
        return str([self.vocabulary.tokens[one] if self.vocabulary.tokens[one] else one for one in sorted(ids)][:5])

    def _refused_or_compiled(
        self, backend: GrammarBackend, wanted: StructuredOutputs, *, must_refuse: bool = False
    ) -> Any:
        try:
            grammar = backend.compile(wanted)
        except RequestError as error:
            check(str(error).isprintable() and len(str(error)) <= 600, f"not one short line: {str(error)[:80]!r}")
            return None
        except Exception as error:
            raise AssertionError(f"{wanted.kind}: {type(error).__name__} in place of RequestError: {error}") from error
        must_refuse = must_refuse or wanted.kind not in self.kinds
        check(not must_refuse, f"{wanted.kind} was accepted, and is invalid or of no kind that it knows")
        return grammar

    def _walk_blindly(self, matcher: GrammarMatcher, what: str) -> None:
        """A few tokens of a grammar whose language is not known, each mask in time."""
        for _ in range(4):
            watch = Stopwatch()
            try:
                allowed = sorted(allowed_in(self._filled(matcher)) - self.vocabulary.stop_ids)
            except RequestError:
                return
            taken_s = watch.seconds
            check(taken_s < MOST_FILL_S, f"{what}: a mask takes {taken_s:.1f} s")
            if not allowed or not matcher.advance(allowed[:1]) or matcher.is_terminated:
                return


def _short(wanted: dict[str, Any]) -> str:
    return str(wanted)[:60]
