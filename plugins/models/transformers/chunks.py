"""Layers that attend in chunks, and queries that are scaled by their position (Llama 4), by kernels that know neither.

A query sees the keys of its own chunk of C tokens. A window of C tokens hides all earlier keys but some of the chunk
before. Low scores hide these: two numbers behind each key say whether its chunk's index is even, and two behind each
query lower the scores of keys with the other parity. To a score within the chunk exactly 0 is added, in every dtype of
a cache. Legend: T tokens, H heads, K kv heads, E head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

CHUNKED = "chunked_attention"
"""The value of `layer_types` for such layers."""
NUM_PARITIES = 2
"""Numbers that stand behind each query and key."""
HIDDEN = 2048.0
"""How much a score is lower in another chunk: more than scores differ, so that its share of the softmax is 0."""
TEMPERATURE = "hookline_temperature"
"""The attribute of an attention module whose queries are scaled by position: `Temperature`."""
Temperature = tuple[float, float]
"""(F, S): the query at position p is multiplied by 1 + S * log(1 + floor((p + 1) / F))."""


def parities(positions_T: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """The two values appended to the keys at these positions: (T,) -> (T, 2)."""
    return one_hot(positions_T // chunk % 2, NUM_PARITIES).to(dtype)


def in_chunks(query: Tensor, key: Tensor, parities_T2: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries (1, H, T, E) and keys (1, K, T, E), two numbers longer, whose scores are multiplied by scale."""
    of_queries_T2 = (parities_T2 - 1) * (HIDDEN / scale)
    of_queries, of_keys = (
        part_T2.expand(1, heads.shape[1], -1, -1) for part_T2, heads in ((of_queries_T2, query), (parities_T2, key))
    )
    return torch.cat((query, of_queries), -1), torch.cat((key, of_keys), -1)


def temperatures(positions_T: Tensor, temperature: Temperature) -> Tensor:
    """The factors of queries at these positions: (T,) -> (T,) float32."""
    floor, strength = temperature
    return torch.log1p(torch.floor((positions_T.float() + 1) / floor)) * strength + 1


def hand_over_temperatures(model: nn.Module) -> None:
    """Let the attention function scale queries by position, in place of modules that would scale by their row.

    In a batch of several sequences a token's row is not its position.
    """
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
            setattr(module, TEMPERATURE, (float(module.floor_scale), float(module.attn_scale)))
            module.attn_temperature_tuning = False
