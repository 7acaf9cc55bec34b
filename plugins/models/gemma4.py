"""Gemma 4 (text): heads by the type of layer, norms before and after each part, and in its small versions a further
embedding for each layer.

The file has the network and its weight names; gemma4_config.py reads the config.json, gemma4_heads.py has attention.
Legend: T tokens, N rows whose logits are wanted, D hidden, L layers, P numbers that a layer gets of each token,
V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import Attend, ModelSpec, Runtime, WeightTarget, wanted_rows
from hookline.core.errors import ConfigError
from hookline.core.layers import (
    GatedMLP,
    ParallelExperts,
    ParallelHead,
    ReplicatedLinear,
    SoftmaxRouter,
    StageLayers,
    VocabParallelEmbedding,
    empty_parameter,
    stage_input,
    tapped_stream,
)
from hookline.plugins.models.gemma4_config import Experts, Shape, read_config
from hookline.plugins.models.gemma4_heads import FORM, Gemma4Attention, HeadLayout


class Gemma4:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        self.kernels, self.eps, self.softcap = runtime.kernels, shape.eps, shape.softcap
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)
        self.embed_scale = in_dtype(shape.hidden_size**0.5, runtime)
        self.per_layer = PerLayerInputs(shape, runtime) if shape.per_layer_size else None
        layouts = {kind: HeadLayout(shape, heads, runtime) for kind, heads in shape.heads.items()}

        def layer(index: int) -> Gemma4Layer:
            return Gemma4Layer(index, shape, layouts[shape.kinds[index]], runtime)

        self.layers, self.is_last = StageLayers(layer, shape.num_layers, runtime), runtime.stage.is_last
        self.norm_D = empty_parameter(runtime, shape.hidden_size if self.is_last else 0)
        tied_to = self.embed if shape.is_tied else None
        self.head = ParallelHead(shape.vocab_size, shape.hidden_size, runtime, tied_to=tied_to)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model. num_kv_heads and head_dim are the cache's, which differ from the layers'; see gemma4_heads.py."""
        shape = read_config(hf_config)
        return ModelSpec(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_entries,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_position=shape.max_position,
            layers=shape.layers,
            attention=FORM.features,
        )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        hidden_TD = stage_input(self._embedded, token_ids_T, attend)
        inputs_TLP = None if self.per_layer is None else self.per_layer(token_ids_T, hidden_TD)
        next_norms = [*(layer.before_attention_D for layer in self.layers), self.norm_D]
        if not self.is_last:
            next_norms[-1] = next_norms[0]  # any will do: the stream is handed on as it is
        normed_TD = self.kernels.rms_norm(hidden_TD, next_norms[0], self.eps)
        for layer, next_norm_D in zip(self.layers, next_norms[1:], strict=True):
            input_TP = None if inputs_TLP is None else inputs_TLP[:, layer.index]
            normed_TD, hidden_TD = layer(normed_TD, hidden_TD, input_TP, next_norm_D, attend)
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
        logits_NV = self.head(hidden_ND)
        if self.softcap is not None:
            logits_NV.div_(self.softcap).tanh_().mul_(self.softcap)
            logits_NV[:, self.head.num_columns :] = -torch.inf  # padding of the vocabulary, which must not win
        return logits_NV

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        return {
            **self.embed.targets("model.embed_tokens"),
            **({} if self.per_layer is None else self.per_layer.targets("model")),
            **self.layers.targets("model.layers"),
            "model.norm.weight": norm_target(self.norm_D) if self.is_last else WeightTarget.ignored(),
            **self.head.targets("lm_head"),
        }


class PerLayerInputs:
    """The further input of each layer for each token: an embedding, and a projection of the first residual stream."""

    def __init__(self, shape: Shape, runtime: Runtime) -> None:
        if runtime.stage.size > 1:
            raise ConfigError(
                "Gemma 4 with hidden_size_per_layer_input does not run in stages, since each layer needs the tokens' "
                "embeddings; take pp=1"
            )
        size = shape.per_layer_size
        num_numbers, self.kernels, self.eps = shape.num_layers * size, runtime.kernels, shape.eps
        self.embed = VocabParallelEmbedding(shape.per_layer_vocab_size, num_numbers, runtime)
        self.projection = ReplicatedLinear(shape.hidden_size, [num_numbers], runtime)
        self.norm_P = empty_parameter(runtime, size)
        self.embed_scale, self.projection_scale = in_dtype(size**0.5, runtime), shape.hidden_size**-0.5

    def __call__(self, token_ids_T: Tensor, embedded_TD: Tensor) -> Tensor:
        """The further inputs of all layers: (T,), (T, D) -> (T, L, P)."""
        own_TC = self.embed(token_ids_T) * self.embed_scale
        projected_XP = (self.projection(embedded_TD) * self.projection_scale).view(-1, len(self.norm_P))
        normed_TC = self.kernels.rms_norm(projected_XP, self.norm_P, self.eps).view(own_TC.shape)
        return (normed_TC.add_(own_TC) * 2**-0.5).view(len(own_TC), -1, len(self.norm_P))

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """The embedding, the projection and its norm."""
        return {
            **self.embed.targets(f"{name}.embed_tokens_per_layer"),
            **self.projection.targets(f"{name}.per_layer_model_projection"),
            f"{name}.per_layer_projection_norm.weight": norm_target(self.norm_P),
        }


class Gemma4Layer:
    """Attention, a gated feed-forward and perhaps the layer's own input, each behind norms and around a residual.

    The sum of all is scaled.
    """

    def __init__(self, index: int, shape: Shape, layout: HeadLayout, runtime: Runtime) -> None:
        self.index, self.is_last = index, index == shape.num_layers - 1
        self.kernels, self.eps, hidden = runtime.kernels, shape.eps, shape.hidden_size
        self.attention = Gemma4Attention(index, shape, layout, runtime)
        self.before_attention_D, self.behind_attention_D, self.behind_mlp_D = (
            empty_parameter(runtime, hidden) for _ in range(3)
        )
        self.mlp = GatedMLP(hidden, shape.intermediate_sizes[index], runtime, activation="gelu_tanh")
        self.experts = None if shape.experts is None else ExpertsBeside(shape.experts, shape, runtime)
        self.before_mlp_D = empty_parameter(runtime, hidden) if self.experts is None else self.experts.before_3D[0]
        self.own_input = OwnInput(shape, runtime) if shape.per_layer_size else None
        self.scale_1 = empty_parameter(runtime, 1)

    def __call__(
        self, normed_TD: Tensor, hidden_TD: Tensor, input_TP: Tensor | None, next_norm_D: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after the layer, normalised for the next one, and as it is."""
        attended_TC = self.attention(normed_TD, attend)
        rows_N = wanted_rows(attend) if self.is_last else None
        if rows_N is not None:
            attended_TC, hidden_TD = attended_TC.index_select(0, rows_N), hidden_TD.index_select(0, rows_N)
            input_TP = None if input_TP is None else input_TP.index_select(0, rows_N)
        norm = self.kernels.norm_add_rms_norm
        attended_TD = self.attention.output(attended_TC)
        given = attended_TD, self.behind_attention_D, hidden_TD
        if self.experts is None:
            normed_TD, hidden_TD = norm(*given, self.before_mlp_D, self.eps)
            added_TD, norm_D, beside = self.mlp(normed_TD), self.behind_mlp_D, None
        else:
            normed_3TD, hidden_TD = norm(*given, self.experts.before_3D, self.eps)
            chosen = self.experts.choose(normed_3TD[1])  # first: the feed-forward's weights are read meanwhile
            added_TD, norm_D = self.mlp(normed_3TD[0]), self.experts.behind_mlp_D
            beside = self.experts.experts(normed_3TD[2], *chosen), self.experts.behind_D, self.behind_mlp_D
        if self.own_input is not None:
            assert input_TP is not None
            _, hidden_TD = norm(added_TD, norm_D, hidden_TD, next_norm_D, self.eps, None, beside)
            added_TD, norm_D, beside = self.own_input(hidden_TD, input_TP), self.own_input.norm_D, None
        return norm(added_TD, norm_D, hidden_TD, next_norm_D, self.eps, self.scale_1, beside)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        layer = f"model.layers.{self.index}"
        norms = {
            "input_layernorm": self.before_attention_D,
            "post_attention_layernorm": self.behind_attention_D,
            "pre_feedforward_layernorm": self.before_mlp_D,
            "post_feedforward_layernorm": self.behind_mlp_D,
        }
        return {
            **{f"{layer}.{name}.weight": norm_target(weight_D) for name, weight_D in norms.items()},
            f"{layer}.layer_scalar": norm_target(self.scale_1),
            **self.attention.targets(f"{layer}.self_attn"),
            **self.mlp.targets(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj"),
            **({} if self.experts is None else self.experts.targets(layer)),
            **({} if self.own_input is None else self.own_input.targets(layer)),
        }


class ExpertsBeside:
    """Experts beside the feed-forward, chosen by the stream before both; the two have a norm each, and their sum too.

    before_3D: the norms of the stream before the feed-forward, the router and the experts, in float32: the router's
    scale is that of checkpoints divided by sqrt(D).
    Legend: X experts, A experts of a token.
    """

    def __init__(self, experts: Experts, shape: Shape, runtime: Runtime) -> None:
        hidden = shape.hidden_size
        self.before_3D = torch.empty(3, hidden, dtype=torch.float32, device=runtime.device)
        self.behind_mlp_D, self.behind_D = (empty_parameter(runtime, hidden) for _ in range(2))
        self.router = SoftmaxRouter(experts.num_experts, hidden, experts.num_chosen, runtime, normalise=True)
        self.expert_scale_X = empty_parameter(runtime, experts.num_experts)
        self.experts = ParallelExperts(
            experts.num_experts, hidden, experts.size, runtime, what="moe_intermediate_size", activation="gelu_tanh"
        )

    def choose(self, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, from the stream behind the router's norm."""
        return self.router(normed_TD, self.expert_scale_X)

    def targets(self, layer: str) -> dict[str, WeightTarget]:
        """The router, the experts and their norms."""
        _, scale_D, before_D = self.before_3D
        router, norms = f"{layer}.router", "feedforward_layernorm"
        return {
            **self.router.targets(f"{router}.proj"),
            f"{router}.scale": WeightTarget.whole(scale_D, init="ones", times=len(scale_D) ** -0.5),
            f"{router}.per_expert_scale": norm_target(self.expert_scale_X),
            **self.experts.targets(f"{layer}.experts", "gate_proj", "up_proj", "down_proj"),
            f"{layer}.pre_{norms}_2.weight": norm_target(before_D),
            f"{layer}.post_{norms}_1.weight": norm_target(self.behind_mlp_D),
            f"{layer}.post_{norms}_2.weight": norm_target(self.behind_D),
        }


class OwnInput:
    """The layer's own input behind a gate that the stream opens, as wide as the stream. Every rank has all of it."""

    def __init__(self, shape: Shape, runtime: Runtime) -> None:
        self.gate = ReplicatedLinear(shape.hidden_size, [shape.per_layer_size], runtime)
        self.projection = ReplicatedLinear(shape.per_layer_size, [shape.hidden_size], runtime)
        self.norm_D = empty_parameter(runtime, shape.hidden_size)

    def __call__(self, hidden_TD: Tensor, input_TP: Tensor) -> Tensor:
        """Before its norm: (T, D), (T, P) -> (T, D)."""
        return self.projection(functional.gelu(self.gate(hidden_TD), approximate="tanh").mul_(input_TP))

    def targets(self, layer: str) -> dict[str, WeightTarget]:
        """Both projections and the norm behind them."""
        return {
            **self.gate.targets(f"{layer}.per_layer_input_gate"),
            **self.projection.targets(f"{layer}.per_layer_projection"),
            f"{layer}.post_per_layer_input_norm.weight": norm_target(self.norm_D),
        }


def in_dtype(value: float, runtime: Runtime) -> float:
    """The number as the model's dtype rounds it, as transformers keeps factors of embeddings."""
    return float(torch.tensor(value).to(runtime.dtype))


def norm_target(weight: Tensor) -> WeightTarget:
    """A norm's weight, or a scale: ones where weights are random."""
    return WeightTarget.whole(weight, init="ones")
