"""Grammars by llguidance, which computes masks from the text so far: nothing is enumerated in advance.

Its parser runs without the interpreter's lock, so other threads run while it compiles and fills. The masks of a batch
are filled in the calling thread or in several: waking threads takes longer than most masks on many machines, so the
quickest way is found by trying. Copies of one parser share its lexer, which one thread uses at a time: requests of one
grammar are spread over several parsers, so that their masks are filled side by side. A parser that reaches a limit
gives up; it does not raise, so its state is checked. Its limits do not bound all that compiling may cost: see trial.py.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import lru_cache, partial
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from hookline.core.contracts import (
    Grammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarVocabulary,
    StructuredOutputs,
)
from hookline.core.errors import RequestError, clipped
from hookline.plugins.grammars.quickest import Quickest
from hookline.plugins.grammars.shortest import shortest_text
from hookline.plugins.grammars.structural_tags import as_grammar, ascii_regex
from hookline.plugins.grammars.trial import MAX_BYTES, Trials, is_plain

if TYPE_CHECKING:
    from hookline.plugins.grammars import LLGuidanceConfig

BYTES_PER_CHARACTER = 256
"""A rough measure of the size of a compiled grammar."""
MAX_FORCED_TEXTS = 16384
"""Most forced texts whose tokens are cached; tokenizing a text takes longer than most masks."""
LONG_TEXT = 256
"""Characters from which on a text is not cached."""
MOST_FORCED = 1024
"""Characters of a forced text that are tokenized; the tokens of the rest are asked for later."""
LONGEST_FORCED = 2**15
"""Most characters that a schema may ask of one text, by a pattern or as a constant: a lexer has a state for each."""
PANIC = "panic: "
"""The beginning of an error that llguidance did not expect."""
BASE_BYTES = 1 << 20
"""Bytes of a small grammar, including the states that its lexer makes while it is used."""
PARSERS_S = 0.1
"""Most processor time for making the further parsers of a grammar, in seconds."""
FEW_THREADS = 4
"""Number of threads between one and all."""
LENGTHS = (6, 8, 10, 15, 20, 30)
"""Characters; llguidance itself has 10 and 30. More of them hardly make masks any quicker (docs/log)."""
WHITE_SPACE = r"[ \t]|(\r?\n){{1,2}}[ \t]{{0,{most}}}"
"""White space between the tokens of JSON: one character, or one or two line breaks and an indentation. Each place that
allows more is one where a model may write white space until its tokens are used up."""
NO_TEXT = "NoExtension"
"""llguidance's words for a state in which no token is allowed, not even the end."""
TOO_MANY = ": too many "
"""Part of its words for a limit of states or expressions."""
UNKNOWN = "Unimplemented keys"
"""The beginning of its message about an unknown keyword of a schema."""
EXACT = 2**53
"""Largest bound of numbers that has a regular expression; a larger bound in a schema, such as the largest 64-bit
number, has no effect anyway."""
MOST_REMAINDERS = 2**15
"""Largest `multipleOf`, as a whole number of its smallest digit; one above it takes more than a quarter of a second."""
FEW_PATTERNS, FEW_CHARACTERS = 4, 80
"""Most patterns of an object's property names that are compared with each other."""
MAX_TRIED = 4096
"""Patterns, formats and keywords of schemas for which llguidance's support is cached."""
EXCERPT = re.compile(r"\n *\d+ \| .*|<state>.*|<non-verbose/>", re.DOTALL)
"""Text after llguidance's reason: lines of the grammar, and the state of its parser."""
_SETS = re.compile(r"\[(?:[^\]\\]|\\.)*(?:&&|--|~~)", re.DOTALL)
"""An operator between sets within a class of characters: llguidance's regexes have them, those of JSON schemas do not,
in which they are characters."""
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
MAX_NESTING = 100
"""Most brackets around a place in a GBNF grammar: its translation is recursive."""


class _Tokenizer:
    """The vocabulary in llguidance's form."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = min(vocabulary.stop_ids)
        self._encode = lru_cache(MAX_FORCED_TEXTS)(vocabulary.encode)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a forced text, such as a key; cached, because the same few texts come again and again. Called
        while masks are filled, from any thread.
        """
        text = (text if isinstance(text, str) else text.decode())[:MOST_FORCED]
        return self._encode(text) if len(text) < LONG_TEXT else self._encode.__wrapped__(text)


class LLGuidance(GrammarBackend):
    """See LLGuidanceConfig. tries: whether grammars that are not plain are tried out first; see trial.py."""

    def __init__(self, config: LLGuidanceConfig, vocabulary: GrammarVocabulary, *, tries: bool = True) -> None:
        self.config = config
        self._white_space = WHITE_SPACE.format(most=config.max_indentation)
        self._trials = Trials(config, vocabulary) if tries else None
        wrapper, stop_ids = TokenizerWrapper(_Tokenizer(vocabulary)), sorted(vocabulary.stop_ids)
        self.tokenizer = LLTokenizer(wrapper, eos_token=stop_ids, slices=_slices(self._white_space))
        self.limits = LLParserLimits(
            initial_lexer_fuel=config.initial_lexer_fuel,
            step_lexer_fuel=config.step_lexer_fuel,
            step_max_items=config.step_max_items,
            max_lexer_states=config.max_lexer_states,
            max_grammar_size=config.max_grammar_size,
            verbose_errors=False,
        )
        self._num_parsers = config.num_threads or _num_threads()
        self._ways = _ways(config.num_threads, self._num_parsers)
        self._quickest = Quickest([num_threads for num_threads, _ in self._ways])
        self._lanes = count()
        self.mask_bytes = 4 * -(-self.tokenizer.vocab_size // 32)

    def compile(self, wanted: StructuredOutputs) -> LLGuidanceGrammar:
        """See GrammarBackend."""
        tried_bytes = 0 if self._trials is None or is_plain(wanted) else self._trials.try_out(wanted)
        text, started = self._text(wanted), time.perf_counter()
        first = self._parser(text)
        raise_error(first, is_ours=wanted.kind != "grammar" or _is_gbnf(wanted.value))
        num_further = min(self._num_parsers - 1, int(PARSERS_S / max(1e-6, time.perf_counter() - started)))
        num_further = min(num_further, MAX_BYTES // max(1, tried_bytes))
        parsers = [first]
        if num_further:
            with ThreadPoolExecutor(num_further, "hookline-grammar") as helpers:
                further = helpers.map(self._parser, [text] * num_further)
                parsers += [parser for parser in further if not parser.is_error()]
        num_bytes = len(parsers) * max(tried_bytes, BASE_BYTES + BYTES_PER_CHARACTER * wanted.num_characters)
        return LLGuidanceGrammar([(next(self._lanes), parser) for parser in parsers], self.mask_bytes, num_bytes)

    @classmethod
    def cannot_hold(cls, keyword: str, value: Any) -> bool:
        """See GrammarBackend."""
        if keyword in ("pattern", "format"):
            if not isinstance(value, str):
                return False
            is_other = keyword == "pattern" and (shortest_text(value) > LONGEST_FORCED or bool(_SETS.search(value)))
            return is_other or _is_refused("string", keyword, value)
        if keyword in ("const", "enum"):
            values = value if keyword == "enum" and isinstance(value, list) else [value]
            return any(len(json.dumps(one)) > LONGEST_FORCED for one in values)
        if keyword == "multipleOf":
            return _is_number(value) and (_has_long_table(value) or _is_refused("number", keyword, value))
        if keyword == "properties":
            return bool(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(value))))
        if keyword == "patternProperties":  # whether several of them exclude each other may take long to find out
            if len(value) > FEW_PATTERNS or sum(map(len, value)) > FEW_CHARACTERS:
                return True
            schema = LLMatcher.grammar_from_json_schema(json.dumps({keyword: value}))
            return bool(LLMatcher.validate_grammar(schema))
        if _is_number(value) and abs(value) > EXACT:
            return True
        return _is_unknown(keyword)

    def _parser(self, text: str) -> LLMatcher:
        """A parser with a lexer of its own, whose first states are made here and not during steps."""
        parser = LLMatcher(self.tokenizer, text, log_level=0, limits=self.limits)
        if not parser.is_error():
            parser.compute_bitmask()
        return parser

    def _text(self, wanted: StructuredOutputs) -> str:
        """The grammar in llguidance's own form."""
        if wanted.kind == "json":
            return self._json(wanted.value, wanted.whitespace)
        if wanted.kind == "regex":
            return str(LLMatcher.grammar_from_regex(ascii_regex(wanted.value)))
        if wanted.kind == "choice":
            rules = " | ".join(json.dumps(one, ensure_ascii=False) for one in wanted.value)
            return str(LLMatcher.grammar_from_lark(f"start: {rules}\n"))
        if wanted.kind == "grammar":
            return str(LLMatcher.grammar_from_lark(_as_lark(wanted.value)))
        return as_grammar(json.loads(wanted.value), partial(self._json, whitespace=wanted.whitespace), _as_lark)

    def _json(self, schema: str, whitespace: bool) -> str:
        options: Any = {"whitespace_flexible": whitespace}
        if whitespace:
            options["whitespace_pattern"] = self._white_space
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))

    def fill(self, matchers: Sequence[Any], masks_NW: np.ndarray) -> None:
        """See GrammarBackend."""
        way, num_done = self._quickest.choose(len(matchers)), 0
        if way == 0:
            way, num_done = self._fill_alone(matchers, masks_NW)
        if num_done < len(matchers):
            started, executor = time.perf_counter(), self._ways[way][1]
            assert executor is not None
            self._fill_in_threads(executor, matchers[num_done:], masks_NW[num_done:])
            self._quickest.took(way, time.perf_counter() - started, len(matchers) - num_done)
        for matcher in matchers:
            raise_error(matcher.inner)

    def _fill_alone(self, matchers: Sequence[Any], masks_NW: np.ndarray) -> tuple[int, int]:
        """Fill rows in this thread until other threads should be faster; returns the threads to use then, and the
        number of rows done.
        """
        address, stride, num_rows = masks_NW.ctypes.data, masks_NW.strides[0], len(matchers)
        way, patience_s, started = 0, self._quickest.patience_s, time.perf_counter()
        for row, matcher in enumerate(matchers):
            matcher.inner.unsafe_compute_mask_ptr(address + row * stride, self.mask_bytes)
            seconds, num_left = time.perf_counter() - started, num_rows - row - 1
            if seconds > patience_s and num_left > 1 and (way := self._quickest.rest(seconds, row + 1, num_left)):
                break
        self._quickest.took(0, seconds, num_rows - num_left)
        return way, num_rows - num_left

    def _fill_in_threads(self, executor: LLExecutor, matchers: Sequence[Any], masks_NW: np.ndarray) -> None:
        order = sorted(range(len(matchers)), key=lambda row: matchers[row].lane)  # adjacent rows in one thread
        rows = [(matchers[row].inner, row) for row in order]
        if masks_NW.strides[0] == self.mask_bytes and masks_NW.flags.c_contiguous:
            executor.unsafe_compute_mask_ptr(rows, masks_NW.ctypes.data, self.mask_bytes, len(matchers))
            return
        buffer = np.zeros((len(matchers), self.mask_bytes // 4), dtype=np.int32)
        executor.unsafe_compute_mask_ptr(rows, buffer.ctypes.data, self.mask_bytes, len(matchers))
        masks_NW[:, : self.mask_bytes // 4] = buffer


class LLGuidanceGrammar(Grammar):
    """Parsers in their initial state, each with its lane; each request gets a copy of one, in turn."""

    def __init__(self, parsers: Sequence[tuple[int, LLMatcher]], mask_bytes: int, num_bytes: int) -> None:
        self._parsers, self._mask_bytes, self._num_bytes = cycle(parsers), mask_bytes, num_bytes

    @property
    def num_bytes(self) -> int:
        """See Grammar."""
        return self._num_bytes

    def matcher(self) -> LLGuidanceMatcher:
        """See Grammar."""
        lane, parser = next(self._parsers)
        return LLGuidanceMatcher(parser.deep_copy(), self._mask_bytes, lane)


class LLGuidanceMatcher(GrammarMatcher):
    """A request's copy of a parser. inner: llguidance's matcher. lane: matchers of a lane share a lexer, and wait for
    each other.
    """

    def __init__(self, inner: LLMatcher, mask_bytes: int, lane: int) -> None:
        self.inner, self._mask_bytes, self.lane = inner, mask_bytes, lane

    def fill(self, mask_W: np.ndarray) -> None:
        """See GrammarMatcher."""
        assert mask_W.nbytes >= self._mask_bytes and mask_W.flags.c_contiguous
        self.inner.unsafe_compute_mask_ptr(mask_W.ctypes.data, self._mask_bytes)
        raise_error(self.inner)  # the mask of a stopped parser would allow the end

    def advance(self, tokens: Sequence[int]) -> bool:
        """See GrammarMatcher."""
        num_taken = self.inner.try_consume_tokens(list(tokens))  # consume_token would stop the parser
        if num_taken < len(tokens):
            raise_error(self.inner)  # a limit of its parser
        return bool(num_taken == len(tokens))

    def rollback(self, num_tokens: int) -> None:
        """See GrammarMatcher."""
        if num_tokens and not self.inner.rollback(num_tokens):
            raise RequestError(_reason(str(self.inner.get_error())))

    @property
    def is_accepting(self) -> bool:
        """See GrammarMatcher."""
        return bool(self.inner.is_accepting())

    @property
    def is_terminated(self) -> bool:
        """See GrammarMatcher."""
        return self.inner.is_stopped() and not self.inner.is_error()


@lru_cache(MAX_TRIED)
def _is_refused(kind: str, keyword: str, value: Any) -> bool:
    """Whether llguidance does not support this pattern or format of texts, or this factor of numbers."""
    schema = LLMatcher.grammar_from_json_schema(json.dumps({"type": kind, keyword: value}))
    return bool(LLMatcher.validate_grammar(schema))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_long_table(factor: float) -> bool:
    """Whether the automaton of a number's multiples, which has a state for each remainder, takes long to make."""
    _, digits, exponent = Decimal(repr(factor)).normalize().as_tuple()
    size = int("".join(map(str, digits)) + "0" * max(0, int(exponent)))
    return size > MOST_REMAINDERS and digits != (1,)  # zeros at the end of a number are quickly seen


@lru_cache(MAX_TRIED)
def _is_unknown(keyword: str) -> bool:
    """Whether llguidance knows a keyword, although it does not support it."""
    schema = LLMatcher.grammar_from_json_schema(json.dumps({keyword: True}))
    return bool(LLMatcher.validate_grammar(schema).startswith(UNKNOWN))


def _slices(white_space: str) -> list[str]:
    """llguidance's default slices, with our white space, and with more lengths of texts within strings of JSON.

    A string with n characters left allows every token of a slice of at most n; all other tokens are tried.
    """
    *_, any_length = LLTokenizer.general_slices()
    return [white_space, *(any_length.removesuffix("+") + f"{{1,{length}}}" for length in LENGTHS), any_length]


def _ways(num_threads: int | None, at_most: int) -> list[tuple[int, LLExecutor | None]]:
    """The numbers of threads that may fill masks, each with its executor: the calling thread, a few threads, and the
    most allowed.
    """
    few = [FEW_THREADS] * (at_most > FEW_THREADS)
    return [(1, None), *((one, LLExecutor(one)) for one in few), *[(at_most, LLExecutor(num_threads))] * (at_most > 1)]


def _num_threads() -> int:
    """The threads that LLExecutor would use by itself, which respects the limits of a container."""
    return min(32, max(1, len(os.sched_getaffinity(0)) * 4 // 5))


def raise_error(matcher: LLMatcher, *, is_ours: bool = False) -> None:
    """Check whether a parser has stopped. is_ours: the grammar was written by us, so a place in it means nothing to the
    caller.

    Raises: RequestError for a limit or an invalid grammar; RuntimeError if the parser is at fault.
    """
    if matcher.is_error():
        error = str(matcher.get_error())
        if error.startswith(PANIC):
            raise RuntimeError(clipped(error.partition("\n")[0], 300))
        raise RequestError(_reason(error, is_ours=is_ours))


def _reason(error: str, *, is_ours: bool = False) -> str:
    """llguidance's reason for stopping in one line, without details that only its authors understand."""
    text = EXCERPT.sub("", error)
    if text.startswith(NO_TEXT):
        return "no text fits it from here on: a rule repeats itself without an end, or its parts exclude each other"
    text = PLACE.sub("" if is_ours else r"line \1, column \2: ", text)
    where, is_regex, drawing = text.partition("regex parse error:\n")
    if is_regex:
        where = where.removesuffix(" (in regex): ").removesuffix(": ") or "invalid regex"
        text = f"{where}: {drawing.rpartition('error: ')[2]}"
    text = clipped(" ".join(text.replace("lexer error", "it cannot be read from here on").split()), 300)
    return f"{text}; ask for shorter texts and fewer repetitions" if TOO_MANY in text else text


def _is_gbnf(grammar: str) -> bool:
    return "::=" in grammar


def _as_lark(text: str) -> str:
    """A grammar in Lark's form."""
    if not _is_gbnf(text):
        return text
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth > MAX_NESTING:
            raise RequestError(f"the grammar has more than {MAX_NESTING} brackets around one place")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # it raises many classes, plain Exception too
        raise RequestError(clipped(" ".join(str(error).split()), 300)) from None
