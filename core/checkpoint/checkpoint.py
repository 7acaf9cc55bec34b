"""A checkpoint as it was found: its folder, config, end-of-text tokens and tokenizer.

Reads config.json and generation_config.json, and runs no code from a checkpoint. core/checkpoint/locate.py finds the
folder, core/checkpoint/load.py reads the tensors. The tokenizer's library is imported only when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hookline.core.checkpoint.file_tokenizer import file_tokenizer, tokenizer_eos
from hookline.core.checkpoint.files import open_source
from hookline.core.checkpoint.locate import PACKAGE, cached_on_disk, first_line, is_hub_id, locate
from hookline.core.checkpoint.safetensors_files import (
    QUANTISED,
    QUANTISED_FILES,
    StoredTensor,
    check_regular,
    other_form,
    renamed,
    stored_tensors,
)
from hookline.core.checkpoint.tokenizer_growth import check_file
from hookline.core.checkpoint.wrapped import OF_WHOLE, language_model, name_inside
from hookline.core.contracts import CheckpointSource, ModelConfig
from hookline.core.errors import CheckpointError, ConfigError, RequestError, shown
from hookline.core.plugin.host import PluginHost
from hookline.core.sampling_params import generation_defaults
from hookline.core.util.json_lines import json_fault
from hookline.core.util.mappings import merge
from hookline.core.util.raising import Raising

WEIGHTS = ("checkpoint", "random")
"""The values of model.weights."""
MAX_DEPTH = 64
"""Most levels of nesting in a JSON file, since code that reads a config may recurse."""
MAX_TOKEN_ID = 2**31 - 1
"""Largest end-of-text token. Some configs name one beyond the vocabulary, which is never drawn."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_BESIDE_TOKENIZERS = ("merges.txt", "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Checkpoint:
    """A model's checkpoint that was found: its config and, unless weights are random without a folder, its folder.

    folder: None if only a shape is known (weights=random), or if the model class opened the source. With a file's
    source, the folder of that file, which may hold a tokenizer.
    eos_token_ids: empty if the checkpoint names none. tokenizer_eos: the tokenizer's own end-of-sequence token and its
    id, if neither config names it: it is among eos_token_ids, too.
    """

    reference: str
    folder: Path | None
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that its generation_config.json recommends."""
    source: CheckpointSource | None = None
    tokenizer_eos: tuple[str, int] | None = None
    wrapper: tuple[str, ...] | None = None
    """Architectures of the whole checkpoint, if config and tensors are of the language model inside it; else None."""
    quantization: Mapping[str, Any] | None = None
    """Its quantization_config, with a quant_method; `config` is without it."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor, by its name; empty without a folder and a source.

        Raises: CheckpointError if they cannot be read.
        """
        if self.source is not None:
            return self.source.shapes()
        return {name: one.shape for name, one in self.stored.items()}

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        """The tensors of the folder's safetensors, by name; read once. Empty without a folder, and with a source.

        Raises: CheckpointError if they cannot be read.
        """
        if self.folder is None or self.source is not None:
            return {}
        found = stored_tensors(self.folder, may_be_quantised=True)
        if self.wrapper is None:
            return found
        return renamed(self.folder, found, name_inside(found, _json(self.folder / "config.json").get("model_type")))

    @property
    def is_packaged(self) -> bool:
        """True if it is a folder that came inside a Python package."""
        return self.folder is not None and self.reference.startswith(PACKAGE)


def resolve_model(model: ModelConfig, model_class: Any = None, host: PluginHost | None = None) -> Checkpoint:
    """The checkpoint of a model option, real or random, with hf_overrides merged into its config.

    model_class, host: a model class or a quantization of the host may open the checkpoint; see
    `core.contracts.OpensCheckpoint`.
    Raises: CheckpointError if it cannot be found or read; ConfigError for an unknown model.weights.
    """
    if model.weights not in WEIGHTS:
        raise ConfigError(f"model.weights is '{model.weights}'; it must be one of: {', '.join(WEIGHTS)}")
    opened = open_source(model, model_class, host)
    if opened is not None:
        return _with_tokenizers_eos(_of_source(model, *opened), model)
    found = resolve_random(model) if model.weights == "random" else resolve(model.checkpoint, model.hf_overrides)
    return _with_tokenizers_eos(found, model)


def _with_tokenizers_eos(checkpoint: Checkpoint, model: ModelConfig) -> Checkpoint:
    """Chat models often name the end of a turn in the tokenizer alone; their config.json is the base model's."""
    folder = locate(model.tokenizer) if model.tokenizer else checkpoint.folder
    if folder is not None:
        _check_tokenizer_files(folder)
    eos = None if folder is None or "eos_token_id" in model.hf_overrides else tokenizer_eos(folder)
    if eos is None or eos[1] in checkpoint.eos_token_ids:
        return checkpoint
    return replace(checkpoint, eos_token_ids=(*checkpoint.eos_token_ids, eos[1]), tokenizer_eos=eos)


def resolve(reference: str, hf_overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Find a checkpoint, downloading it from the hub if necessary, and read its config.

    Raises: CheckpointError with the places that were tried and the fix.
    """
    return _read(reference, locate(reference), hf_overrides or {})


def resolve_random(model: ModelConfig) -> Checkpoint:
    """Only the config, for random weights, without the network: the folder's, the hub cache's, else random_shape.

    Raises: CheckpointError if none of them is there.
    """
    folder = cached_on_disk(model.checkpoint) if is_hub_id(model.checkpoint) else None
    if model.checkpoint and not is_hub_id(model.checkpoint):
        folder = locate(model.checkpoint)
    if folder is not None:
        return _read(model.checkpoint, folder, model.hf_overrides)
    if not model.random_shape:
        raise CheckpointError(
            f"weights=random needs a config.json, and '{model.checkpoint}' is neither a local folder nor in the hub "
            "cache; set model.checkpoint to a folder, or model.random_shape to the config's values"
        )
    config, wrapper = _read_inside(model.random_shape, model.hf_overrides)
    config, quantization = _split_quantization(config, None)
    ids = _token_ids(config.get("eos_token_id"), "model.random_shape")
    return Checkpoint(model.checkpoint, None, config, ids, wrapper=wrapper, quantization=quantization)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, with transformers' methods, or None if it has no tokenizer files. Reads the folder alone.

    Raises: CheckpointError if the files are there and cannot be used.
    """
    _check_tokenizer_files(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    for name in _TOKENIZER_CONFIGS:
        if (folder / name).is_file():
            _json(folder / name)  # its error names the file, which that of the tokenizer's library does not

    def fault(error: BaseException) -> CheckpointError | None:
        told = f"the tokenizer in {folder} cannot be loaded: {first_line(error)}"
        return None if isinstance(error, CheckpointError) else CheckpointError(told)

    with Raising(fault):  # tokenizers panics with an error that is no Exception
        is_one_file = (folder / "tokenizer.json").is_file()
        if is_one_file:
            check_file((folder / "tokenizer.json").read_bytes())
        found = file_tokenizer(folder) if is_one_file else None
        return _tokenizer_of_transformers(folder) if found is None else found


def _check_tokenizer_files(folder: Path) -> None:
    for name in (*_TOKENIZER_FILES, *_TOKENIZER_CONFIGS, *_BESIDE_TOKENIZERS):
        check_regular(folder / name)


def _tokenizer_of_transformers(folder: Path) -> Any:
    """With a tokenizer.json, not by AutoTokenizer, which takes another second of imports and gives the same result."""
    is_one_file = (folder / "tokenizer.json").is_file()
    if not is_one_file and _needs_sentencepiece(folder):
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and its tokenizer.model needs a package that is not installed: pip "
            "install sentencepiece protobuf, or put the tokenizer.json beside it that AutoTokenizer's save_pretrained "
            "writes"
        )
    import transformers

    cls: Any = transformers.PreTrainedTokenizerFast if is_one_file else transformers.AutoTokenizer
    return cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _needs_sentencepiece(folder: Path) -> bool:
    """Whether its tokenizer.model is one of SentencePiece's, and their library is not installed."""
    path = folder / "tokenizer.model"
    if not path.is_file() or find_spec("sentencepiece") is not None:
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\n"  # the first field of its protobuf; tiktoken's files are text


def _read(reference: str, folder: Path, hf_overrides: Mapping[str, Any]) -> Checkpoint:
    for name in ("config.json", "generation_config.json"):
        check_regular(folder / name)
    if not (folder / "config.json").is_file():
        what = other_form(folder) or "has no config.json, so it is no checkpoint; give the folder that holds one"
        raise CheckpointError(f"{folder} {what}")
    config, wrapper = _read_inside(_json(folder / "config.json"), hf_overrides)
    config, quantization = _split_quantization(config, folder)
    generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    # The user's override first; then the generation config, which lists every token that ends an answer.
    value = hf_overrides.get("eos_token_id", generation.get("eos_token_id"))
    ids = _token_ids(config.get("eos_token_id") if value is None else value, str(folder))
    try:
        defaults = generation_defaults(generation, f"{folder / 'generation_config.json'}")
    except RequestError as error:
        raise CheckpointError(f"{error}; correct the file, or remove it") from error
    return Checkpoint(reference, folder, config, ids, defaults, wrapper=wrapper, quantization=quantization)


def _read_inside(
    config: Mapping[str, Any], hf_overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """The config of the language model, with overrides merged into it, and Checkpoint.wrapper.

    Overrides may name the language model's values with or without the key of its config, e.g. text_config.
    """
    whole = merge(config, hf_overrides)
    inner = language_model(whole)
    if inner is None:
        return whole, None
    named = whole.get("architectures")
    wrapper = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    return merge(inner, {key: hf_overrides[key] for key in hf_overrides if key not in OF_WHOLE}), tuple(wrapper)


def _split_quantization(config: dict[str, Any], folder: Path | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A config.json without its quantization_config, and that: under any of the keys of QUANTISED, or in one of
    QUANTISED_FILES beside it.
    """
    stated = next((config[key] for key in QUANTISED if config.get(key)), None)
    paths = [] if stated is not None or folder is None else [folder / name for name in QUANTISED_FILES]
    path = next((one for one in paths if one.is_file()), None)
    if path is not None:
        found = _json(path)
        producer = found.get("producer")
        name = producer.get("name") if isinstance(producer, Mapping) else None
        stated = {"quant_method": name or path.name, **found}
    plain = {key: value for key, value in config.items() if key not in QUANTISED}
    if stated is None:
        return plain, None
    return plain, dict(stated) if isinstance(stated, Mapping) else {"quant_method": "unknown", "stated": stated}


def _of_source(model: ModelConfig, source: CheckpointSource, folder: Path | None) -> Checkpoint:
    config, quantization = _split_quantization(merge(source.config(), model.hf_overrides), None)
    ids = _token_ids(config.get("eos_token_id"), model.checkpoint)
    return Checkpoint(model.checkpoint, folder, config, ids, source=source, quantization=quantization)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not readable JSON ({json_fault(error)}); download or copy it again"
        ) from error
    if _is_deep(value):
        raise CheckpointError(f"{path} is nested more than {MAX_DEPTH} levels deep; download or copy it again")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; download or copy it again")
    return value


def _constant(name: str) -> float:
    """Infinity, which some configs have as a bound; not NaN, with which no model computes anything."""
    if name == "NaN":
        raise ValueError("NaN is among its values")
    return float(name)


def _is_deep(value: Any) -> bool:
    """Whether a JSON value is nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        items = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [item for one in items for item in one]
    return bool(level)


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(not isinstance(one, int) or isinstance(one, bool) or not 0 <= one <= MAX_TOKEN_ID for one in ids):
        raise CheckpointError(f"eos_token_id of {where} is {shown(value)}; it must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))
