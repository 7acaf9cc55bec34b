"""Extracts the config and the tensors of the language model from a checkpoint that also has towers for images or sound.

Such a checkpoint keeps the language model's config beside its towers' configs, and its tensors under a prefix. All
parts outside of the language model (towers, projectors, layers that draft tokens) are left out. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hookline.core.checkpoint.safetensors_files import QUANTISED

TEXT = ("text_config", "llm_config", "language_config")
"""Keys of a config.json under which the language model's own config is."""
THINKER = "thinker"
"""The name of the language model in Qwen's Omni models, in its config's key and as a prefix of its tensors' names."""
TOWERS = ("vision_config", "audio_config")
"""Keys of towers' configs in a config.json with the language model's values at its top, as Qwen2-VL's first ones."""
OF_WHOLE = (*TEXT, *TOWERS, "architectures", "model_type")
"""Keys whose values in the whole checkpoint's config are not the language model's."""
OF_BOTH = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", *QUANTISED)
"""Keys that the language model takes from the whole checkpoint's config, unless its own config has them."""
SIZES = ("hidden_size", "num_hidden_layers")
"""Sizes that a language model's config leaves out if they are the defaults of its class, as in LLaVA 1.5."""
BOTH_WAYS = ("paligemma",)
"""Model types whose language model attends to later tokens of a prompt, although its own config does not say so."""
TIED = "tie_word_embeddings"
_BODY = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?(.+)")
_ALONE = ("model.", "lm_head.", "score.")
"""Prefixes of the language model's tensor names in a checkpoint with towers whose tensors have no further prefix."""


def language_model(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the language model inside a checkpoint with towers; None if the checkpoint is a language model.

    As in transformers, the whole checkpoint's config says whether the head is tied, if it says so.
    """
    thinker = config.get(f"{THINKER}_config")
    if isinstance(thinker, Mapping):
        return language_model({**{key: config[key] for key in OF_BOTH if config.get(key) is not None}, **thinker})
    inner = next((config[key] for key in TEXT if isinstance(config.get(key), Mapping)), None)
    if inner is not None:
        found = {**{key: config[key] for key in OF_BOTH if config.get(key) is not None}, **_with_sizes(inner)}
        if config.get("model_type") in BOTH_WAYS:
            found.setdefault("use_bidirectional_attention", True)  # as transformers' class does; the files lack it
        return {**found, TIED: config[TIED]} if isinstance(config.get(TIED), bool) else found
    if "num_hidden_layers" in config and any(isinstance(config.get(key), Mapping) for key in TOWERS):
        return {key: value for key, value in config.items() if key not in (*TOWERS, "architectures")}
    return None


def causal_architecture(config: Mapping[str, Any]) -> str | None:
    """Transformers' architecture of the language model with this model_type; None if unknown or not installed."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names
    except ImportError:
        return None
    found = names.get(str(config.get("model_type")))
    return found if isinstance(found, str) else None


def name_inside(stored: Iterable[str], model_type: object = None) -> Callable[[str], str | None]:
    """A function: name of a stored tensor -> its name in the language model; None if it belongs to another part.

    Prefixes: model.language_model., language_model.model., the same with text_model, or none; each may follow thinker.
    model_type: of the whole checkpoint; its tensors are first renamed as transformers renames them when it loads such a
    checkpoint, if transformers is installed.
    """
    now = _renaming(model_type)

    def alone(old: str) -> str:
        return now(old).removeprefix(f"{THINKER}.")

    has_prefix = any(_BODY.fullmatch(alone(name)) for name in stored)

    def inside(old: str) -> str | None:
        name = alone(old)
        if not has_prefix or name.startswith(_ALONE[1:]):
            return name if name.startswith(_ALONE) else None
        found = _BODY.fullmatch(name)
        if found is None:
            return None
        is_body = found[1] or found[3]
        return f"model.{found[4]}" if is_body else found[4]

    return inside


def _renaming(model_type: object) -> Callable[[str], str]:
    """A function: a tensor's name in files of this model type -> its name in transformers."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:
        return str
    mapping: Any = get_checkpoint_conversion_mapping  # it has no types
    changes = (mapping(model_type) if isinstance(model_type, str) else None) or []
    renamings: Any = [one for one in changes if not isinstance(one, WeightConverter)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def _with_sizes(inner: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the defaults of transformers' class, if it leaves out sizes and the class is known."""
    if all(key in inner for key in SIZES):
        return inner
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return inner
    model_type = inner.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return inner
    try:
        full: dict[str, Any] = CONFIG_MAPPING[model_type].from_dict(dict(inner)).to_dict()
    except Exception:  # the model that reads the values reports the error
        return inner
    return full
