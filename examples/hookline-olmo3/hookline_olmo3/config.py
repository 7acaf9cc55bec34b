"""OLMo 3's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Knows nothing of tensors. Defaults are those of transformers' Olmo3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hookline.core.contracts import FullAttention, LayerCache, SlidingWindow
from hookline.core.errors import ConfigError, shown
from hookline.core.layers import RopeSettings, rope_settings

MAX_SIZE, MAX_LAYERS = 2**24, 10_000
"""A larger number is a broken file, and would take the machine's memory."""
FULL, SLIDING = "full_attention", "sliding_attention"
FIXED = {"model_type": "olmo3", "hidden_act": "silu", "quantization_config": None}
"""What this implementation computes; any other value is refused."""


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one OLMo 3 model, of all ranks together.

    is_sliding: for each layer, whether it has a window and the rope that goes with it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    attention_bias: bool
    rope: RopeSettings
    sliding_rope: RopeSettings
    is_sliding: tuple[bool, ...]
    window: int

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.is_sliding)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """What each layer keeps; a window that holds every sequence is none."""
        is_needed = self.window < self.rope.max_position
        return tuple(SlidingWindow(self.window) if one and is_needed else FullAttention() for one in self.is_sliding)


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and what is supported.
    """
    for key, value in FIXED.items():
        if hf_config.get(key, value) != value:
            refuse(hf_config, key, repr(value))
    heads, hidden = size(hf_config, "num_attention_heads"), size(hf_config, "hidden_size")
    is_sliding = sliding_layers(hf_config)
    rope, sliding_rope = ropes(hf_config)
    shape = Shape(
        vocab_size=size(hf_config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size(hf_config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=size(hf_config, "num_key_value_heads", heads),
        head_dim=size(hf_config, "head_dim", max(1, hidden // heads)),
        eps=epsilon(hf_config),
        is_tied=switch(hf_config, "tie_word_embeddings"),
        attention_bias=switch(hf_config, "attention_bias"),
        rope=rope,
        sliding_rope=sliding_rope,
        is_sliding=is_sliding,
        window=window(hf_config) if any(is_sliding) else rope.max_position,
    )
    if heads % shape.num_kv_heads:
        refuse(hf_config, "num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if shape.head_dim % 2 or shape.head_dim < 4:
        refuse(hf_config, "head_dim", "an even number from 4")
    return shape


def sliding_layers(hf_config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers have a window: those that `layer_types` names, else all but every fourth.

    Raises: ConfigError for a list of another length or with other types.
    """
    count = size(hf_config, "num_hidden_layers", limit=MAX_LAYERS)
    types = hf_config.get("layer_types")
    if types is None:
        return tuple((index + 1) % 4 != 0 for index in range(count))
    if not isinstance(types, list | tuple) or len(types) != count or any(one not in (FULL, SLIDING) for one in types):
        refuse(hf_config, "layer_types", f"{FULL} or {SLIDING} for each of the {count} layers")
    return tuple(one == SLIDING for one in types)


def window(hf_config: Mapping[str, Any]) -> int:
    """Tokens that a sliding layer sees; null is refused, as transformers does.

    Raises: ConfigError.
    """
    if "sliding_window" in hf_config and hf_config["sliding_window"] is None:
        refuse(hf_config, "sliding_window", "a number of tokens, since layer_types has sliding_attention")
    return size(hf_config, "sliding_window", 4096)


def ropes(hf_config: Mapping[str, Any]) -> tuple[RopeSettings, RopeSettings]:
    """Of layers that see everything, and of those with a window, whose rope `rope_scaling` leaves alone.

    Raises: ConfigError, also for `rope_parameters` that are not kept by type of layer: transformers ignores those.
    """
    parameters = hf_config.get("rope_parameters")
    if parameters and not (isinstance(parameters, Mapping) and set(parameters) <= {FULL, SLIDING}):
        refuse(hf_config, "rope_parameters", f"settings under {FULL} and {SLIDING}")
    config = {**hf_config, "max_position_embeddings": size(hf_config, "max_position_embeddings", 2048)}
    rope = rope_settings(config, FULL, default_theta=500_000.0)
    return rope, rope_settings({**config, "rope_scaling": None}, SLIDING, default_theta=500_000.0)


def size(hf_config: Mapping[str, Any], key: str, default: int | None = None, *, limit: int = MAX_SIZE) -> int:
    """A whole number from 1 to the limit; a missing or null one is the default.

    Raises: ConfigError.
    """
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        refuse(hf_config, key, f"a positive whole number of at most {limit}")
    return value


def switch(hf_config: Mapping[str, Any], key: str) -> bool:
    """True or false; a missing or null one is false.

    Raises: ConfigError.
    """
    value = hf_config.get(key)
    if value is not None and not isinstance(value, bool):
        refuse(hf_config, key, "true or false")
    return bool(value)


def epsilon(hf_config: Mapping[str, Any]) -> float:
    """The norms' epsilon.

    Raises: ConfigError unless it is a number between 0 and 1.
    """
    value = hf_config.get("rms_norm_eps", 1e-5)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        refuse(hf_config, "rms_norm_eps", "a number between 0 and 1")
    return float(value)


def refuse(hf_config: Mapping[str, Any], key: str, supported: str) -> NoReturn:
    """Say what is not implemented, as a ConfigError."""
    value = shown(hf_config[key]) if key in hf_config else "missing"
    raise ConfigError(f"hookline-olmo3 does not support {key} = {value}; supported: {supported}")
