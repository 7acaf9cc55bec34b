"""Poolers that make an embedding of tokens' hidden states: the last one, the mean, the first one (CLS).

Legend: as in core/contracts/pooler.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.core.contracts import PooledChunks, Pooler, PoolerSpec


class OneState(Pooler):
    """Base of poolers that keep one number for each of the hidden state's."""

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        self.hidden_size = spec.hidden_size

    def state_size(self) -> int:
        """One hidden state."""
        return self.hidden_size

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """The state is the vector."""
        return state_BS


class LastToken(OneState):
    """The hidden state of the last token, which has seen all others: the usual choice for decoders."""

    reads_all_tokens = False

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """The newest piece's last token takes the place of the one before."""
        return hidden_TD.index_select(0, chunks.starts_B + chunks.lens_B - 1).float()


class FirstToken(OneState):
    """The hidden state of the first token, which models like BERT call CLS."""

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """The first piece's first token; later pieces leave it as it is."""
        first_BD = hidden_TD.index_select(0, chunks.starts_B).float()
        is_first_B = chunks.positions_T.index_select(0, chunks.starts_B) == 0
        return first_BD.where(is_first_B.unsqueeze(1), state_BS)


class Mean(OneState):
    """The mean of all tokens' hidden states, summed in float32."""

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """Add each token to its request's sum."""
        return state_BS.index_add_(0, chunks.chunk_of_T, hidden_TD.float())

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """The sum over the prompt's length."""
        return state_BS / num_tokens_B.unsqueeze(1)
