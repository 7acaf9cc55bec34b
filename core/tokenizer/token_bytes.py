"""The bytes that each token stands for: grammars are matched against them.

Knows the two ways in which tokenizers write bytes: byte-level (each byte a printable character) and byte fallback
(<0x0A>, with a mark in place of spaces).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hookline.core.contracts import GrammarVocabulary
from hookline.core.errors import RequestError
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.token_spelling import byte_values

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def grammar_vocabulary(codec: Codec, eos_token_ids: Iterable[int], vocab_size: int) -> GrammarVocabulary:
    """The tokens' bytes and special tokens of a codec's tokenizer, as grammars see it.

    Raises: RequestError if there is no tokenizer, or if the bytes of its tokens are not known.
    """
    tokenizer = codec.tokenizer
    if tokenizer is None:
        raise RequestError("structured output needs a tokenizer and the checkpoint has none; set model.tokenizer")
    stop_ids = frozenset(eos_token_ids) or frozenset({tokenizer.eos_token_id} - {None})
    if not stop_ids:
        raise RequestError("structured output needs an end-of-sequence token, and the checkpoint names none")
    added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if index < vocab_size}
    names = {index: name for name, index in tokenizer.get_vocab().items() if index < vocab_size}
    as_bytes = _byte_level if codec.joins_bytes else _with_fallback(tokenizer)
    tokens = [b""] * vocab_size
    special = frozenset(index for index, token in added.items() if token.special)
    as_written = added.keys() if codec.joins_bytes else special
    for index, name in names.items():
        tokens[index] = name.encode() if index in as_written else as_bytes(name)
    return GrammarVocabulary(tokens, special, stop_ids, codec.encode_word)


def _with_fallback(tokenizer: Any) -> Any:
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    if "ByteFallback" not in decoder and "Metaspace" not in decoder:
        raise RequestError(
            "structured output needs a tokenizer whose tokens are bytes (byte-level or with byte fallback), and this "
            "one's are not"
        )
    return _from_pieces


def _from_pieces(name: str) -> bytes:
    byte = _BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE, " ").encode()


def _byte_level(name: str) -> bytes:
    values = byte_values()
    return bytes(values.get(character, 0) for character in name)
