"""A sampler that is obviously right: Gumbel-max with float64 noise from a hash of (seed, position, token id).

Used to test the samplers' conformance suite. Legend: N rows, V vocabulary (or one shard of it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Sampler, SamplingBatch


class PlainSampler(Sampler):
    """Implements hookline.core.contracts.Sampler."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        """See Sampler."""
        return self.sample_shard(logits_NV, params, 0)[1]

    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        """See Sampler."""
        temperature_N1 = params.temperature_N.double().unsqueeze(1)
        noise_NV = self.noise(params.seed_N, params.position_N, first_token, logits_NV.shape[1])
        scores_NV = logits_NV.double() / temperature_N1 + noise_NV
        scores_NV = torch.where(temperature_N1 == 0, logits_NV.double(), scores_NV)
        scores_N, tokens_N = scores_NV.max(-1)
        return scores_N.float(), tokens_N + first_token

    def noise(self, seed_N: Tensor, position_N: Tensor, first_token: int, num_tokens: int) -> Tensor:
        """Standard Gumbel noise (N, num_tokens) in float64, of token ids from first_token on."""
        key_N = _mixed(_mixed(seed_N) ^ position_N)
        token_V = torch.arange(first_token, first_token + num_tokens, device=seed_N.device)
        bits_NV = _shifted(_mixed(key_N.unsqueeze(1) ^ _mixed(token_V)), 11)
        uniform_NV = (bits_NV.double() + 0.5) * 2.0**-53
        return -(-uniform_NV.log()).log()


def _mixed(words: Tensor) -> Tensor:
    """The finalizer of SplitMix64: each input bit flips each output bit about half of the time."""
    words = words + _signed(0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shifted right as if unsigned."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word
