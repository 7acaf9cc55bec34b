"""The tokenizer as step extensions see it: see `core.contracts.TokenTexts`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from hookline.core.contracts import TokenTexts
from hookline.core.tokenizer.codec import Codec


class CodecTexts(TokenTexts):
    """Texts of tokens by a codec that has a tokenizer, for a vocabulary of `vocab_size` tokens."""

    def __init__(self, codec: Codec, vocab_size: int) -> None:
        self._codec, self._vocab_size = codec, vocab_size

    @cached_property
    def texts(self) -> Sequence[str]:
        """See TokenTexts."""
        known = min(self._vocab_size, len(self._codec.tokenizer))
        return [*map(self._codec.text_within, range(known)), *[""] * (self._vocab_size - known)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """See TokenTexts."""
        return self._codec.decode(token_ids, skip_special_tokens=False)


def token_texts(codec: Codec, vocab_size: int) -> TokenTexts | None:
    """The texts of a codec's tokens; None if it has no tokenizer."""
    return None if codec.tokenizer is None else CodecTexts(codec, vocab_size)
