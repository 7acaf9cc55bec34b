"""A sampler that is obviously right: Gumbel-max with float64 noise from a hash of (seed, position, token id).

What the sampler's conformance suite is tested with. Legend: N rows, V vocabulary (or one shard of it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.contracts import SamplingBatch

Words = np.ndarray[Any, np.dtype[np.uint64]]


class PlainSampler:
    """Implements core.contracts.Sampler, on the CPU."""

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
        key_N = _mixed(_mixed(seed_N.numpy().view(np.uint64)) ^ position_N.numpy().view(np.uint64))
        token_V = np.arange(first_token, first_token + num_tokens, dtype=np.uint64)
        bits_NV = _mixed(key_N[:, None] ^ _mixed(token_V)) >> np.uint64(11)
        uniform_NV = (bits_NV.astype(np.float64) + 0.5) * 2.0**-53
        return torch.from_numpy(-np.log(-np.log(uniform_NV)))


def _mixed(words: Words) -> Words:
    """The finalizer of SplitMix64: each input bit flips each output bit about half of the time."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
