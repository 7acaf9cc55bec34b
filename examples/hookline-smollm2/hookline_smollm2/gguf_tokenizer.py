"""The tokenizer in a GGUF file's metadata: byte-level BPE, as SmolLM2 splits text. Knows no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.core.errors import CheckpointError

CONTROL = 3
"""GGUF's type of tokens that are no text: they are recognised in a prompt, and left out of an answer."""


def refuse_other_tokenizers(metadata: Callable[[str], Any]) -> None:
    """Raise CheckpointError for a tokenizer that splits text in another way."""
    kind = metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the GGUF file's tokenizer is {kind}; this plugin reads ('gpt2', 'smollm')")


def make_tokenizer(metadata: Callable[[str], Any]) -> Any:
    """A transformers tokenizer from GGUF metadata that `refuse_other_tokenizers` lets pass, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = metadata("tokenizer.ggml.tokens"), metadata("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[metadata("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[metadata("tokenizer.ggml.unknown_token_id")],
        chat_template=metadata("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
