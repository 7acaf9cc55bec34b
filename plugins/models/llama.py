"""Llama, arXiv:2307.09288, and models of the same architecture: Mistral, Yi, SmolLM, Phi-3. GQA, RoPE, SwiGLU.

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
    Residual,
    RowParallelLinear,
    StageLayers,
    VocabParallelEmbedding,
    empty_parameter,
    rope_table,
    stage_input,
    tapped,
)
from hookline.plugins.models.llama_config import Shape, read_config


class Llama:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        rope = Rope(rope_table(shape.rope, shape.head_dim, shape.rope.max_position).to(runtime.device))
        self.runtime, self.eps = runtime, shape.eps
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)
        self.layers = StageLayers(lambda index: LlamaLayer(index, shape, rope, runtime), shape.num_layers, runtime)
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
            layers=shape.layers,
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        residual = Residual(stage_input(self.embed, token_ids_T, attend), self.eps, self.runtime)
        for layer in tapped(self.layers, residual, attend):
            layer(residual, attend)
        return self.norm(residual)

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


class LlamaLayer:
    """Attention and a gated feed-forward, each behind a norm and around a residual."""

    def __init__(self, index: int, shape: Shape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.is_last, self.is_fused = index, index == shape.num_layers - 1, shape.is_fused
        hidden, bias, self.rope = shape.hidden_size, shape.attention_bias, rope
        self.attention_norm_D = empty_parameter(runtime, hidden)
        self.qkv = QKVParallelLinear(hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, runtime, bias=bias)
        self.output = RowParallelLinear(shape.num_heads * shape.head_dim, hidden, runtime, bias=bias)
        self.mlp_norm_D = empty_parameter(runtime, hidden)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, runtime, bias=shape.mlp_bias)

    def __call__(self, residual: Residual, attend: Attend) -> None:
        """Norm, attention, add; norm, feed-forward, add."""
        attended_TD = attend(self.index, residual.norm(self.attention_norm_D, self.qkv), self.rope)
        residual.add(attended_TD, through=self.output)
        if self.is_last:
            residual.keep(wanted_rows(attend))
        residual.add(residual.norm_each(self.mlp_norm_D), through=self.mlp)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        layer = f"model.layers.{self.index}"
        attention = f"{layer}.self_attn"
        whole = {
            f"{layer}.input_layernorm.weight": WeightTarget.whole(self.attention_norm_D, init="ones"),
            f"{layer}.post_attention_layernorm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones"),
            **self.output.targets(f"{attention}.o_proj"),
        }
        if self.is_fused:
            qkv = self.qkv.joined_targets(f"{attention}.qkv_proj")
            return {**whole, **qkv, **self.mlp.joined_targets(f"{layer}.mlp", "gate_up_proj", "down_proj")}
        qkv = self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        return {**whole, **qkv, **self.mlp.targets(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")}
