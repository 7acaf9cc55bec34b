"""A tokenizer that is read by the library `tokenizers` alone, for checkpoints whose files mean the same with and
without transformers.

Importing transformers takes seconds of a start, and encoding and decoding do not need it. It is imported when a chat
template, or another attribute of transformers' tokenizers, is first used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_HARMLESS = frozenset(
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens auto_map backend "
    "chat_template clean_up_tokenization_spaces do_lower_case errors extra_special_tokens is_local legacy "
    "local_files_only max_length model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_type_id "
    "padding_side processor_class sp_model_kwargs spaces_between_special_tokens split_special_tokens stride "
    "tokenizer_class truncation_side truncation_strategy use_default_system_prompt".split()
)
"""Keys of tokenizer_config.json that are handled here or have no effect. Further keys name special tokens."""
_NAMED = tuple(f"{what}_token" for what in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_ALSO_READ = ("special_tokens_map.json", "added_tokens.json")
"""Files that transformers also reads, unless tokenizer_config.json lists the added tokens."""
_FLAGS = frozenset(("content", "single_word", "lstrip", "rstrip", "normalized", "special"))
"""Fields of an added token. The library prints unknown fields to standard output and ignores them."""
_IMPORTING = threading.Lock()
LONG = 4000
"""Characters or tokens from which on a text is handled as a batch of one. The library releases the interpreter's lock
only for batches; otherwise a long text would stop all threads of the process, including the server's event loop."""
MANY_TOKENS = 100_000
"""Number of tokens from which on transformers corrects the text splitting of some of Mistral's tokenizers."""


class FileTokenizer:
    """A tokenizer with the methods that the engine needs, which return the same as transformers'
    PreTrainedTokenizerFast of the same folder. All other attributes are read from that tokenizer, which is then
    imported. chat_template: the text of the template, or None.
    """

    def __init__(
        self, folder: Path, backend: Tokenizer, named: Mapping[str, str | None], chat_template: str | None
    ) -> None:
        self._folder, self._named = folder, named
        self._in_full: Any = None
        self.backend_tokenizer, self.chat_template = backend, chat_template

    @property
    def in_full(self) -> Any:
        """The same tokenizer of transformers, which one thread imports: the import is not safe in two
        threads at once.
        """
        with _IMPORTING:
            if self._in_full is None:
                from transformers import PreTrainedTokenizerFast

                options: Any = {"local_files_only": True, "trust_remote_code": False}
                self._in_full = PreTrainedTokenizerFast.from_pretrained(str(self._folder), **options)
        return self._in_full

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no state yet
            raise AttributeError(name)
        if name in self._named:
            return self._named[name]
        if name.endswith("_id") and name[:-3] in self._named:
            text = self._named[name[:-3]]
            return None if text is None else self.backend_tokenizer.token_to_id(text)
        return getattr(self.in_full, name)

    @property
    def apply_chat_template(self) -> Any:
        """Transformers' method, with the chat template that is set here."""
        self.in_full.chat_template = self.chat_template
        return self.in_full.apply_chat_template

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """See transformers."""
        return self.in_full(*arguments, **options)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. split_special_tokens: read special tokens in it as text."""
        if self.backend_tokenizer.encode_special_tokens != split_special_tokens:
            self.backend_tokenizer.encode_special_tokens = split_special_tokens
        if len(text) >= LONG:
            (found,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            found = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Text of tokens."""
        if clean_up_tokenization_spaces is not False:
            options = {"clean_up_tokenization_spaces": clean_up_tokenization_spaces}
            return str(self.in_full.decode(token_ids, skip_special_tokens=skip_special_tokens, **options))
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if len(ids) < LONG:
            return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        (text,) = self.backend_tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def get_vocab(self) -> dict[str, int]:
        """All tokens with their ids."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that the configuration names; further special tokens are flagged as such."""
        found = map(self.backend_tokenizer.token_to_id, filter(None, self._named.values()))
        return [id_ for id_ in found if id_ is not None]

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the added tokens, in their order."""
        return {token.content: id_ for id_, token in sorted(self.added_tokens_decoder.items())}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The token of an id, or the tokens of several ids."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(one)) for one in ids]


def file_tokenizer(folder: Path) -> FileTokenizer | None:
    """The folder's tokenizer; None if transformers would read something from the files that is not in tokenizer.json.

    Raises: the errors of reading the files.
    """
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    if not isinstance(config, dict) or not _is_plain(folder, config):
        return None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = dict.fromkeys(_NAMED) | {key: _content(value) for key, value in config.items() if _names_token(key, value)}
    if not _says_all(backend, config, folder):
        return None
    return FileTokenizer(folder, backend, named, _chat_template(folder, config))


def tokenizer_eos(folder: Path) -> tuple[str, int] | None:
    """The end-of-sequence token of a folder's tokenizer and its id; None if its files do not have both. Reads only the
    list of added tokens: parsing the whole tokenizer.json takes a second.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        eos = config.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        added = {one["content"]: int(id_) for id_, one in (config.get("added_tokens_decoder") or {}).items()}
        if isinstance(eos, str) and eos not in added:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            start = text.index("[", text.index('"added_tokens"'))
            added = {one["content"]: int(one["id"]) for one in json.JSONDecoder().raw_decode(text, start)[0]}
        return (eos, added[eos]) if isinstance(eos, str) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # loading the tokenizer reports the error


def _is_plain(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json and the keys handled here fully describe the tokenizer."""
    if not all(key in _HARMLESS or _names_token(key, value) for key, value in config.items()) or config.get(
        "split_special_tokens"
    ):
        return False
    if "added_tokens_decoder" not in config and any((folder / name).exists() for name in _ALSO_READ):
        return False
    is_one_template = isinstance(config.get("chat_template"), str | None)
    return is_one_template and not (folder / "additional_chat_templates").exists()


def _says_all(backend: Tokenizer, config: Mapping[str, Any], folder: Path) -> bool:
    """Whether tokenizer.json has all added tokens of its config, and no other setting changes how text is split."""
    if backend.truncation is not None or backend.padding is not None or backend.encode_special_tokens:
        return False
    if backend.get_vocab_size() > MANY_TOKENS and _may_be_mistral(folder):
        return False
    adds_space = config.get("add_prefix_space")
    if adds_space is not None and f"add_prefix_space={not adds_space}" in str(backend.pre_tokenizer):
        return False
    added = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    if any(repr(added.get(int(id_))) != repr(_added_token(one)) for id_, one in listed.items()):
        return False
    contents = {token.content for token in added.values()}
    return all(one in contents for one in _special_tokens(config) if one is not None)


def _added_token(flags: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{name: value for name, value in flags.items() if name in _FLAGS})


def _special_tokens(config: Mapping[str, Any]) -> Iterable[str | None]:
    yield from (_content(value) for key, value in config.items() if _names_token(key, value))
    for key in ("additional_special_tokens", "extra_special_tokens"):
        several = config.get(key) or []
        yield from map(_content, several.values() if isinstance(several, dict) else several)


def _names_token(key: str, value: Any) -> bool:
    return key.endswith("_token") and not isinstance(value, bool)  # add_bos_token


def _content(value: Any) -> str | None:
    """The text of a token that may be written with its flags; for values of other types their repr,
    which is no token.
    """
    text = value.get("content") if isinstance(value, dict) and value.get("__type") == "AddedToken" else value
    return text if isinstance(text, str | None) else repr(text)


def _may_be_mistral(folder: Path) -> bool:
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return not isinstance(config, dict) or "tral" in str(config.get("model_type", "tral" if config else ""))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    return path.read_text(encoding="utf-8-sig") if path.is_file() else config.get("chat_template")
