"""OLMo 3's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Knows nothing of tensors. Defaults are those of transformers' Olmo3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import LayerCache
from hookline.core.layers import ConfigValues, RopeSettings, layer_caches, rope_settings

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one OLMo 3 model, of all ranks together.

    is_sliding: for each layer, whether it has the rope of layers with a window. layers: what each one keeps.
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
    layers: tuple[LayerCache, ...]

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.is_sliding)


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and what is supported.
    """
    values = ConfigValues(hf_config, "hookline-olmo3")
    values.model_type({"olmo3": "Olmo3ForCausalLM"})
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    heads, hidden = values.size("num_attention_heads"), values.size("hidden_size")
    rope, sliding_rope = ropes(values)
    caches, is_sliding = layers(values, rope.max_position)
    shape = Shape(
        vocab_size=values.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=values.size("num_key_value_heads", heads),
        head_dim=values.size("head_dim", max(1, hidden // heads)),
        eps=values.eps(default=1e-5),
        is_tied=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        rope=rope,
        sliding_rope=sliding_rope,
        is_sliding=is_sliding,
        layers=caches,
    )
    values.check_heads(heads, shape.num_kv_heads, shape.head_dim)
    return shape


def layers(values: ConfigValues, max_position: int) -> tuple[tuple[LayerCache, ...], tuple[bool, ...]]:
    """What each layer keeps, and whether it is a sliding one: by `layer_types`, else all but every fourth are.

    Raises: ConfigError, also for sliding layers whose window is null, as transformers does.
    """
    pattern = [FULL if (index + 1) % 4 == 0 else SLIDING for index in range(values.num_layers())]
    window = values.size("sliding_window", 4096)
    windows = values.windows(pattern, window)
    if any(windows) and values.values.get("sliding_window", window) is None:
        values.refuse("sliding_window", f"a number of tokens, since layer_types has {SLIDING}")
    return layer_caches(windows, max_position), tuple(one is not None for one in windows)


def ropes(values: ConfigValues) -> tuple[RopeSettings, RopeSettings]:
    """Of layers that see everything, and of those with a window, whose rope `rope_scaling` leaves alone.

    Raises: ConfigError, also for `rope_parameters` that are not kept by type of layer: transformers ignores those.
    """
    parameters = values.values.get("rope_parameters")
    if parameters and not (isinstance(parameters, Mapping) and set(parameters) <= {FULL, SLIDING}):
        values.refuse("rope_parameters", f"settings under {FULL} and {SLIDING}")
    config = {**values.values, "max_position_embeddings": values.size("max_position_embeddings", 2048)}
    rope = rope_settings(config, FULL, default_theta=500_000.0)
    return rope, rope_settings({**config, "rope_scaling": None}, SLIDING, default_theta=500_000.0)
