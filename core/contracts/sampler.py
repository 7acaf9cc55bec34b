"""The contract of samplers.

Legend: N rows whose tokens are drawn, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hookline.core.contracts.optional import optional

if TYPE_CHECKING:
    from torch import Tensor


NO_TOKEN = -1
"""The token that a sampler draws for a row whose logits hold NaN: its request ends with an error, the others go on."""
FORBIDDEN = -(2**30)
"""Core replaces a token t that was drawn although its logit is -inf by FORBIDDEN + t."""


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of the N rows of a step, on the device, and facts that the host knows without a sync.

    Shapes: temperature_N float32 (0 means greedy), seed_N int64, position_N int64 (of the token being drawn).
    all_greedy: every temperature is 0, so that the sampler may skip the noise; False where the host does not know.
    """

    temperature_N: Tensor
    seed_N: Tensor
    position_N: Tensor
    all_greedy: bool = False


class Sampler(Protocol):
    """Draws one token per row, for classes to extend. Constructed as `Sampler(config)`.

    Stateless: the same inputs give the same tokens.
    """

    def __init__(self, config: Any) -> None:
        """Keep the config."""
        ...

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        """Draw one token per row from the whole vocabulary; NO_TOKEN for a row with NaN, if the check costs nothing.

        Shapes: logits_NV (N, V) float32 or bfloat16; returns tokens_N (N,) int64. Writes to none of its inputs.
        Device: no host sync.
        """
        ...

    @optional
    def sample_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        """The best (score, token) of one rank's shard, whose first column is token id `first_token`.

        Shapes: returns scores_N float32 and tokens_N int64 (global ids). Core takes the token with the largest score
        over all ranks. NaN, the score of NO_TOKEN, is larger than every number.
        Called only if the entry's needs state `vocabulary_shards`; other samplers leave it out.
        """
        raise AssertionError("left out")

    @optional
    def score(self, logits_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
        """Log-probabilities of the drawn tokens and of the K = num_logprobs likeliest. Core computes them if left out.

        In a row that drew NO_TOKEN only the first column has a meaning.
        Shapes: logits_NV (N, V) as the model gives them, tokens_N (N,) int64; returns (N, 2 + 2K) int64: the token, its
        log-probability, the K token ids, the most likely first, their log-probabilities. Log-probabilities are float32,
        stored by their bits: `x.view(torch.int32)`, widened to int64.
        Called with logits on a GPU only, also inside of graphs if the entry is graph_safe.
        """
        raise AssertionError("left out")
