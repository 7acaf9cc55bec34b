"""A grammar back end for finite languages only, which tries every token: the reference that suites compare with.

Also a small vocabulary, and for tests of the engine a back end that can be told to fail or to be slow.
Legend: as in core/contracts/grammar.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hookline.core.contracts import Grammar, GrammarBackend, GrammarMatcher, GrammarVocabulary, StructuredOutputs
from hookline.core.errors import RequestError
from hookline.core.util.arrays import WordArray

WORDS = (
    "tr",
    "ue",
    "true",
    "fal",
    '{"',
    '":',
    '{"a":',
    '"b',
    "ye",
    "es",
    "yes",
    "no",
    " si",
    "cc",
    "ab",
    "né",
    "\n\n",
    "é",
)
"""Tokens of small_vocabulary beside the single bytes; some of them joined spell the text of another token."""


def small_vocabulary(num_padding: int = 27) -> GrammarVocabulary:
    """Every byte, some words, a stop token, a special token without text, and ids without a token."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    stop, special = len(tokens), len(tokens) + 1
    tokens += [b"<end>", b"<mark>", *[b""] * num_padding]
    by_length = sorted(range(stop), key=lambda token_id: -len(tokens[token_id]))

    def _encode(text: str) -> list[int]:
        rest, found = text.encode(), list[int]()
        while rest:
            found.append(next(token_id for token_id in by_length if rest.startswith(tokens[token_id])))
            rest = rest[len(tokens[found[-1]]) :]
        return found

    return GrammarVocabulary(tokens, frozenset({stop, special}), frozenset({stop}), _encode)


def allowed_tokens(vocabulary: GrammarVocabulary, language: Iterable[bytes], prefix: bytes) -> set[int]:
    """The tokens that may follow a text which has to become one of the language's."""
    rests = [text[len(prefix) :] for text in language if text.startswith(prefix)]
    found = {
        token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if token and token_id not in vocabulary.special_ids and any(rest.startswith(token) for rest in rests)
    }
    return found | (set(vocabulary.stop_ids) if b"" in rests else set())


def allow(mask_W: WordArray, token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens."""
    for token_id in token_ids:
        mask_W.view("uint32")[token_id // 32] |= 1 << token_id % 32


def allowed_in(mask_W: WordArray) -> set[int]:
    """The tokens whose bits are set."""
    return {32 * word + bit for word, bits in enumerate(mask_W.tolist()) for bit in range(32) if bits >> bit & 1}


class PlainGrammars(GrammarBackend):
    """Compiles choices alone; raises RequestError for any other kind. A mask tries every token of the vocabulary."""

    def __init__(self, config: Any, vocabulary: GrammarVocabulary) -> None:
        self.config, self.vocabulary = config, vocabulary

    def compile(self, wanted: StructuredOutputs) -> PlainGrammar:
        """See GrammarBackend. Raises: RequestError for anything but a choice."""
        if wanted.kind != "choice":
            raise RequestError(f"this back end supports choice alone, not {wanted.kind}")
        return PlainGrammar(self.vocabulary, [text.encode() for text in wanted.value], self.matcher_class)

    @property
    def matcher_class(self) -> type[PlainMatcher]:
        """Which matchers its grammars make."""
        return PlainMatcher


class PlainGrammar(Grammar):
    """A finite language."""

    def __init__(self, vocabulary: GrammarVocabulary, language: Sequence[bytes], matcher: type[PlainMatcher]) -> None:
        self.vocabulary, self.language, self._matcher = vocabulary, language, matcher

    @property
    def num_bytes(self) -> int:
        """See Grammar."""
        return 64 + sum(map(len, self.language))

    def matcher(self) -> PlainMatcher:
        """See Grammar."""
        return self._matcher(self)


class PlainMatcher(GrammarMatcher):
    """The tokens taken so far."""

    def __init__(self, grammar: PlainGrammar) -> None:
        self.grammar = grammar
        self.taken: list[int] = []

    @property
    def text(self) -> bytes:
        """The bytes of the tokens taken so far, without stop tokens."""
        stops = self.grammar.vocabulary.stop_ids
        return b"".join(self.grammar.vocabulary.tokens[one] for one in self.taken if one not in stops)

    def fill(self, mask_W: WordArray) -> None:
        """See GrammarMatcher."""
        allow(mask_W, allowed_tokens(self.grammar.vocabulary, self.grammar.language, self.text))

    def advance(self, tokens: Sequence[int]) -> bool:
        """See GrammarMatcher."""
        for token_id in tokens:
            if token_id not in allowed_tokens(self.grammar.vocabulary, self.grammar.language, self.text):
                return False
            self.taken.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See GrammarMatcher."""
        del self.taken[len(self.taken) - num_tokens :]

    @property
    def is_accepting(self) -> bool:
        """See GrammarMatcher."""
        return self.text in self.grammar.language

    @property
    def is_terminated(self) -> bool:
        """See GrammarMatcher."""
        vocabulary, text = self.grammar.vocabulary, self.text
        is_over = bool(self.taken) and self.taken[-1] in vocabulary.stop_ids
        return is_over or allowed_tokens(vocabulary, self.grammar.language, text) == set(vocabulary.stop_ids)
