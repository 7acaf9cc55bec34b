"""Which of transformers' models a config.json names, and whether it can be served; what cannot is refused by name.

Runs no code from a checkpoint. `probe` finds out how such a model attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NoReturn

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hookline.core.errors import ConfigError, one_short_line, shown
from hookline.core.layers import ConfigValues

MODEL = "model=transformers"
"""What messages call this option."""
SIZES = {"num_hidden_layers": 1000, "num_attention_heads": 2**16, "hidden_size": 2**24, "vocab_size": 2**24}
"""Sizes that a config.json must state, with the largest value that is accepted."""
STATES = (
    "its layers carry a state from token to token, as Mamba's do, and only layers that attend to earlier tokens are "
    "served; it needs a model of its own: hookline info lists those installed, docs/plugins.md is the guide"
)
OFF = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")
"""Config values that ask a forward for results which the engine does not use, switched off."""


def read_config(hf_config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """transformers' config object and its causal language model's class.

    Raises: ConfigError, in one line, for whatever is no unquantised causal decoder of this version of transformers.
    """
    values = ConfigValues(hf_config, MODEL)
    config_class = _config_class(values)
    if hf_config.get("quantization_config"):
        values.refuse("quantization_config", "unquantised checkpoints")
    if hf_config.get("is_encoder_decoder"):
        values.refuse("is_encoder_decoder", "decoders alone")
    if hf_config.get("trust_remote_code"):
        values.refuse("trust_remote_code", "transformers' own models; code that comes with a checkpoint is never run")
    values.only("alibi", False)
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        values.refuse("model_type", "models that transformers has as a causal language model")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    named = values.texts("architectures")
    if named and model_class.__name__ not in named:
        values.refuse("architectures", model_class.__name__)
    if hf_config.get("text_config"):
        refuse(config_class.model_type, "it is made of several models (text_config), and only a decoder is served")
    if getattr(model_class, "_is_stateful", False):
        refuse(config_class.model_type, STATES)
    for key, limit in SIZES.items():
        stated = key if key in hf_config else config_class.attribute_map.get(key, key)
        values.size(stated, limit=limit)
    return _built(values, config_class), model_class


def max_position(config: PreTrainedConfig) -> int:
    """Longest sequence, in tokens.

    Raises: ConfigError if the config does not say it.
    """
    limits: list[Any] = [getattr(config, "max_position_embeddings", None)]
    for settings in filter(is_longrope, rope_settings(config)):
        original = getattr(config, "original_max_position_embeddings", limits[0])
        limits.append(settings.get("original_max_position_embeddings") or original)
    for limit in limits:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            refuse(config.model_type, f"its max_position_embeddings is {shown(limit)}, which must be a positive number")
    shortest: int = min(limits)
    return shortest


def rope_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings of a config: one for all layers, or one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [one for one in settings.values() if isinstance(one, dict)]


def is_longrope(settings: Mapping[str, Any]) -> bool:
    """Whether the frequencies of all positions change as soon as a sequence is longer than the original limit."""
    return settings.get("rope_type") == "longrope"


def refuse(model_type: str, why: str) -> NoReturn:
    """Raise ConfigError: which model is not served, and why."""
    raise ConfigError(f"{MODEL} cannot serve model_type {shown(model_type)}: {why}")


def _config_class(values: ConfigValues) -> type[PreTrainedConfig]:
    model_type = values.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        known = f"model types that transformers {transformers.__version__} knows"
        remote = "; code that comes with a checkpoint (auto_map) is never run" if "auto_map" in values.values else ""
        values.refuse("model_type", known + remote)
    return CONFIG_MAPPING[model_type]


def _built(values: ConfigValues, config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    plain = {key: value for key, value in values.values.items() if "attn_implementation" not in key}
    try:
        config = config_class.from_dict(deepcopy(plain))
    except Exception as error:
        refuse(config_class.model_type, f"its config.json is not valid: {one_short_line(error)}")
    for key in OFF:
        if hasattr(config, key):
            setattr(config, key, False)
    return config
