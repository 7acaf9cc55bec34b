"""A pooler that is obviously right, the mean of all tokens, and a model for poolers under test.

Used to test the poolers' conformance suite. Legend: as in core/contracts/pooler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import PooledChunks, Pooler, PoolerSpec


class PlainPooler(Pooler):
    """Implements hookline.core.contracts.Pooler."""

    def __init__(self, config: Any, spec: PoolerSpec) -> None:
        self.config, self.spec = config, spec

    def state_size(self) -> int:
        """See Pooler."""
        return self.spec.hidden_size

    def accumulate(self, state_BS: Tensor, hidden_TD: Tensor, chunks: PooledChunks) -> Tensor:
        """See Pooler."""
        return state_BS.index_add(0, chunks.chunk_of_T, hidden_TD.float())

    def finish(self, state_BS: Tensor, num_tokens_B: Tensor) -> Tensor:
        """See Pooler."""
        return state_BS / num_tokens_B.unsqueeze(1)


class FakePoolerModel:
    """`hookline.core.contracts.PoolerModel` with random tensors and a token for each character."""

    def __init__(self, vocab_size: int, device: str = "cpu") -> None:
        self._vocab_size, self._device = vocab_size, device

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """The same for the same name and shape."""
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(tuple(shape), generator=generator).to(self._device)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """A random head's."""
        return hidden_BD.float() @ self.weight("head", (hidden_BD.shape[1], self._vocab_size))

    def token_ids(self, text: str) -> list[int]:
        """A single token for any text: the text's length, so that texts differ."""
        return [len(text) % self._vocab_size]


def fake_spec(hidden_size: int, hf_config: Mapping[str, Any], device: str = "cpu") -> PoolerSpec:
    """A pooler's spec around a FakePoolerModel."""
    return PoolerSpec(hidden_size, 50, torch.device(device), dict(hf_config), FakePoolerModel(50, device))
