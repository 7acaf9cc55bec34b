"""The position-weighted mean: Muennighoff 2022, arXiv:2202.08904. Legend: as in core/contracts/pooler.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.core.contracts import PooledChunks, Pooler, PoolerSpec


class WeightedMean(Pooler):
    """Sums position * hidden state, positions from 1; the sum of the weights is known at the end."""

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        self.hidden_size = spec.hidden_size

    def state_size(self) -> int:
        """See Pooler."""
        return self.hidden_size

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """See Pooler."""
        weight_T1 = (chunks.positions_T + 1).float().unsqueeze(1)
        return state_BS.index_add(0, chunks.chunk_of_T, hidden_TD.float() * weight_T1)

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """See Pooler."""
        length_B1 = num_tokens_B.double().unsqueeze(1)
        return (state_BS / (length_B1 * (length_B1 + 1) / 2)).float()
