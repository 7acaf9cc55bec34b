"""Gumbel-max sampling without state: a draw depends on the request's seed, the position and the token id alone.

So a request's tokens do not change with the batch it runs in, the scheduler, preemption or the number of ranks.
Legend: N rows, V vocabulary (or one rank's shard of it).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from hookline.core.contracts import NO_TOKEN, Sampler, SamplingBatch
from hookline.plugins.samplers import GumbelConfig

_MASK = 0xFFFFFFFF
LOWEST_TEMPERATURE = 1e-30
"""Lower temperatures count as this one: they are greedy either way, and logits / T stays finite in float32."""
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class Gumbel(Sampler):
    """argmax(logits / T + g) with standard Gumbel noise g draws from softmax(logits / T).

    Source: Maddison et al. 2014, arXiv:1411.0030. With u uniform, g = -log(-log(u)); here u = 1 - w, because float32
    resolves w near 0 finely and so keeps the upper tail of g (to 2^-32) that decides between likely tokens.
    """

    def __init__(self, config: GumbelConfig) -> None:
        self.config = config
        self.fused = fused_kernel()
        if (scores := fused_scores()) is not None:
            self.score = scores  # type: ignore[method-assign, assignment]

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        """See Sampler."""
        return self.sample_shard(logits_NV, params, 0)[1]

    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        """See Sampler."""
        greedy = self.config.greedy or params.all_greedy
        if logits_NV.is_cuda and self.fused is not None:
            return self.fused(logits_NV, params.temperature_N, params.seed_N, params.position_N, first_token, greedy)
        scores_NV = logits_NV.float()
        if not greedy:
            scores_NV = perturbed(scores_NV, params, first_token)
        scores_N, tokens_N = scores_NV.max(dim=-1)
        return scores_N, torch.where(scores_N.isnan(), NO_TOKEN, tokens_N + first_token)


def perturbed(logits_NV: Tensor, params: SamplingBatch, first_token: int) -> Tensor:
    """Logits over temperature plus Gumbel noise; rows of temperature 0 as they are."""
    temperature_N1 = params.temperature_N.unsqueeze(1)
    is_greedy_N1 = temperature_N1 == 0
    noise_NV = log_exponential(params.seed_N, params.position_N, logits_NV.shape[1], first_token)
    scores_NV = logits_NV / temperature_N1.masked_fill(is_greedy_N1, 1.0).clamp(min=LOWEST_TEMPERATURE)
    return scores_NV.sub_(noise_NV.masked_fill_(is_greedy_N1, 0.0))


def fused_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The one-pass Triton version for CUDA tensors; None without a GPU or Triton, and the plain version serves."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    from hookline.plugins.samplers.gumbel_triton import best_tokens

    return best_tokens


def fused_scores() -> Callable[[Tensor, Tensor, int], Tensor] | None:
    """`core.worker.results.scores.scored` as two Triton launches; None without a GPU or Triton."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return None
    from hookline.plugins.samplers.scores_triton import score

    return score


def log_exponential(seed_N: Tensor, position_N: Tensor, num_tokens: int, first_token: int) -> Tensor:
    """log of a standard exponential variate per (row, token); its negative is standard Gumbel.

    Shapes: seed_N, position_N (N,) int64; returns (N, num_tokens) float32, for token ids from first_token on.
    """
    bits_NV = random_bits(seed_N, position_N, num_tokens, first_token)
    w_NV = bits_NV.float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return w_NV.neg_().log1p_().neg_().log_()


def random_bits(seed_N: Tensor, position_N: Tensor, num_tokens: int, first_token: int) -> Tensor:
    """31 random bits per (row, token) as int32: a keyed 32-bit mix of the token id.

    The key holds 64 bits hashed from seed and position; half of it enters before the mix, half in its middle.
    """
    first_N1 = row_key(seed_N, position_N, 0x2545F491).unsqueeze(1)
    second_N1 = row_key(seed_N, position_N, 0x5851F42D).unsqueeze(1)
    tokens_V = torch.arange(first_token, first_token + num_tokens, dtype=torch.int32, device=seed_N.device)
    x_NV = tokens_V ^ first_N1
    x_NV.bitwise_xor_((x_NV >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D).add_(second_N1)
    x_NV.bitwise_xor_((x_NV >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x_NV.bitwise_xor_((x_NV >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0x7FFFFFFF)


def row_key(seed_N: Tensor, position_N: Tensor, salt: int) -> Tensor:
    """32 key bits per row as int32, from the whole of seed and position."""
    x_N = _mix((seed_N & _MASK) ^ salt)
    x_N = _mix(x_N ^ ((seed_N >> 32) & _MASK))
    x_N = _mix(x_N ^ (position_N & _MASK))
    return torch.where(x_N > 0x7FFFFFFF, x_N - (1 << 32), x_N).to(torch.int32)


def _mix(x_N: Tensor) -> Tensor:
    """A bijection of 32-bit values (held in int64) that flips each output bit with probability one half."""
    x_N = ((x_N ^ (x_N >> 16)) * 0x7FEB352D) & _MASK
    x_N = ((x_N ^ (x_N >> 15)) * 0x846CA68B) & _MASK
    return x_N ^ (x_N >> 16)


def _signed(value: int) -> int:
    """The int32 that has the same bits."""
    return value - (1 << 32) if value > 0x7FFFFFFF else value
