"""Whether tokenizing takes so long that an event loop must not wait for it."""

from __future__ import annotations

from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Prompt, prompt_size

LONG_PROMPT = 4000
"""Characters of a prompt that takes a millisecond or more to tokenize."""
LONG_STOPS = 500
"""Characters of stop strings that take as long to make ready."""
LONG_BAD_WORDS = 8
"""Texts in bad_words that take as long to tokenize."""


def takes_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request's texts would hold up the event loop for a millisecond or more."""
    num_words = sum(isinstance(word, str) for word in params.bad_words)
    num_characters = sum(map(len, params.stop))
    return prompt_size(prompt) >= LONG_PROMPT or num_characters >= LONG_STOPS or num_words >= LONG_BAD_WORDS
