"""Finds the transformers model of a config.json and checks that it can be served; unsupported ones are refused by name.

Runs no code from a checkpoint. `probe` finds out how such a model attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any, NoReturn

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING,
)

from hookline.core.errors import ConfigError, one_short_line, shown
from hookline.core.layers import ConfigValues
from hookline.plugins.models.transformers.alibi import MAX_POSITIONS
from hookline.plugins.models.transformers.text_part import TEXT_PART, TextWithHead, with_head

MODEL = "model=transformers"
"""The name of this option in messages."""
SIZES = {"num_hidden_layers": 1000, "num_attention_heads": 2**16, "hidden_size": 2**24, "vocab_size": 2**24}
"""Sizes that a config.json must state, with the largest value that is accepted."""
GUIDE = "it needs a model of its own: hookline info lists those installed, docs/plugins.md is the guide"
"""The advice for a model that is refused because of its computations."""
STATES = "carry a state from token to token which is not in transformers' cache of states, where core could keep it"
TEXT_MODEL = "_text_model"
"""Suffix of the model_type of a text part which transformers lists under the whole model's model_type alone."""
LAYER_TYPES = ("layer_types", "layers_block_type", "block_types")
"""Keys of a config.json that list the type of each layer."""
OWN_FORMS = (
    "indexed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
)
"""Values of `layer_types` that are not served, in transformers' words."""
WITHOUT_ATTENTION = ("mlp", "moe")
"""Values of `layer_types` that neither attend nor have a state."""
ALIBI = ("bloom", "mpt")
"""Model types whose attention adds ALiBi's biases; Falcon's config says it."""
MAX_THETA = 1e30
"""Bound of the base of rotary positions."""
MAX_SCALED = 2**24
"""Most tokens that a rotary embedding may be scaled to."""
UNLIMITED = 1 << 20
"""Longest sequence, in tokens, of a model whose config states no limit, e.g. of a model with states alone."""
CAUSAL = "ForCausalLM"
"""Suffix of architectures with a language-model head."""
GENERATES = "ForConditionalGeneration"
"""Suffix of classes that take images or sound and generate text."""
OFF = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")
"""Config values that ask a forward for results which the engine does not use, switched off."""


def read_config(hf_config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """transformers' config object and its causal language model's class.

    Raises: ConfigError, in one line, for whatever is no unquantised causal decoder of this version of transformers; it
            has all reasons that the config.json gives.
    """
    values = ConfigValues(hf_config, MODEL)
    config_class = _config_class(values)
    if hf_config.get("trust_remote_code"):
        values.refuse("trust_remote_code", "transformers' own models; code that comes with a checkpoint is never run")
    model_class = _causal_class(config_class)
    if model_class is None:
        values.refuse("model_type", "models that transformers has as a causal language model")
    values.refuse_quantised()
    faults = [*_faults(values, model_class), *_faults_of_layers(_stated_layers(values))]
    if not faults:
        for key, limit in SIZES.items():
            stated = key if key in hf_config else config_class.attribute_map.get(key, key)
            if stated in hf_config or not isinstance(getattr(config_class, stated, property()), property):
                values.size(stated, limit=limit)
        config = _built(values, config_class)
        faults += _faults_of_layers(set(getattr(config, "layer_types", None) or ()))
    if faults:
        refuse(config_class.model_type, "; ".join(faults), GUIDE)
    for key, value in values.values.items():
        if key.endswith(("_eps", "_epsilon")) and isinstance(value, int | float) and not 0 <= value <= 1:
            told = f"its {key} is {shown(value)}, which must be a number between 0 and 1"
            refuse(config_class.model_type, told, "correct its config.json")
    return config, model_class


def _faults(values: ConfigValues, model_class: type[PreTrainedModel]) -> Iterator[str]:
    """Features of the whole model in a config.json that are not served, as messages."""
    named = values.texts("architectures")
    if values.values.get("is_encoder_decoder"):
        yield "it is an encoder and a decoder (is_encoder_decoder), and only decoders are served"
    if named and model_class.__name__ not in named and not _means_same(named[0], model_class):
        yield f"its architecture is {shown(named[0])}, and only its {model_class.__name__} is served"
    if values.values.get("text_config"):
        yield "it is made of several models (text_config), and only a decoder is served"


def _means_same(architecture: str, model_class: type[PreTrainedModel]) -> bool:
    """Whether an architecture that a config.json names is this model under another name.

    It is one from before transformers had the model, as ExaoneForCausalLM of EXAONE 3, or that of a model whose text
    part this is.
    """
    is_older = architecture.endswith(CAUSAL) and not hasattr(transformers, architecture)
    return is_older or issubclass(model_class, TextWithHead)


def _faults_of_layers(kinds: set[str]) -> Iterator[str]:
    """Features of layers of these types that are not served, as messages."""
    if others := sorted(kinds.intersection(OWN_FORMS)):
        yield f"its layers of type {', '.join(others)} attend in a form of their own, neither fully nor in a window"


def _stated_layers(values: ConfigValues) -> set[str]:
    """The types of layers that a config.json lists; of the text model, if it is made of several models."""
    text = values.values.get("text_config")
    inner = ConfigValues(text, MODEL) if isinstance(text, Mapping) else values
    return {kind for key in LAYER_TYPES if isinstance(inner.values.get(key), list) for kind in inner.texts(key)}


def max_position(config: PreTrainedConfig, *, attends: bool = True) -> int:
    """Longest sequence, in tokens. attends: whether any layer does; if none, the config need not say it.

    Raises: ConfigError if the config does not say it, or scales it to a senseless one.
    """
    for settings in _rope_settings(config):
        theta = settings.get("rope_theta")
        if isinstance(theta, int | float) and not 1 < theta < MAX_THETA:
            told = f"rope_theta = {shown(theta)} must be a number above 1, below {MAX_THETA:g}"
            refuse(config.model_type, told, "correct its config.json")
        factor, original = settings.get("factor"), settings.get("original_max_position_embeddings")
        original = original or getattr(config, "max_position_embeddings", None) or 1
        if isinstance(factor, int | float) and not 0 < factor * original <= MAX_SCALED:
            told = f"rope scaling with factor = {shown(factor)} makes {shown(original)} tokens more than {MAX_SCALED}"
            refuse(config.model_type, told, "correct its config.json")
    limit = getattr(config, "max_target_positions", None if attends else UNLIMITED)
    if config.model_type in ALIBI:  # Bloom's config need not say a length
        limit = getattr(config, "max_seq_len", getattr(config, "seq_length", MAX_POSITIONS))
    limits: list[Any] = [getattr(config, "max_position_embeddings", limit)]
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        limits.append(MAX_POSITIONS)
    for limit in limits:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            refuse(config.model_type, f"its max_position_embeddings is {shown(limit)}, which must be a positive number")
    shortest: int = min(limits)
    return shortest


def original_length(config: PreTrainedConfig) -> int | None:
    """Tokens up to which the short factors of "longrope" are meant; None for other rotary embeddings."""
    kinds = [one for one in _rope_settings(config) if one.get("rope_type") == "longrope"]
    return min(filter(None, (one.get("original_max_position_embeddings") for one in kinds)), default=None)


def _rope_settings(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The rope parameters of all layers, or of each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [settings] if "rope_type" in settings else [one for one in settings.values() if isinstance(one, dict)]


def refuse(model_type: str, why: str, fix: str = "") -> NoReturn:
    """Raise a ConfigError that says which model is not served, why, and the fix."""
    end = f"; {fix}" if fix else ""
    raise ConfigError(f"{MODEL} cannot serve model_type {shown(model_type)}: {why}{end}")


def _config_class(values: ConfigValues) -> type[PreTrainedConfig]:
    model_type = values.values.get("model_type")
    if isinstance(model_type, str) and (part := _part_config(model_type)) is not None:
        return part
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        known = f"model types that transformers {transformers.__version__} knows; a newer one may know more"
        remote = "; code that comes with a checkpoint (auto_map) is never run" if "auto_map" in values.values else ""
        values.refuse("model_type", known + remote)
    found = CONFIG_MAPPING[model_type]
    text = found.sub_configs.get("text_config")
    # The first checkpoints of Qwen2-VL have the language model's values beside the tower's config.
    is_text = text is not None and "num_hidden_layers" in values.values and "text_config" not in values.values
    return text if is_text and getattr(text, "model_type", "") in CONFIG_MAPPING else found


def _part_config(model_type: str) -> type[PreTrainedConfig] | None:
    """The config of a text part that transformers lists under the whole model's type alone, as Emu3's."""
    whole = model_type.removesuffix(TEXT_MODEL)
    if whole == model_type or model_type in CONFIG_MAPPING or whole not in CONFIG_MAPPING:
        return None
    text: type[PreTrainedConfig] | None = CONFIG_MAPPING[whole].sub_configs.get("text_config")
    return text if text is not None and text.model_type == model_type else None


def _causal_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """transformers' causal language model of a config; of the text part of a model that also sees, one made here."""
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        causal: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
        return causal
    named = config_class.model_type.removesuffix(TEXT_MODEL)
    if named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and named != config_class.model_type:
        of_whole: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[named]]
        return of_whole if of_whole.config_class is config_class else None
    whole = config_class.model_type.removesuffix(TEXT_PART)
    is_part = whole != config_class.model_type and whole in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    is_listed = config_class in MODEL_MAPPING
    body: Any = MODEL_MAPPING[config_class] if is_listed else _listed_nowhere(config_class)
    return with_head(body) if body is not None and (is_part or not is_listed) else None


def _listed_nowhere(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    """The body of a text part that transformers has beside the whole model and lists nowhere, as Qwen-Omni's."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    if name == config_class.__module__ or not name.startswith("transformers."):
        return None
    try:
        beside = vars(import_module(name)).values()
    except ImportError:
        return None
    classes: Any = [one for one in beside if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    writes = any(one.__name__.endswith(GENERATES) for one in classes)
    own = [one for one in classes if one.config_class is config_class and one.__name__.endswith("TextModel") and writes]
    return own[0] if own else None


def _built(values: ConfigValues, config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    plain = {key: value for key, value in values.values.items() if "attn_implementation" not in key}
    try:
        config = config_class.from_dict(config_class._decode_special_floats(deepcopy(plain)))
    except Exception as error:
        refuse(config_class.model_type, f"its config.json is not valid: {one_short_line(error)}")
    for key in OFF:
        if hasattr(config, key):
            setattr(config, key, False)
    return config
