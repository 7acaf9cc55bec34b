"""Tokenizers whose decoders look at what stands around a token, as those of Llama 2, Mistral, T5 and BERT do."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["The", "capital", "of", "France", "is", "Paris", "def", "pass", "(", ":", "a"]
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}"


def _merged(pieces: list[str]) -> list[tuple[str, str]]:
    """Merges that put each piece together from its left."""
    found = {(piece[:end], piece[end]): None for piece in pieces for end in range(1, len(piece))}
    return list(found)


def _beginnings(pieces: list[str]) -> list[str]:
    return list(dict.fromkeys(piece[:end] for piece in pieces for end in range(1, len(piece) + 1)))


def llama(*, is_gemma: bool = False) -> Tokenizer:
    """Words with a mark for the space before them, single bytes for all else, and a space before a text's first word.

    is_gemma: no such space, and none is stripped.
    """
    pieces = [*WORDS, *(f"▁{word}" for word in WORDS), "▁▁"]
    letters = sorted({letter for piece in pieces for letter in piece})
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *_beginnings(pieces), *pieces]
    vocab = {name: id_ for id_, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(vocab=vocab, merges=_merged(pieces), byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = replace if is_gemma else normalizers.Sequence([normalizers.Prepend("▁"), replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps if is_gemma else [*steps, decoders.Strip(" ", 1, 0)])
    return _with_special(tokenizer)


def metaspace() -> Tokenizer:
    """As T5's: the decoder itself leaves out the first space."""
    tokenizer = llama()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT's: a word's pieces but the first are marked, and the decoder puts spaces between words."""
    names = [*SPECIAL, *WORDS, "##ing"]
    tokenizer = Tokenizer(models.WordPiece({name: id_ for id_, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _with_special(tokenizer)


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $0", special_tokens=[("<s>", 1)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    """The files of a checkpoint's tokenizer, with a chat template that ends with a special token."""
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
