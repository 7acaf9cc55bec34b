"""Qwen3 (dense), arXiv:2505.09388: grouped-query attention with normalised queries and keys, RoPE, SwiGLU.

Knows its config.json and its weight names; not how attention is computed, what a request is, or where weights lie.
Legend: T tokens, N rows whose logits are wanted, D hidden, C = (H + 2K) * E, H heads, K kv heads, E head dim,
F intermediate, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hookline.core.contracts import Attend, ModelSpec, QKNorm, Rope, Runtime, WeightTarget, wanted_rows
from hookline.core.distributed.chunking import cut, cut_like, whole
from hookline.core.layers import (
    MergedColumnParallelLinear,
    ParallelHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    empty_parameter,
    rope_table,
)
from hookline.plugins.models.qwen3_config import Shape, read_config


class Qwen3:
    """Embedding, layers, final norm, head. Implements core.contracts.Model."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        rope = Rope(rope_table(shape.rope, shape.head_dim, shape.rope.max_position).to(runtime.device))
        self.kernels, self.ranks, self.eps = runtime.kernels, runtime.ranks, shape.eps
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime)
        self.layers = [Qwen3Layer(index, shape, rope, runtime) for index in range(shape.num_layers)]
        self.norm_D = empty_parameter(runtime, shape.hidden_size)
        tied_to = self.embed if shape.is_tied else None
        self.head = ParallelHead(shape.vocab_size, shape.hidden_size, runtime, tied_to=tied_to)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
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
        residual = cut(self.embed(token_ids_T), self.ranks.num_chunks(len(token_ids_T)))
        norms = [*(layer.attention_norm_D for layer in self.layers), self.norm_D]
        normed: Iterable[Tensor] = [self.kernels.rms_norm(chunk_TD, norms[0], self.eps) for chunk_TD in residual]
        for layer, next_norm_D in zip(self.layers, norms[1:], strict=True):
            rows_N = wanted_rows(attend) if layer is self.layers[-1] else None
            normed = layer(normed, residual, next_norm_D, attend, rows_N)
        return whole(normed)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        targets = {
            **self.embed.targets("model.embed_tokens"),
            "model.norm.weight": WeightTarget.whole(self.norm_D, init="ones"),
            **self.head.targets("lm_head"),
        }
        for layer in self.layers:
            targets |= layer.weight_targets()
        return targets


class Qwen3Layer:
    """Attention and a gated feed-forward, each behind a norm and around a residual.

    All but attention is done chunk by chunk of the rows, each when what follows asks for it.
    """

    def __init__(self, index: int, shape: Shape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.rope, self.eps = index, rope, shape.eps
        self.kernels, self.ranks = runtime.kernels, runtime.ranks
        hidden, inner, bias = shape.hidden_size, shape.intermediate_size, shape.attention_bias
        self.attention_norm_D = empty_parameter(runtime, hidden)
        self.qkv = QKVParallelLinear(hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, runtime, bias=bias)
        q_norm_E, k_norm_E = empty_parameter(runtime, shape.head_dim), empty_parameter(runtime, shape.head_dim)
        self.qk_norm = QKNorm(q_norm_E, k_norm_E, shape.eps)
        self.output = RowParallelLinear(shape.num_heads * shape.head_dim, hidden, runtime, bias=bias)
        self.mlp_norm_D = empty_parameter(runtime, hidden)
        self.gate_up = MergedColumnParallelLinear(hidden, [inner, inner], runtime, what="intermediate_size")
        self.down = RowParallelLinear(inner, hidden, runtime, what="intermediate_size")

    def __call__(
        self,
        normed: Iterable[Tensor],
        residual: list[Tensor],
        next_norm_D: Tensor,
        attend: Attend,
        rows_N: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """The stream after this layer, normalised for what comes next; as it is, it replaces the residual.

        rows_N: of the last layer, the rows to go on with after attention, if not all; the residual is then left alone.
        """
        attended_TD = attend(self.index, whole(map(self.qkv, normed)), self.rope, self.qk_norm)
        if rows_N is not None:
            attended_TD, residual = attended_TD.index_select(0, rows_N), [self.ranks.residual_rows(residual, rows_N)]
        normed = self.output.add_rms_norm_each(cut_like(attended_TD, residual), residual, self.mlp_norm_D, self.eps)
        inner = (self.kernels.linear_silu_mul(chunk_TD, self.gate_up.weight_OD) for chunk_TD in normed)
        return self.down.add_rms_norm_each(inner, residual, next_norm_D, self.eps)

    def weight_targets(self) -> dict[str, WeightTarget]:
        layer = f"model.layers.{self.index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        norms = {
            f"{layer}.input_layernorm.weight": self.attention_norm_D,
            f"{attention}.q_norm.weight": self.qk_norm.q_weight_E,
            f"{attention}.k_norm.weight": self.qk_norm.k_weight_E,
            f"{layer}.post_attention_layernorm.weight": self.mlp_norm_D,
        }
        return {
            **{name: WeightTarget.whole(weight, init="ones") for name, weight in norms.items()},
            **self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.output.targets(f"{attention}.o_proj"),
            **self.gate_up.targets(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            **self.down.targets(f"{mlp}.down_proj"),
        }
