"""The table of cosines and sines of a rotary embedding, made from its settings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hookline.core.layers.rope_config import RopeSettings


def rope_table(settings: RopeSettings, head_dim: int, num_positions: int) -> Tensor:
    """Cosines, then sines, of every position below `num_positions`; YaRN's attention factor is multiplied in.

    "dynamic" is defined by position here: row p takes the NTK base of a sequence of max(p + 1, max_position_embeddings)
    tokens. Within that window this is Hugging Face's table. Beyond it they rotate a whole prompt with the base of its
    last token, and never again rotate cached keys, so that their result depends on how the text was cut into calls;
    ours doesn't.

    Shapes: returns (P, R) float32 on the CPU; R is head_dim, or the part of it that is rotated.
    Raises: ConfigError if that part is no even number.
    Source: Su et al. 2021, arXiv:2104.09864; linear and dynamic NTK as in transformers; YaRN: Peng et al. 2023,
            arXiv:2309.00071; llama3: Llama 3.1's reference code.
    """
    head_dim = settings.rotary_dim(head_dim)
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
    stretch_P.clamp_min_(1.0)  # rounding takes it below where the factor is huge
    return (settings.rope_theta * stretch_P ** (head_dim / (head_dim - 2)))[:, None]


def _scaled_frequencies(settings: RopeSettings, head_dim: int) -> Tensor:
    frequency_F = _inverse_frequencies(settings.rope_theta, head_dim)
    if settings.rope_type == "linear":
        return frequency_F / settings.factor
    if settings.rope_type == "yarn":
        keep_F = _yarn_kept_share(settings, head_dim)
        return frequency_F / settings.factor * (1 - keep_F) + frequency_F * keep_F
    if settings.rope_type == "llama3":
        keep_F = _llama3_kept_share(settings, frequency_F)
        return frequency_F / settings.factor * (1 - keep_F) + frequency_F * keep_F
    return frequency_F


def _llama3_kept_share(settings: RopeSettings, frequency_F: Tensor) -> Tensor:
    """The share of each frequency that stays as trained, (R / 2,): 1 if it turns at least high_freq_factor times in the
    original length, 0 if at most low_freq_factor times.
    """
    turns_F = settings.original_max_position_embeddings * frequency_F / (2 * math.pi)
    width = settings.high_freq_factor - settings.low_freq_factor
    return ((turns_F - settings.low_freq_factor) / width).clamp(0, 1)


def _yarn_kept_share(settings: RopeSettings, head_dim: int) -> Tensor:
    """The share of each frequency that stays as trained, (R / 2,): 1 for fast frequencies, 0 for slow ones."""

    def _dimension_turning(times: float) -> float:
        turns = settings.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(settings.rope_theta))

    low, high = _dimension_turning(settings.beta_fast), _dimension_turning(settings.beta_slow)
    if settings.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # A step, not a division by zero.
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
