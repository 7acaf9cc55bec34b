"""Whether tokenizing a request takes too long for an event loop to wait for it."""

from __future__ import annotations

from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Prompt, is_chat, prompt_size

LONG_PROMPT = 4000
"""Characters of a prompt that takes a millisecond or more to tokenize."""
LONG_STOPS = 500
"""Characters of stop strings that take as long to prepare."""
LONG_BAD_WORDS = 8
"""Texts in bad_words that take as long to tokenize."""


def takes_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request's texts may hold up an event loop for a millisecond or more, as a chat template always may."""
    is_long = prompt_size(prompt) >= LONG_PROMPT or sum(map(len, params.stop)) >= LONG_STOPS
    return is_long or sum(isinstance(word, str) for word in params.bad_words) >= LONG_BAD_WORDS or is_chat(prompt)
