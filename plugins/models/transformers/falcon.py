"""Falcon's attention through transformers' attention interface, which its own code does not use.

Legend: T tokens, D hidden, H heads, K kv heads, E head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.falcon import modeling_falcon

from hookline.plugins.models.transformers.alibi import SLOPES, slopes_of
from hookline.plugins.models.transformers.attention import SERVED, attention


class ServedFalconAttention(modeling_falcon.FalconAttention):
    """Splits the heads as Falcon's does, but keeps every kv head once."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        alibi: Tensor | None = None,
        attention_mask: Any = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> tuple[Tensor, None]:
        """(1, T, D) -> (1, T, D), and no scores."""
        query, key, value = self._heads(self.query_key_value(hidden_states))
        biases: dict[str, Any] = {}
        if alibi is None:
            rotate: Any = modeling_falcon.apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)
        else:  # added before the scores are scaled
            biases[SLOPES] = tuple(slope * self.head_dim**-0.5 for slope in slopes_of(self.num_heads))
        out_1THE, _scores = attention(self, query, key, value, attention_mask, **biases)
        return self.dense(out_1THE.flatten(2)), None

    def _heads(self, qkv_1TC: Tensor) -> list[Tensor]:
        """Queries (1, H, T, E), keys and values (1, K, T, E)."""
        shape = qkv_1TC.shape[:2]
        if self.new_decoder_architecture:
            groups = qkv_1TC.view(*shape, self.num_kv_heads or 1, -1, self.head_dim)
            parts = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
        elif self.multi_query:
            heads = qkv_1TC.view(*shape, -1, self.head_dim)
            parts = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        else:
            groups = qkv_1TC.view(*shape, self.num_heads, 3, self.head_dim)
            parts = groups[:, :, :, 0], groups[:, :, :, 1], groups[:, :, :, 2]
        return [part.transpose(1, 2) for part in parts]


modeling_falcon.FALCON_ATTENTION_CLASSES[SERVED] = ServedFalconAttention
