"""Reads and checks the settings of the rotary embedding in a config.json; core/layers/rope.py makes tables of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from hookline.core.errors import ConfigError, shown, shown_key
from hookline.core.util.text import near_miss

MAX_POSITION = 2**24
"""Longest sequence that is accepted, in tokens; the table of a longer one would take all of the machine's memory."""
MAX_FACTOR = 1e30
"""Largest base or factor that is accepted; tables are float32, and larger numbers would make them infinite."""
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""How a head's frequencies are shared out among time, height and width. Of text all three are the token's position."""


@dataclass(frozen=True)
class RopeSettings:
    """Rotary embedding as a checkpoint configures it; the fields carry Hugging Face's names and meanings.

    rope_type: one of default, linear, dynamic, llama3, yarn. rope_theta: the base, whose powers are the inverse
    frequencies. max_position_embeddings: 0 where the checkpoint does not say it. factor: by how much the length is
    scaled. original_max_position_embeddings: the length before scaling; 0 for types without one. attention_factor:
    multiplied into the table. beta_fast, beta_slow, truncate: yarn's; low_freq_factor, high_freq_factor: llama3's.
    partial_rotary_factor: the share of a head, in (0, 1], that is rotated. mscale_all_dim: yarn's, 0 where there is
    none; of models that scale their scores by it.
    Units: lengths are tokens; factors are dimensionless; betas are rotations over the original length.
    """

    rope_type: str
    rope_theta: float
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def max_position(self) -> int:
        """Longest sequence in tokens, after scaling."""
        if self.rope_type == "llama3":  # its max_position_embeddings is the scaled length
            return self.max_position_embeddings
        original = self.original_max_position_embeddings or self.max_position_embeddings
        scaled = min(original * self.factor, sys.float_info.max)  # an infinite one is no number of tokens
        return max(self.max_position_embeddings, int(scaled))

    def rotary_dim(self, head_dim: int) -> int:
        """How many values of a head are rotated: R.

        Raises: ConfigError if a partial_rotary_factor makes that an odd number, or less than 2.
        """
        rotated = int(head_dim * self.partial_rotary_factor)
        if rotated % 2 or rotated < 2:
            raise ConfigError(
                f"partial_rotary_factor = {self.partial_rotary_factor} rotates {rotated} of a head's {head_dim} values "
                "and must rotate an even number"
            )
        return rotated


def rope_settings(
    hf_config: Mapping[str, Any],
    layer_type: str | None = None,
    *,
    default_theta: float = 10_000.0,
    allow_partial: bool = False,
) -> RopeSettings:
    """Read `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`; "type" and "rope_type" both count.

    layer_type: of a model whose `rope_parameters` holds settings of their own for each type of layer, the type to read;
    settings that are not kept by type hold for all. allow_partial: whether the model rotates `partial_rotary_factor` of
    a head; others refuse it.
    Raises: ConfigError for an unknown type, an unknown key, or a missing or senseless factor.
    """
    parameters = _of_layer_type(_mapping("rope_parameters", hf_config.get("rope_parameters")), layer_type)
    scaling = dict(_mapping("rope_scaling", hf_config.get("rope_scaling")) or parameters)
    own_theta = scaling.pop("rope_theta", None)
    given = own_theta, parameters.get("rope_theta"), hf_config.get("rope_theta"), default_theta
    theta = _base(next(one for one in given if one is not None))
    alias = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or alias or "default"
    for key in _OF_IMAGES:
        scaling.pop(key, None)
    if rope_type == "mrope":
        rope_type = "default"
    own_partial, of_model = scaling.pop("partial_rotary_factor", None), hf_config.get("partial_rotary_factor")
    partial = _partial(own_partial, of_model, allow_partial)
    _check_keys(rope_type, scaling)
    length = _length("max_position_embeddings", hf_config.get("max_position_embeddings") or 0)
    settings = replace(_of_type(rope_type, theta, length, scaling), partial_rotary_factor=partial)
    _length("the scaled length", settings.max_position)
    return settings


def _of_layer_type(parameters: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    if layer_type is None or not any(str(key).endswith("_attention") for key in parameters):
        return parameters
    return _mapping(f"rope_parameters.{layer_type}", parameters.get(layer_type))


def _of_type(rope_type: str, theta: float, length: int, scaling: Mapping[str, Any]) -> RopeSettings:
    if rope_type == "yarn":
        return _yarn(theta, length, scaling)
    if rope_type == "llama3":
        return _llama3(theta, length, scaling)
    return RopeSettings(rope_type, theta, length, _factor(scaling) if rope_type != "default" else 1.0)


def _partial(own: Any, of_model: Any, is_allowed: bool) -> float:
    """The share of a head that is rotated."""
    value = of_model if own is None else own
    if value in (None, 1, 1.0):
        return 1.0
    if not is_allowed:
        raise ConfigError(f"partial_rotary_factor = {shown(value)} is not supported; supported: 1.0")
    if not _is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"partial_rotary_factor = {shown(value)} must be a number above 0, at most 1")
    return float(value)


def _check_keys(rope_type: Any, scaling: Mapping[str, Any]) -> None:
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        near, known = near_miss(str(rope_type)[:50], _KEYS), ", ".join(_KEYS)
        raise ConfigError(f"rope_type '{shown_key(rope_type)}' is not supported.{near} Supported: {known}")
    unknown = [key for key, value in scaling.items() if key not in _KEYS[rope_type] and value is not None]
    if unknown:
        raise ConfigError(
            f"rope scaling key '{shown_key(unknown[0])}' = {shown(scaling[unknown[0]])} is not supported with "
            f"rope_type '{rope_type}'; "
            f"supported: {', '.join(('rope_theta', *_KEYS[rope_type]))}"
        )


def _factor(scaling: Mapping[str, Any]) -> float:
    factor = scaling.get("factor")
    if not _is_number(factor) or not 1 <= factor <= sys.float_info.max:
        raise ConfigError(f"rope scaling needs a 'factor' of at least 1, not {shown(factor)}")
    return float(factor)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} = {shown(value)} must be a mapping")
    return value or {}


def _positive(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value <= MAX_FACTOR:
        raise ConfigError(f"{name} = {shown(value)} must be a positive number, at most {MAX_FACTOR:g}")
    return float(value)


def _base(value: Any) -> float:
    if not _is_number(value) or not 1 < value <= MAX_FACTOR:
        raise ConfigError(f"rope_theta = {shown(value)} must be a number above 1, at most {MAX_FACTOR:g}")
    return float(value)


def _length(name: str, value: Any) -> int:
    if not _is_number(value) or not 0 <= value <= MAX_POSITION:
        raise ConfigError(f"{name} = {shown(value)} must be a number of tokens, at most {MAX_POSITION}")
    return int(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _yarn(theta: float, length: int, scaling: Mapping[str, Any]) -> RopeSettings:
    original = _length("original_max_position_embeddings", scaling.get("original_max_position_embeddings") or length)
    if not original:
        raise ConfigError("rope_type 'yarn' needs max_position_embeddings or original_max_position_embeddings")
    factor = _factor({"factor": length / original, **{k: v for k, v in scaling.items() if v is not None}})
    attention_factor = scaling.get("attention_factor")
    scales = [_positive(name, scaling[name]) if scaling.get(name) else None for name in ("mscale", "mscale_all_dim")]
    if attention_factor is None:
        attention_factor = _attention_factor(factor, *scales)
    attention_factor = _positive("attention_factor", attention_factor)
    beta_fast = _positive("beta_fast", scaling.get("beta_fast") or 32.0)
    beta_slow = _positive("beta_slow", scaling.get("beta_slow") or 1.0)
    truncate = scaling.get("truncate", True)
    settings = RopeSettings("yarn", theta, length, factor, original, attention_factor, beta_fast, beta_slow, truncate)
    return replace(settings, mscale_all_dim=scales[1] or 0.0)


def _llama3(theta: float, length: int, scaling: Mapping[str, Any]) -> RopeSettings:
    original = _length("original_max_position_embeddings", scaling.get("original_max_position_embeddings") or length)
    if not original:
        raise ConfigError("rope_type 'llama3' needs max_position_embeddings or original_max_position_embeddings")
    low = _positive("low_freq_factor", scaling.get("low_freq_factor"))
    high = _positive("high_freq_factor", scaling.get("high_freq_factor"))
    if low >= high:
        raise ConfigError(f"high_freq_factor = {shown(high)} must be above low_freq_factor = {shown(low)}")
    factor = _factor(scaling)
    _length("the scaled length", min(original * factor, sys.float_info.max))
    settings = RopeSettings("llama3", theta, length or original, factor, original)
    return replace(settings, low_freq_factor=low, high_freq_factor=high)


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
