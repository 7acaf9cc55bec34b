"""OLMo 2, arXiv:2501.00656: norms after attention and feed-forward, queries and keys normalised over all heads.

Knows its config.json and its weight names; not how attention is computed, what a request is, or where weights lie.
Legend: T tokens, N rows whose logits are wanted, D hidden, C = (H + 2K) * E, H heads, K kv heads, E head dim,
V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.core.contracts import Attend, ModelSpec, Rope, Runtime, WeightTarget, wanted_rows
from hookline.core.layers import (
    FinalNorm,
    GatedMLP,
    ParallelHead,
    QKVParallelLinear,
    RowParallelLinear,
    StageLayers,
    VocabParallelEmbedding,
    WholeQKNorm,
    empty_parameter,
    rope_table,
    stage_input,
    tapped_stream,
)
from hookline.plugins.models.olmo2_config import Shape, read_config


class Olmo2:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        rope = Rope(rope_table(shape.rope, shape.head_dim, shape.rope.max_position).to(runtime.device))
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)
        self.layers = StageLayers(lambda index: Olmo2Layer(index, shape, rope, runtime), shape.num_layers, runtime)
        self.norm = FinalNorm(shape.hidden_size, shape.eps, runtime)
        tied_to = self.embed if shape.is_tied else None
        self.head = ParallelHead(shape.vocab_size, shape.hidden_size, runtime, tied_to=tied_to)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model."""
        shape = read_config(hf_config)
        return ModelSpec(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_position=shape.rope.max_position,
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        hidden_TD = stage_input(self.embed, token_ids_T, attend)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, attend)
            if (changed_TD := tapped_stream(layer.index, hidden_TD, attend)) is not None:
                hidden_TD = changed_TD
        return self.norm(hidden_TD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        return {
            **self.embed.targets("model.embed_tokens"),
            **self.layers.targets("model.layers"),
            **self.norm.targets("model.norm"),
            **self.head.targets("lm_head"),
        }


class Olmo2Layer:
    """Attention and a gated feed-forward of the hidden states as they are; each result is normalised, then added."""

    def __init__(self, index: int, shape: Shape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.is_last, self.rope = index, index == shape.num_layers - 1, rope
        self.kernels, self.eps = runtime.kernels, shape.eps
        hidden, bias = shape.hidden_size, shape.attention_bias
        self.qkv = QKVParallelLinear(hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, runtime, bias=bias)
        self.qk_norm = WholeQKNorm(self.qkv, runtime, shape.eps)
        self.output = RowParallelLinear(shape.num_heads * shape.head_dim, hidden, runtime, bias=bias)
        self.attention_norm_D = empty_parameter(runtime, hidden)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, runtime)
        self.mlp_norm_D = empty_parameter(runtime, hidden)

    def __call__(self, hidden_TD: Tensor, attend: Attend) -> Tensor:
        """Stream in, stream out: (T, D) -> (T, D), in the last layer (N, D) of the wanted rows."""
        attended_TC = attend(self.index, self.qk_norm(self.qkv(hidden_TD)), self.rope)
        rows_N = wanted_rows(attend) if self.is_last else None
        if rows_N is not None:
            attended_TC, hidden_TD = attended_TC.index_select(0, rows_N), hidden_TD.index_select(0, rows_N)
        hidden_TD = hidden_TD + self.kernels.rms_norm(self.output(attended_TC), self.attention_norm_D, self.eps)
        return hidden_TD + self.kernels.rms_norm(self.mlp(hidden_TD), self.mlp_norm_D, self.eps)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        layer = f"model.layers.{self.index}"
        attention = f"{layer}.self_attn"
        return {
            **self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.qk_norm.targets(f"{attention}.q_norm", f"{attention}.k_norm"),
            **self.output.targets(f"{attention}.o_proj"),
            f"{layer}.post_attention_layernorm.weight": WeightTarget.whole(self.attention_norm_D, init="ones"),
            **self.mlp.targets(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj"),
            f"{layer}.post_feedforward_layernorm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones"),
        }
