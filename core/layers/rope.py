"""Rotary embedding: a config.json's settings, checked, and the table of cosines and sines they give."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from hookline.core.errors import ConfigError, shown, shown_key
from hookline.core.util.text import near_miss

MAX_POSITION = 2**24
"""Longest sequence that is believed, in tokens; the table of a longer one would take the machine's memory."""
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
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


@dataclass(frozen=True)
class RopeSettings:
    """Rotary embedding as a checkpoint configures it; the fields carry Hugging Face's names and meanings.

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

    @property
    def max_position(self) -> int:
        """Longest sequence in tokens, after scaling."""
        original = self.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * self.factor))


def rope_settings(hf_config: Mapping[str, Any]) -> RopeSettings:
    """Read `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`; "type" and "rope_type" both count.

    Raises: ConfigError for an unknown type, an unknown key, or a missing or senseless factor.
    """
    parameters = _mapping("rope_parameters", hf_config.get("rope_parameters"))
    scaling = dict(_mapping("rope_scaling", hf_config.get("rope_scaling")) or parameters)
    own_theta = scaling.pop("rope_theta", None)
    given = own_theta, parameters.get("rope_theta"), hf_config.get("rope_theta"), 10_000.0
    theta = _positive("rope_theta", next(one for one in given if one is not None))
    alias = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or alias or "default"
    _check_keys(rope_type, scaling)
    length = _length("max_position_embeddings", hf_config.get("max_position_embeddings") or 0)
    if rope_type == "yarn":
        settings = _yarn(theta, length, scaling)
    else:
        settings = RopeSettings(rope_type, theta, length, _factor(scaling) if rope_type != "default" else 1.0)
    _length("the scaled length", settings.max_position)
    return settings


def _check_keys(rope_type: Any, scaling: Mapping[str, Any]) -> None:
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        near, known = near_miss(str(rope_type)[:50], _KEYS), ", ".join(_KEYS)
        raise ConfigError(f"rope_type '{shown_key(rope_type)}' is not supported.{near} Supported: {known}")
    allowed = (*_KEYS[rope_type], "partial_rotary_factor")
    unknown = [key for key, value in scaling.items() if key not in allowed and value is not None]
    if unknown:
        raise ConfigError(
            f"rope scaling key '{shown_key(unknown[0])}' = {shown(scaling[unknown[0]])} is not supported with "
            f"rope_type '{rope_type}'; "
            f"supported: {', '.join(('rope_theta', *_KEYS[rope_type]))}"
        )
    if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"partial_rotary_factor = {shown(scaling['partial_rotary_factor'])} is not supported; supported: 1.0"
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
    if not _is_number(value) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} = {shown(value)} must be a positive number")
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
    if attention_factor is None:
        scales = [scaling.get(name) for name in ("mscale", "mscale_all_dim")]
        attention_factor = _attention_factor(factor, *(_positive("mscale", one) if one else None for one in scales))
    attention_factor = _positive("attention_factor", attention_factor)
    beta_fast = _positive("beta_fast", scaling.get("beta_fast") or 32.0)
    beta_slow = _positive("beta_slow", scaling.get("beta_slow") or 1.0)
    truncate = scaling.get("truncate", True)
    return RopeSettings("yarn", theta, length, factor, original, attention_factor, beta_fast, beta_slow, truncate)


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_table(settings: RopeSettings, head_dim: int, num_positions: int) -> Tensor:
    """Cosines, then sines, of every position below `num_positions`; YaRN's attention factor is multiplied in.

    "dynamic" is defined by position here: row p takes the NTK base of a sequence of max(p + 1, max_position_embeddings)
    tokens. Within that window this is Hugging Face's table. Beyond it they rotate a whole prompt with the base of its
    last token, and never again rotate cached keys, so that their result depends on how the text was cut into calls;
    ours doesn't.

    Shapes: returns (P, E) float32 on the CPU.
    Source: Su et al. 2021, arXiv:2104.09864; linear and dynamic NTK as in transformers; YaRN: Peng et al. 2023,
            arXiv:2309.00071.
    """
    position_P = torch.arange(num_positions, dtype=torch.float32)
    if settings.rope_type == "dynamic" and num_positions > settings.max_position_embeddings:
        angle_PF = position_P[:, None] * _inverse_frequencies(_ntk_bases(settings, position_P, head_dim), head_dim)
    else:
        angle_PF = torch.outer(position_P, _scaled_frequencies(settings, head_dim))
    return torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1).mul_(settings.attention_factor)


def _inverse_frequencies(base: float | Tensor, head_dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def _ntk_bases(settings: RopeSettings, position_P: Tensor, head_dim: int) -> Tensor:
    """The NTK-aware base of each position, (P, 1)."""
    length_P = (position_P + 1).clamp_min(settings.max_position_embeddings)
    stretch_P = settings.factor * length_P / settings.max_position_embeddings - (settings.factor - 1)
    return (settings.rope_theta * stretch_P ** (head_dim / (head_dim - 2)))[:, None]


def _scaled_frequencies(settings: RopeSettings, head_dim: int) -> Tensor:
    frequency_F = _inverse_frequencies(settings.rope_theta, head_dim)
    if settings.rope_type == "linear":
        return frequency_F / settings.factor
    if settings.rope_type == "yarn":
        keep_F = _yarn_kept_share(settings, head_dim)
        return frequency_F / settings.factor * (1 - keep_F) + frequency_F * keep_F
    return frequency_F


def _yarn_kept_share(settings: RopeSettings, head_dim: int) -> Tensor:
    """How much of each frequency stays as trained: 1 for those that turn often in the original length, 0 for slow."""

    def dimension_turning(times: float) -> float:
        turns = settings.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(settings.rope_theta))

    low, high = dimension_turning(settings.beta_fast), dimension_turning(settings.beta_slow)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # A step, not a division by zero.
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
