"""From the texts in `bad_words` to token ids. Knows a tokenizer's `encode_word` and no engine."""

from __future__ import annotations

from dataclasses import replace

from core.sampling import SamplingParams
from core.text import Codec


def with_word_ids(params: SamplingParams, codec: Codec) -> SamplingParams:
    """The same with token ids for every text: those of the word at a text's beginning, and after a space.

    Tokenizers write the two in different tokens. A word cut into other tokens than these, as inside of a longer word,
    is not found.
    Raises: RequestError if there is no tokenizer.
    """
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for form in (word.lstrip(), f" {word.lstrip()}") if isinstance(word, str) else ():
            found[tuple(codec.encode_word(form))] = None
        if not isinstance(word, str):
            found[word] = None
    return replace(params, bad_words=tuple(found))
