"""How single tokens are spelt: their text and their bytes, for log-probabilities. Remembers both."""

from __future__ import annotations

import re
from functools import cache, cached_property

from hookline.core.tokenizer.codec import Codec

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
        """The bytes that a token adds to the text; of several tokens they make characters that no single one has."""
        return self._both(token_id)[1]

    def is_special(self, token_id: int) -> bool:
        """Whether a text may be read without this token."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        tokenizer = self._codec.tokenizer
        if tokenizer is None:
            return frozenset()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return frozenset([*tokenizer.all_special_ids, *(id_ for id_, token in added.items() if token.special)])

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
        if name in tokenizer.get_added_vocab():
            return str(name).encode()
        if self._codec.joins_bytes:
            values = byte_values()
            return bytes(values[letter] for letter in name) if set(name) <= set(values) else str(name).encode()
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else str(name).replace("▁", " ").encode()


@cache
def byte_values() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes as (Radford et al. 2019): printable bytes as themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
