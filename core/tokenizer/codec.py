"""Converts between text and token ids: prompts in their three forms, and texts for the caller.

The checkpoint's tokenizer is loaded on first use. Without tokenizer files only token ids are accepted, and outputs have
no text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Sized
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hookline.core.checkpoint.checkpoint import load_tokenizer
from hookline.core.checkpoint.tokenizer_growth import check_growth
from hookline.core.contracts import CheckpointSource, TokenTexts
from hookline.core.errors import PromptTooLongError, RequestError, one_short_line, shown
from hookline.core.sampling_params import MAX_BAD_WORD_TOKEN_IDS, MAX_BAD_WORDS, SamplingParams
from hookline.core.tokenizer.chat_templates import MAX_CHARACTERS, import_renderer, rendered
from hookline.core.tokenizer.detokenizer import REPLACEMENT, WINDOW, Detokenizer
from hookline.core.util.raising import Raising

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat (role and content)."""
LONG_PROMPT = 4000
"""Characters of a prompt that takes a millisecond or more to tokenize."""
LONG_STOPS = 500
"""Characters of stop strings that take a millisecond or more to prepare."""
LONG_BAD_WORDS = 8
"""Texts in bad_words that take a millisecond or more to tokenize."""
SHRINKING = {"NoneType": 1, "NFC": 4}
"""Most characters that a normaliser of this class joins into one; Unicode's NFC joins up to four."""
MAX_TOKENS = 2**24
"""Most token ids of a prompt, which is refused before they are checked; no checkpoint has more positions."""
OTHER_SHRINKING = 16
"""Most characters joined into one by tokenizers that may drop accents, white space or unknown words."""
_NO_PROMPTS = (Mapping, set, frozenset, bytes, bytearray, memoryview)
"""Types that can be iterated and are neither a prompt nor a list of prompts."""
_log = logging.getLogger("hookline")
_BOOLS = frozenset((bool, np.bool_))
_DECODING = Raising(
    lambda error: RequestError(f"these token ids cannot be decoded: {one_short_line(error)}"), may_show=False
)


class Codec:
    """Encodes prompts and decodes outputs with the tokenizer of a folder or of a model's own source, if it has one.

    chat: a text is a user's message, and the chat template goes around it.
    max_len: tokens that a prompt has room for; a text with more characters than max_len tokens can have is refused
    before it is tokenized, which takes over a second and 200 MB for each million characters. None: no text is refused.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        source: CheckpointSource | None = None,
        chat: bool = False,
        max_len: int | None = None,
    ) -> None:
        self._folder, self._source, self._chats, self.max_len = folder, source, chat, max_len
        self._tokenizer: Any = None
        self._told_twice = False
        self._growth = 1.0
        """The most characters that the tokenizer makes of one character."""
        self._texts: dict[bool, dict[int, str]] = {True: {}, False: {}}

    def limit_prompts(self, max_len: int) -> None:
        """Refuse texts with more characters than this many tokens of the vocabulary can have."""
        self.max_len = max_len

    @property
    def tokenizer(self) -> Any:
        """The tokenizer (transformers), or None."""
        if self._tokenizer is None and self._folder is not None:
            self._tokenizer = self._checked(load_tokenizer(self._folder))
            self._folder = self._folder if self._tokenizer is not None else None
        if self._tokenizer is None and self._source is not None:
            self._tokenizer = self._checked(self._source.tokenizer())
            self._source = self._source if self._tokenizer is not None else None
        return self._tokenizer

    def _checked(self, tokenizer: Any) -> Any:
        self._growth = check_growth(tokenizer)
        return tokenizer

    def make_ready(self) -> None:
        """Do in advance what the first use would do: it may write to the tokenizer, which several threads will read,
        and import what chat templates need.

        Raises: RequestError if the tokenizer fails.
        """
        tokenizer = self.tokenizer
        if tokenizer is not None:
            self.encode("")
            if getattr(tokenizer, "chat_template", None):
                import_renderer(tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; special tokens in a text are recognised.

        Raises: RequestError if the prompt has no known form, has more characters than can fit, cannot be tokenized, or
        needs a tokenizer or chat template that does not exist.
        """
        if isinstance(prompt, str) and self._chats:
            return self._chat([{"role": "user", "content": prompt}])
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        if is_chat(prompt):
            return self._chat(prompt)
        is_array = hasattr(prompt, "__array__") and np.ndim(prompt) == 1
        if is_array or (not isinstance(prompt, _NO_PROMPTS) and isinstance(prompt, Sequence)):
            if len(prompt) > MAX_TOKENS:
                raise PromptTooLongError(f"the prompt has {len(prompt)} token ids; at most {MAX_TOKENS} are allowed")
            kinds = set(map(type, prompt))
            if kinds & _BOOLS:  # True and False would count as whole numbers
                raise RequestError(f"prompt token ids must be whole numbers, not true or false: {shown(prompt)}")
            if kinds <= {int}:
                return list(prompt)  # type: ignore[arg-type]
            return [int(token_id) if isinstance(token_id, np.integer) else token_id for token_id in prompt]  # type: ignore[misc]
        raise RequestError(f"a prompt is a text, token ids or chat messages, not {type(prompt).__name__}")

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens in it are recognised. add_special_tokens: add the tokenizer's special
        tokens that begin or end a text, if it has any.

        Raises: RequestError as `encode` does.
        """
        ids = self._tokenize(text, "a text prompt", add_special_tokens=add_special_tokens)
        first = getattr(self.tokenizer, "bos_token_id", None)
        if first is not None and ids[:2] == [first, first] and not self._told_twice:
            self._told_twice = True
            _log.warning(
                "a prompt begins with %s twice: its text has one, and the tokenizer puts one in front; take it out of "
                "the text, or send messages, token ids, or add_special_tokens=false (this is told once)",
                self.tokenizer.bos_token,
            )
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are ordinary text, without begin and end tokens.

        Raises: RequestError as `encode` does.
        """
        return self._tokenize(
            text, "a text", tokenizer=self._plain_tokenizer, add_special_tokens=False, split_special_tokens=True
        )

    @cached_property
    def _plain_tokenizer(self) -> Any:
        """A second tokenizer, because threads share the first one's switch for special tokens."""
        return deepcopy(self._needed("a text"))

    def encode_word(self, word: str) -> list[int]:
        """Token ids of a piece of text, without special tokens that begin or end a text.

        Raises: RequestError if there is no tokenizer.
        """
        return self._tokenize(word, "a word in bad_words", add_special_tokens=False)

    def _tokenize(self, text: str, what: str, *, tokenizer: Any = None, **options: Any) -> list[int]:
        tokenizer = self._needed(what) if tokenizer is None else tokenizer
        if self.max_len is not None and len(text) > self.max_len and len(text) > self._max_characters:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, and the {self.max_len} tokens that there is room for have at "
                f"most {self._max_characters}; shorten it, or raise engine.max_model_len (engine.num_blocks, if it is "
                "the KV cache that holds no more)"
            )
        if self._growth > 1 and len(text) * self._growth > MAX_CHARACTERS:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, of each of which the checkpoint's tokenizer may make "
                f"{self._growth:g}; at most {MAX_CHARACTERS} are tokenized"
            )
        cannot = f"{what} cannot be tokenized"
        raising = Raising(
            lambda error: RequestError(f"{cannot}: {_no_unicode(text) or one_short_line(error)}"), may_show=False
        )
        with raising:  # tokenizers panics with an error that is no Exception
            ids: list[int] = tokenizer.encode(text, **options)
        return ids

    @cached_property
    def _max_characters(self) -> int:
        """Most characters of a text with max_len tokens, as far as the vocabulary tells."""
        assert self.max_len is not None
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        normalizer = type(getattr(backend, "normalizer", None)).__name__
        # Only tokens that are bytes surely spell all that is in a text.
        shrinking = SHRINKING.get(normalizer, OTHER_SHRINKING) if self.joins_bytes else OTHER_SHRINKING
        return self.max_len * shrinking * max(map(len, self.tokenizer.get_vocab()), default=1)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, behind: Sequence[int] = ()) -> str:
        """Text of tokens; empty without a tokenizer. Spaces are left as the tokens have them.

        behind: the prompt's token ids, so that its text and this one together are the text of both.
        Raises: RequestError for ids that are none, and from a tokenizer that fails.
        """
        if self.tokenizer is None:
            return ""
        if behind and token_ids and (context := self.context(behind)):
            before = self.decode(context, skip_special_tokens=skip_special_tokens)
            return self.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)[len(before) :]
        with _DECODING:
            text: str = self.tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        return text

    def detokenizer(self, behind: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer | None:
        """A detokenizer for tokens that come one by one; None without a tokenizer. behind: see `decode`."""
        if self.tokenizer is None:
            return None
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        if self.joins_bytes:
            return Detokenizer(decode, self._byte_ids, self._texts[skip_special_tokens])
        return Detokenizer(decode, self._byte_ids, context=partial(self.context, behind))

    def context(self, prompt: Sequence[int]) -> Sequence[int]:
        """The prompt's last tokens, which decide how a decoder reads the tokens behind them: many strip the space that
        begins a text. Empty after a special token, where a text begins, and for decoders that only join bytes.
        """
        if self.joins_bytes:
            return ()
        # Bytes at the end are left out: they would become other characters together with bytes behind them.
        end = start = next((place for place in range(len(prompt), 0, -1) if prompt[place - 1] not in self._byte_ids), 0)
        while start and end - start < WINDOW and prompt[start - 1] not in self.special_ids:
            start -= 1
        characters = (prompt[-size:] for size in range(1, min(4, len(prompt) - end) + 1))
        whole = (one for one in characters if REPLACEMENT not in self.decode(one))
        return prompt[start:end] if start < end else next(whole, ())

    def text_within(self, token_id: int) -> str:
        """A token's text in the middle of a text, where no space is stripped; a special token's text as
        it is written.
        """
        return self.decode([token_id], skip_special_tokens=False, behind=self._word)

    @cached_property
    def _word(self) -> Sequence[int]:
        """A token to be put in front of others, for decoders that need it."""
        ids = () if self.joins_bytes else range(len(self.tokenizer))
        words = (one for one in ids if one not in self._byte_ids and one not in self.special_ids)
        return next(([one] for one in words if self.decode([one]).strip()), ())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of texts."""
        if self.tokenizer is None:
            return frozenset()
        named = getattr(self.tokenizer, "all_special_ids", ())
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset([*named, *(id_ for id_, token in added.items() if token.special)])

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether the tokenizer's decoder only joins the bytes of tokens."""
        decoder = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "decoder", None)
        return type(decoder).__name__ == "ByteLevel"

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        vocabulary = self.tokenizer.get_vocab()
        return frozenset(vocabulary[name] for name in names if name in vocabulary)

    def _chat(self, messages: Any) -> list[int]:
        text = self.render_chat(messages, add_generation_prompt=True)
        return self._tokenize(text, "a chat prompt", add_special_tokens=False)

    def render_chat(self, messages: Any, **options: Any) -> str:
        """Render a chat as the text that the model reads; options: keyword arguments of apply_chat_template.

        Raises: RequestError if there is no tokenizer or no chat template, or if the template refuses the messages.
        """
        tokenizer = self._needed("a chat prompt")
        if not tokenizer.chat_template:
            raise RequestError("the checkpoint's tokenizer has no chat template; pass a text or token ids")
        if self.max_len is not None and len(messages) > self.max_len:  # each takes a token or more, and time to render
            raise PromptTooLongError(
                f"the conversation has {len(messages)} messages, and there is room for {self.max_len} tokens; leave "
                "old ones out, or raise engine.max_model_len"
            )
        return rendered(tokenizer, messages, options)

    def _needed(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and the checkpoint has none; pass token ids, or start with "
                "model.tokenizer=FOLDER_OR_HUB_ID"
            )
        return self.tokenizer


def _no_unicode(text: str) -> str | None:
    """The error of a text that is not valid Unicode: half a surrogate pair, which Python makes of bytes that are not
    UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half a surrogate pair (U+{ord(text[error.start]):04X}), so it is no Unicode"
    return None


def is_chat(prompt: object) -> bool:
    """Whether a prompt is a conversation: a sequence of messages."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        return False
    return all(map(_is_message, prompt))


def prompt_size(prompt: object) -> int:
    """The size of a prompt: characters of a text or of all messages, else token ids; 0 for anything else."""
    if isinstance(prompt, Sequence) and is_chat(prompt):
        parts = (part for message in prompt for part in message.values())
        try:
            return sum(len(part if isinstance(part, str) else str(part)) for part in parts)
        except Exception as error:  # nested too deeply, for instance
            raise RequestError(f"the chat's messages cannot be read: {one_short_line(error)}") from None
    return len(prompt) if isinstance(prompt, Sized) else 0


def snapshot(prompt: Prompt) -> Prompt:
    """A copy of a prompt, which does not change with the caller's list or messages."""
    return deepcopy(prompt) if is_chat(prompt) else copy(prompt)


def as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, from a single prompt or several.

    Raises: RequestError for any other value, such as a mapping.
    """
    is_one = isinstance(prompts, str) or is_chat(prompts)
    is_ids = isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(item, int) for item in prompts)
    if is_one or is_ids:
        return [prompts]
    try:
        each = None if isinstance(prompts, _NO_PROMPTS) else iter(prompts)
    except TypeError:
        each = None
    if each is None:
        what = type(prompts).__name__
        raise RequestError(f"prompts are a text, token ids or chat messages, or a list of such, not {what}")
    return list(each)


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and "role" in item


def with_word_ids(params: SamplingParams, codec: Codec) -> SamplingParams:
    """Bad words as token ids: for each text, its tokens at the beginning of a text, and after a space.

    Tokenizers write the two with different tokens. The word is not found where it is divided into yet other tokens, as
    inside of a longer word.
    Raises: RequestError if there is no tokenizer, or for more token ids than SamplingParams allows.
    """
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for form in (word.lstrip(), f" {word.lstrip()}") if isinstance(word, str) else ():
            found[tuple(codec.encode_word(form))] = None
        if not isinstance(word, str):
            found[word] = None
    num_ids = sum(map(len, found))
    if len(found) > MAX_BAD_WORDS or num_ids > MAX_BAD_WORD_TOKEN_IDS:
        raise RequestError(
            f"sampling.bad_words: its {len(params.bad_words)} words are {len(found)} sequences with {num_ids} ids "
            f"(a text is two); at most {MAX_BAD_WORDS} sequences with {MAX_BAD_WORD_TOKEN_IDS} ids in all are allowed"
        )
    return replace(params, bad_words=tuple(found))


def takes_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether a request's texts may hold up an event loop for a millisecond or more, as a chat template always may."""
    is_long = prompt_size(prompt) >= LONG_PROMPT or sum(map(len, params.stop)) >= LONG_STOPS
    return is_long or sum(isinstance(word, str) for word in params.bad_words) >= LONG_BAD_WORDS or is_chat(prompt)


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
