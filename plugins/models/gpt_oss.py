"""gpt-oss, arXiv:2508.10925: attention with a sink for each head, windows on every second layer, experts with biases.

Knows its config.json and its weight names; not how attention or experts are computed, what a request is, or where
weights lie. Under tensor parallelism each rank holds a part of every expert (core/layers/experts.py says why).
Legend: T tokens, N rows whose logits are wanted, D hidden, C = (H + 2K) * E, H heads, K kv heads, E head dim,
X experts, A experts of a token, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.core.contracts import Attend, AttentionForm, ModelSpec, Rope, Runtime, WeightTarget, wanted_rows
from hookline.core.layers import (
    ClampedExperts,
    FinalNorm,
    ParallelHead,
    QKVParallelLinear,
    Residual,
    RowParallelLinear,
    SoftmaxRouter,
    StageLayers,
    VocabParallelEmbedding,
    empty_parameter,
    rope_table,
    stage_input,
    tapped,
)
from hookline.plugins.models.gpt_oss_config import Shape, read_config


class GptOss:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        rope = Rope(rope_table(shape.rope, shape.head_dim, shape.rope.max_position).to(runtime.device))
        self.runtime, self.eps = runtime, shape.eps
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)
        self.layers = StageLayers(lambda index: GptOssLayer(index, shape, rope, runtime), shape.num_layers, runtime)
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
            attention=frozenset({"sinks"}),
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        # Not in chunks of rows: each chunk would read every expert's weights again.
        """See Model."""
        residual = Residual(stage_input(self.embed, token_ids_T, attend), self.eps, self.runtime, in_chunks=False)
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


class GptOssLayer:
    """Attention with sinks, then experts, each behind a norm and around a residual."""

    def __init__(self, index: int, shape: Shape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.is_last, self.rope = index, index == shape.num_layers - 1, rope
        hidden, bias = shape.hidden_size, shape.attention_bias
        self.attention_norm_D = empty_parameter(runtime, hidden)
        self.qkv = QKVParallelLinear(hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, runtime, bias=bias)
        self.sinks_H = empty_parameter(runtime, self.qkv.q_heads.size)
        self.form = AttentionForm(sinks_H=self.sinks_H)
        self.output = RowParallelLinear(shape.num_heads * shape.head_dim, hidden, runtime, bias=bias)
        self.mlp_norm_D = empty_parameter(runtime, hidden)
        self.experts = Experts(shape, runtime)

    def __call__(self, residual: Residual, attend: Attend) -> None:
        """Norm, attention, add; norm, experts, add."""
        qkv_TC = residual.norm(self.attention_norm_D, self.qkv)
        residual.add(attend(self.index, qkv_TC, self.rope, None, self.form), through=self.output)
        if self.is_last:
            residual.keep(wanted_rows(attend))
        residual.add(residual.norm(self.mlp_norm_D), through=self.experts)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        layer = f"model.layers.{self.index}"
        attention = f"{layer}.self_attn"
        return {
            f"{layer}.input_layernorm.weight": WeightTarget.whole(self.attention_norm_D, init="ones"),
            f"{layer}.post_attention_layernorm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones"),
            f"{attention}.sinks": WeightTarget.shard(self.sinks_H, 0, self.qkv.q_heads),
            **self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.output.targets(f"{attention}.o_proj"),
            **self.experts.targets(f"{layer}.mlp"),
        }


class Experts:
    """A router and its experts; a token's weights are the softmax over the chosen experts' logits."""

    def __init__(self, shape: Shape, runtime: Runtime) -> None:
        sizes = shape.num_experts, shape.hidden_size
        self.router = SoftmaxRouter(*sizes, shape.num_chosen, runtime, normalise=True, bias=True)
        self.experts = ClampedExperts(
            *sizes, shape.expert_size, runtime, alpha=shape.alpha, limit=shape.limit, what="intermediate_size"
        )

    def local(self, x_TD: Tensor) -> Tensor:
        """Partial sum of this rank: (T, D)."""
        return self.experts.local(x_TD, *self.router(x_TD))

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks and the residual."""
        expert_TA, weight_TA = self.router(x_TD)
        return self.experts.add_rms_norm(x_TD, expert_TA, weight_TA, residual_TD, norm_weight_D, eps)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """The router's and the experts' checkpoint tensors, and where this rank puts them."""
        return {**self.router.targets(f"{name}.router"), **self.experts.targets(f"{name}.experts")}
