"""Gemma 3 (text), arXiv:2503.19786: windows with a rope of their own on most layers, norms before and after each part.

The file has the network and its weight names; gemma3_config.py reads the config.json.
A norm multiplies by one more than the checkpoint's weight; the sum is kept in float32, as bfloat16 would round it.
Legend: T tokens, N rows whose logits are wanted, D hidden, C = (H + 2K) * E, H heads, K kv heads, E head dim,
V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    Attend,
    AttentionForm,
    ModelSpec,
    QKNorm,
    Rope,
    Runtime,
    WeightTarget,
    wanted_rows,
)
from hookline.core.layers import (
    GatedMLP,
    ParallelHead,
    QKVParallelLinear,
    RowParallelLinear,
    StageLayers,
    VocabParallelEmbedding,
    rope_table,
    stage_input,
    tapped_stream,
)
from hookline.plugins.models.gemma3_config import Shape, read_config


class Gemma3:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        tables = [rope_table(one, shape.head_dim, shape.max_position) for one in (shape.rope, shape.local_rope)]
        rope, local_rope = (Rope(table_PE.to(runtime.device)) for table_PE in tables)
        self.kernels, self.eps = runtime.kernels, shape.eps
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)
        self.embed_scale = float(torch.tensor(shape.hidden_size**0.5).to(runtime.dtype))

        def layer(index: int) -> Gemma3Layer:
            return Gemma3Layer(index, shape, local_rope if shape.is_local[index] else rope, runtime)

        self.layers, self.is_last = StageLayers(layer, shape.num_layers, runtime), runtime.stage.is_last
        self.norm_D = norm_weight(runtime, shape.hidden_size if self.is_last else 0)
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
            max_position=shape.max_position,
            layers=shape.layers,
            attention=attention_form(shape).features,
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        hidden_TD = stage_input(self._embedded, token_ids_T, attend)
        next_norms = [*(layer.before_attention_D for layer in self.layers), self.norm_D]
        if not self.is_last:
            next_norms[-1] = next_norms[0]  # any will do: the stream is handed on as it is
        normed_TD = self.kernels.rms_norm(hidden_TD, next_norms[0], self.eps)
        for layer, next_norm_D in zip(self.layers, next_norms[1:], strict=True):
            normed_TD, hidden_TD = layer(normed_TD, hidden_TD, next_norm_D, attend)
            if (changed_TD := tapped_stream(layer.index, hidden_TD, attend)) is not None:
                hidden_TD, normed_TD = changed_TD, self.kernels.rms_norm(changed_TD, next_norm_D, self.eps)
        return normed_TD if self.is_last else hidden_TD

    def _embedded(self, token_ids_T: Tensor) -> Tensor:
        return self.embed(token_ids_T) * self.embed_scale

    def final_norm(self, stream_XD: Tensor) -> Tensor:
        """See NormsStreams."""
        return self.kernels.rms_norm(stream_XD, self.norm_D, self.eps)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        return {
            **self.embed.targets("model.embed_tokens"),
            **self.layers.targets("model.layers"),
            "model.norm.weight": norm_target(self.norm_D) if self.is_last else WeightTarget.ignored(),
            **self.head.targets("lm_head"),
        }


class Gemma3Layer:
    """Attention and a gated feed-forward, each between two norms and around a residual."""

    def __init__(self, index: int, shape: Shape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.is_last, self.rope = index, index == shape.num_layers - 1, rope
        self.kernels, self.eps, self.form = runtime.kernels, shape.eps, attention_form(shape)
        hidden, bias, head_dim = shape.hidden_size, shape.attention_bias, shape.head_dim
        self.before_attention_D, self.behind_attention_D = norm_weight(runtime, hidden), norm_weight(runtime, hidden)
        self.qkv = QKVParallelLinear(hidden, shape.num_heads, shape.num_kv_heads, head_dim, runtime, bias=bias)
        self.qk_norm = QKNorm(norm_weight(runtime, head_dim), norm_weight(runtime, head_dim), shape.eps)
        self.output = RowParallelLinear(shape.num_heads * head_dim, hidden, runtime, bias=bias)
        self.before_mlp_D, self.behind_mlp_D = norm_weight(runtime, hidden), norm_weight(runtime, hidden)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, runtime, activation="gelu_tanh")

    def __call__(
        self, normed_TD: Tensor, hidden_TD: Tensor, next_norm_D: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after the layer, normalised for the next one, and as it is."""
        attended_TC = attend(self.index, self.qkv(normed_TD), self.rope, self.qk_norm, self.form)
        rows_N = wanted_rows(attend) if self.is_last else None
        if rows_N is not None:
            attended_TC, hidden_TD = attended_TC.index_select(0, rows_N), hidden_TD.index_select(0, rows_N)
        norm = self.kernels.norm_add_rms_norm
        attended_TD = self.output(attended_TC)
        normed_TD, hidden_TD = norm(attended_TD, self.behind_attention_D, hidden_TD, self.before_mlp_D, self.eps)
        return norm(self.mlp(normed_TD), self.behind_mlp_D, hidden_TD, next_norm_D, self.eps)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        layer = f"model.layers.{self.index}"
        attention = f"{layer}.self_attn"
        norms = {
            f"{layer}.input_layernorm.weight": self.before_attention_D,
            f"{attention}.q_norm.weight": self.qk_norm.q_weight_E,
            f"{attention}.k_norm.weight": self.qk_norm.k_weight_E,
            f"{layer}.post_attention_layernorm.weight": self.behind_attention_D,
            f"{layer}.pre_feedforward_layernorm.weight": self.before_mlp_D,
            f"{layer}.post_feedforward_layernorm.weight": self.behind_mlp_D,
        }
        return {
            **{name: norm_target(weight) for name, weight in norms.items()},
            **self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.output.targets(f"{attention}.o_proj"),
            **self.mlp.targets(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj"),
        }


def attention_form(shape: Shape) -> AttentionForm:
    """Plain, if query_pre_attn_scalar is the head dim."""
    return PLAIN_ATTENTION if shape.scale == shape.head_dim**-0.5 else AttentionForm(scale=shape.scale)


def norm_weight(runtime: Runtime, size: int) -> Tensor:
    """A norm's weight, in float32."""
    return torch.empty(size, device=runtime.device, dtype=torch.float32)


def norm_target(weight: Tensor) -> WeightTarget:
    """The checkpoint stores one less."""
    return WeightTarget.whole(weight, init="zeros", add=1.0)
