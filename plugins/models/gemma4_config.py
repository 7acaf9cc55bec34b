"""Gemma 4's config.json, read once into plain sizes; whatever this implementation lacks is refused by name.

Defaults are taken from transformers' Gemma4TextConfig and Gemma4UnifiedTextConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.core.contracts import FullAttention, LayerCache, SharedCache, SlidingWindow
from hookline.core.layers import ConfigValues, RopeSettings, rope_settings

TEXT, UNIFIED = "gemma4_text", "gemma4_unified_text"
ARCHITECTURES = {
    TEXT: ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    UNIFIED: ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
PATTERN = 6
"""Without layer_types, every layer of this many sees everything."""
DEFAULT_ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Heads:
    """The heads of one type of layer, and how they are rotated.

    num_rotated: pairs of numbers of a head that are rotated, the first of each half. lanes: how many kv heads share one
    entry of the cache; copies: how many entries have the same kv head. One of both is 1.
    """

    num_kv_heads: int
    head_dim: int
    rope: RopeSettings
    num_rotated: int
    lanes: int
    copies: int
    values_are_keys: bool


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, beside its feed-forward."""

    num_experts: int
    num_chosen: int
    size: int


@dataclass(frozen=True)
class Shape:
    """The sizes and switches of one Gemma 4 model, of all ranks together.

    num_entries: kv heads of the cache, and head_dim: numbers of each; the same for all layers. kinds: of each layer,
    LOCAL or GLOBAL, whose heads are in `heads`. shared: for each layer, the layer whose keys and values it attends
    over; None for its own. intermediate_sizes: of each layer. per_layer_size: numbers that each layer gets of each
    token from a further embedding; 0 for none. softcap: of the logits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_sizes: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_entries: int
    head_dim: int
    eps: float
    is_tied: bool
    attention_bias: bool
    max_position: int
    softcap: float | None
    kinds: tuple[str, ...]
    heads: Mapping[str, Heads]
    shared: tuple[int | None, ...]
    experts: Experts | None
    per_layer_size: int
    per_layer_vocab_size: int
    layers: tuple[LayerCache, ...]


def read_config(hf_config: Mapping[str, Any]) -> Shape:
    """Check and read a config.json.

    Raises: ConfigError naming the key, its value and the supported values.
    """
    values = ConfigValues(hf_config, "Gemma 4")
    is_text = values.model_type(ARCHITECTURES) == TEXT
    values.refuse_quantised()
    values.only("hidden_activation", "gelu_pytorch_tanh")
    values.only("rope_scaling", None)
    if values.values.get("use_bidirectional_attention") not in (None, "vision"):
        values.refuse("use_bidirectional_attention", "null or vision, which leaves texts as they are")
    num_heads, vocab_size = values.size("num_attention_heads", 8), values.size("vocab_size", 262_144)
    length, window = (
        values.size("max_position_embeddings", 131_072 if is_text else 262_144),
        values.size("sliding_window", 512 if is_text else 1024),
    )
    kinds = _kinds(values)
    head_dim, num_entries, heads = _heads(values, kinds, num_heads, length)
    shared = tuple(_shared(values, kinds))
    per_layer_size = _whole(values, "hidden_size_per_layer_input", 256) if is_text else 0
    per_layer_vocab_size = values.size("vocab_size_per_layer_input", 262_144) if per_layer_size else vocab_size
    if per_layer_vocab_size < vocab_size:
        values.refuse("vocab_size_per_layer_input", f"at least vocab_size = {vocab_size}")
    inner = values.size("intermediate_size", 9216)
    is_wide = values.flag("use_double_wide_mlp")
    softcap = values.values.get("final_logit_softcapping")
    bias = values.flag("attention_bias")
    if bias and any(one.values_are_keys for one in heads.values()):
        values.refuse("attention_bias", "false with attention_k_eq_v")
    return Shape(
        vocab_size=vocab_size,
        hidden_size=values.size("hidden_size", 2304),
        intermediate_sizes=tuple(inner * 2 if is_wide and owner is not None else inner for owner in shared),
        num_layers=len(kinds),
        num_heads=num_heads,
        num_entries=num_entries,
        head_dim=head_dim,
        eps=values.eps(),
        is_tied=values.flag("tie_word_embeddings", True),
        attention_bias=bias,
        max_position=length,
        softcap=None if softcap is None else values.positive("final_logit_softcapping"),
        kinds=kinds,
        heads=heads,
        shared=shared,
        experts=_experts(values) if is_text and values.flag("enable_moe_block") else None,
        per_layer_size=per_layer_size,
        per_layer_vocab_size=per_layer_vocab_size,
        layers=_layers(kinds, shared, window, length),
    )


def _whole(values: ConfigValues, key: str, default: int) -> int:
    """A size that may be 0, for a part that a model does not have."""
    return 0 if values.values.get(key) == 0 and values.values[key] is not False else values.size(key, default)


def _kinds(values: ConfigValues) -> tuple[str, ...]:
    """The type of each layer; the last one sees everything, whatever the list says."""
    pattern = [LOCAL if (index + 1) % PATTERN else GLOBAL for index in range(values.num_layers())]
    windows = values.windows(pattern, 1)
    return (*(GLOBAL if one is None else LOCAL for one in windows[:-1]), GLOBAL)


def _layers(kinds: Sequence[str], shared: Sequence[int | None], window: int, length: int) -> tuple[LayerCache, ...]:
    """The cache of each layer."""
    local = SlidingWindow(window) if window < length else FullAttention()
    return tuple(
        (local if kind == LOCAL else FullAttention()) if owner is None else SharedCache(owner)
        for kind, owner in zip(kinds, shared, strict=True)
    )


def _shared(values: ConfigValues, kinds: Sequence[str]) -> Iterator[int | None]:
    """The last layers attend over the keys and values of the last one of their type before them."""
    num_shared = _whole(values, "num_kv_shared_layers", 1) if values.values.get("num_kv_shared_layers") else 0
    first = len(kinds) - num_shared
    own = kinds[: max(first, 0)]
    if set(kinds) - set(own):
        values.refuse("num_kv_shared_layers", "a number that leaves a layer of each type with its own keys and values")
    for index, kind in enumerate(kinds):
        yield None if index < first else first - 1 - own[::-1].index(kind)


def _experts(values: ConfigValues) -> Experts:
    num_experts, num_chosen = values.size("num_experts"), values.size("top_k_experts")
    if num_chosen > num_experts:
        values.refuse("top_k_experts", f"at most num_experts = {num_experts}")
    return Experts(num_experts, num_chosen, values.size("moe_intermediate_size"))


def _heads(
    values: ConfigValues, kinds: Sequence[str], num_heads: int, length: int
) -> tuple[int, int, dict[str, Heads]]:
    """Numbers of a cache entry's key, entries of a layer, and the heads of each type of layer."""
    sizes = {kind: _sizes(values, kinds, kind) for kind in dict.fromkeys(kinds)}
    for num_kv_heads, head_dim in sizes.values():
        values.check_heads(num_heads, num_kv_heads, head_dim)
    largest = max(head_dim for _, head_dim in sizes.values())
    num_entries = next(
        number
        for number in range(1, num_heads + 1)
        if num_heads % number == 0 and all(_fits(number, largest, *one) for one in sizes.values())
    )
    heads = {}
    for kind, (num_kv_heads, head_dim) in sizes.items():
        rope, num_rotated = _rope(values, kind, head_dim, length)
        heads[kind] = Heads(
            num_kv_heads,
            head_dim,
            rope,
            num_rotated,
            lanes=max(1, num_kv_heads // num_entries),
            copies=max(1, num_entries // num_kv_heads),
            values_are_keys=kind == GLOBAL and values.flag("attention_k_eq_v"),
        )
    return largest, num_entries, heads


def _fits(num_entries: int, largest: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether num_entries entries hold these kv heads: several heads in an entry, or a head in several entries."""
    if num_entries % num_kv_heads == 0:
        return True
    return num_kv_heads % num_entries == 0 and num_kv_heads // num_entries * head_dim <= largest


def _sizes(values: ConfigValues, kinds: Sequence[str], kind: str) -> tuple[int, int]:
    """Kv heads and head dim of a type of layer: transformers saves the second form, Google the first."""
    num_kv_heads, head_dim = values.size("num_key_value_heads", 4), values.size("head_dim", 256)
    of_layers = values.values.get("per_layer_config")
    if of_layers is None:
        if kind == LOCAL:
            return num_kv_heads, head_dim
        if values.flag("attention_k_eq_v"):
            num_kv_heads = values.size("num_global_key_value_heads", num_kv_heads)
        return num_kv_heads, values.size("global_head_dim", 512)
    known = "layers by index, each with head_dim and num_key_value_heads, alike for all layers of a type"
    if not isinstance(of_layers, Mapping) or not all(isinstance(one, Mapping) for one in of_layers.values()):
        values.refuse("per_layer_config", known)
    by_index = {str(index): dict(one) for index, one in of_layers.items()}
    found = [by_index.get(str(index), {}) for index, one in enumerate(kinds) if one == kind]
    if any(one != found[0] or set(one) - {"head_dim", "num_key_value_heads"} for one in found):
        values.refuse("per_layer_config", known)
    own = ConfigValues(found[0], values.model)
    return own.size("num_key_value_heads", num_kv_heads), own.size("head_dim", head_dim)


def _rope(values: ConfigValues, kind: str, head_dim: int, length: int) -> tuple[RopeSettings, int]:
    """RoPE settings whose first frequencies are the layers', and how many pairs of a head are rotated."""
    parameters = values.values.get("rope_parameters") or DEFAULT_ROPES
    found = parameters.get(kind) if isinstance(parameters, Mapping) else None
    if not isinstance(found, Mapping) or found.get("rope_type") not in ("default", "proportional"):
        values.refuse("rope_parameters", "of each type of layer, rope_type default or proportional")
    own = dict(found)
    is_proportional, num_rotated = own.get("rope_type") == "proportional", head_dim // 2
    partial, factor = own.pop("partial_rotary_factor", None), own.pop("factor", None)
    own["rope_type"] = "default"
    if is_proportional:
        share = (
            1.0
            if partial is None
            else ConfigValues({"partial_rotary_factor": partial}, values.model).positive("partial_rotary_factor")
        )
        num_rotated = int(share * head_dim // 2)
        if not 0 < num_rotated <= head_dim // 2:
            values.refuse("rope_parameters", "a partial_rotary_factor of at most 1 that rotates some numbers")
        if factor not in (None, 1):
            own |= {"rope_type": "linear", "factor": factor}
    return rope_settings({"rope_parameters": own, "max_position_embeddings": length}), num_rotated
