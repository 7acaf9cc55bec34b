"""How single tokens are spelt: their text and their bytes, for log-probabilities. Remembers both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.detokenizer import REPLACEMENT

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenSpelling:
    """Texts of a codec's tokens, special ones included. Without a tokenizer a token's text is its id."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._found: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        """A token's text; bytes that are no characters read as U+FFFD."""
        return self._both(token_id)[0]

    def data(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; several tokens may make a character together."""
        return self._both(token_id)[1]

    def is_special(self, token_id: int) -> bool:
        """Whether a text may be read without this token."""
        return token_id in self._codec.special_ids

    def behind(self, prompt: Sequence[int], *, shows_special: bool = False) -> SpeltText:
        """For the tokens of a completion, in their order. shows_special: whether special ones are part of its text."""
        return SpeltText(self, self.is_start(prompt), shows_special)

    def is_start(self, prompt: Sequence[int]) -> bool:
        """Whether the token behind a prompt begins a text."""
        return not self._codec.joins_bytes and not self._codec.context(prompt)

    def first_data(self, token_id: int) -> bytes:
        """The bytes of a text's first token, whose leading space many decoders strip."""
        text = self._codec.decode([token_id], skip_special_tokens=False)
        return self.data(token_id) if REPLACEMENT in text else text.encode()

    def _both(self, token_id: int) -> tuple[str, bytes]:
        found = self._found.get(token_id)
        if found is None:
            data = self._read(token_id)
            found = self._found[token_id] = data.decode(errors="replace"), data
        return found

    def _read(self, token_id: int) -> bytes:
        tokenizer = self._codec.tokenizer
        name = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token_id)
        if name is None:  # the model's vocabulary may be larger than the tokenizer's
            return str(token_id).encode()
        if self.is_special(token_id):
            return str(name).encode()
        if self._codec.joins_bytes:
            if name in tokenizer.get_added_vocab():
                return str(name).encode()
            values = byte_values()
            return bytes(values[letter] for letter in name) if set(name) <= set(values) else str(name).encode()
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else self._codec.text_within(token_id).encode()


class SpeltText:
    """The tokens of a text in their order, as they stand in it: together they are the text.

    is_start: whether the next one begins the text, so that a decoder may strip its space.
    """

    def __init__(self, spelling: TokenSpelling, is_start: bool, shows_special: bool) -> None:
        self.spelling, self.is_start, self._shows_special = spelling, is_start, shows_special

    def text(self, token_id: int) -> str:
        """A token's text if it came next; bytes that are no characters read as U+FFFD."""
        return self.data(token_id).decode(errors="replace") if self.is_start else self.spelling.text(token_id)

    def data(self, token_id: int) -> bytes:
        """The bytes that a token would add to the text if it came next."""
        return self.spelling.first_data(token_id) if self.is_start else self.spelling.data(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a text may be read without this token."""
        return self.spelling.is_special(token_id)

    def go_past(self, token_id: int) -> None:
        """Note the next token."""
        self.is_start = self.is_start and not self._shows_special and self.spelling.is_special(token_id)


@cache
def byte_values() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as (Radford et al. 2019): printable bytes as themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
