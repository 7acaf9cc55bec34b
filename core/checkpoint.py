"""Where a checkpoint comes from: a local folder, the Hugging Face hub, or a folder shipped in a Python package.

Reads config.json and generation_config.json; knows nothing of tensors or models, and runs no code from a checkpoint.
Hub and tokenizer libraries are imported only when they are needed.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.contracts import ModelConfig
from core.errors import CheckpointError, ConfigError

PACKAGE = "package:"
"""Prefix of a reference to a folder inside a Python package: package:MODULE/FOLDER."""
WEIGHTS = ("checkpoint", "random")
"""The values of model.weights."""
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Checkpoint:
    """A model at hand: its config and, unless it is random without one, its folder.

    folder: None if only a shape is known (weights=random). eos_token_ids: empty if the checkpoint names none.
    """

    reference: str
    folder: Path | None
    config: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_packaged(self) -> bool:
        """True if it came inside a Python package."""
        return self.reference.startswith(PACKAGE)


def resolve_model(model: ModelConfig) -> Checkpoint:
    """The checkpoint a model option asks for, real or random, with hf_overrides laid over its config.

    Raises: CheckpointError if it cannot be had; ConfigError for an unknown model.weights.
    """
    if model.weights not in WEIGHTS:
        raise ConfigError(f"model.weights is '{model.weights}'; it must be one of: {', '.join(WEIGHTS)}")
    return resolve_random(model) if model.weights == "random" else resolve(model.checkpoint, model.hf_overrides)


def resolve(reference: str, hf_overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Find a checkpoint, downloading from the hub if it must, and read its config.

    Raises: CheckpointError with what was tried and the fix.
    """
    return _read(reference, locate(reference), hf_overrides or {})


def resolve_random(model: ModelConfig) -> Checkpoint:
    """Only the config, for random weights, without the network: the folder's, the hub cache's, else random_shape.

    Raises: CheckpointError if none of them is there.
    """
    folder = _cached_on_disk(model.checkpoint) if is_hub_id(model.checkpoint) else None
    if model.checkpoint and not is_hub_id(model.checkpoint):
        folder = locate(model.checkpoint)
    if folder is not None:
        return _read(model.checkpoint, folder, model.hf_overrides)
    if not model.random_shape:
        raise CheckpointError(
            f"weights=random needs a config.json, and '{model.checkpoint}' is neither a local folder nor in the hub "
            "cache; set model.checkpoint to a folder, or model.random_shape to the config's values"
        )
    config = merge(model.random_shape, model.hf_overrides)
    return Checkpoint(model.checkpoint, None, config, _token_ids(config.get("eos_token_id"), "model.random_shape"))


def locate(reference: str) -> Path:
    """The folder of a reference; a hub id is downloaded unless it is in the cache.

    Raises: CheckpointError with what was tried and the fix.
    """
    if reference.startswith(PACKAGE):
        return _packaged(reference)
    folder = Path(reference).expanduser()
    if reference and folder.is_dir():
        return folder
    if is_hub_id(reference):
        return _download(reference)
    what = "is a file" if reference and folder.is_file() else "does not exist"
    raise CheckpointError(
        f"model.checkpoint '{reference}' {what}; give a folder with config.json and *.safetensors, a hub id "
        "(owner/name) or package:MODULE/FOLDER"
    )


def is_hub_id(reference: str) -> bool:
    """True for owner/name unless that is a folder here."""
    return _HUB_ID.fullmatch(reference) is not None and not Path(reference).is_dir()


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` laid over `base`; mappings on both sides are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer (transformers), or None if it has no tokenizer files. Reads the folder alone.

    Raises: CheckpointError if the files are there and cannot be used.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return _tokenizer_class(folder).from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer costs another second of imports, and tokenizer.json says all it would find out."""
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _packaged(reference: str) -> Path:
    module, _, inside = reference.removeprefix(PACKAGE).partition("/")
    try:
        folder = Path(str(importlib.resources.files(module))) / inside
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointError(f"'{reference}': package '{module}' cannot be found ({error}); install it") from error
    if not inside or not folder.is_dir():
        raise CheckpointError(
            f"'{reference}': package '{module}' has no folder '{inside}'; expected package:MODULE/FOLDER"
        )
    return folder


def _download(reference: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        # Subfolders hold other formats of the same weights.
        return Path(snapshot_download(reference, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:
        raise CheckpointError(
            f"checkpoint '{reference}' is no local folder, and the Hugging Face hub and its cache do not give it "
            f"({_first_line(error)}); pass a local folder: model.checkpoint=/path/to/folder"
        ) from error


def _cached_on_disk(reference: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    config = try_to_load_from_cache(reference, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _read(reference: str, folder: Path, hf_overrides: Mapping[str, Any]) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, so it is no checkpoint; give the folder that holds one")
    config = merge(_json(folder / "config.json"), hf_overrides)
    generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    # What the user overrides wins; then the generation config, which lists every token that ends an answer.
    value = hf_overrides.get("eos_token_id", generation.get("eos_token_id"))
    ids = _token_ids(config.get("eos_token_id") if value is None else value, str(folder))
    return Checkpoint(reference, folder, config, ids)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); download or copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; download or copy it again")
    return value


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(not isinstance(token_id, int) or isinstance(token_id, bool) for token_id in ids):
        raise CheckpointError(f"eos_token_id of {where} is {value!r}; it must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
