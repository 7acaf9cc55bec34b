"""Qwen3-Next: gated delta nets, arXiv:2412.06464, gated attention on every fourth layer, experts and a shared one.

Knows its config.json and its weight names; not how attention, states or experts are computed, what a request is, or
where weights lie. A norm multiplies by one more than the checkpoint's weight; the sum is kept in float32.
Legend: T tokens, N rows whose logits are wanted, D hidden, C channels of a delta net's convolution, K key heads,
H heads (value heads in a delta net), E head dim (of keys there), F head dim of values, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    Attend,
    DeltaNet,
    FullAttention,
    ModelSpec,
    Part,
    QKNorm,
    Rope,
    Runtime,
    WeightTarget,
    is_offered,
    wanted_rows,
)
from hookline.core.layers import (
    ColumnParallelLinear,
    GatedMLP,
    MergedColumnParallelLinear,
    ParallelExperts,
    ParallelHead,
    QKVParallelLinear,
    Residual,
    RowParallelLinear,
    SoftmaxRouter,
    StageLayers,
    VocabParallelEmbedding,
    empty_parameter,
    even_part,
    plain_gated_delta_rule,
    plain_short_convolution,
    rope_table,
    stage_input,
    tapped,
)
from hookline.plugins.models.qwen3_next_config import Shape, read_config


class Qwen3Next:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = self.shape(hf_config)
        rope = Rope(rope_table(shape.rope, shape.head_dim, shape.rope.max_position).to(runtime.device))
        self.runtime, self.eps = runtime, shape.eps
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)

        def layer(index: int) -> Qwen3NextLayer:
            return Qwen3NextLayer(index, shape, rope, runtime, self.delta_net)

        self.layers = StageLayers(layer, shape.num_layers, runtime)
        self.is_last = runtime.stage.is_last
        self.norm_D = float_parameter(runtime, shape.hidden_size if self.is_last else 0)
        tied_to = self.embed if shape.is_tied else None
        self.head = ParallelHead(shape.vocab_size, shape.hidden_size, runtime, tied_to=tied_to)

    @staticmethod
    def shape(hf_config: Mapping[str, Any]) -> Shape:
        """The sizes in a config.json."""
        return read_config(hf_config)

    @staticmethod
    def delta_net(index: int, shape: Shape, runtime: Runtime) -> GatedDeltaNet:
        """The mixer of a layer that keeps a state."""
        return GatedDeltaNet(index, shape, runtime)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model."""
        shape = cls.shape(hf_config)
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
        # Not in chunks of rows: each chunk would read every expert's weights again.
        """See Model."""
        residual = Residual(stage_input(self.embed, token_ids_T, attend), self.eps, self.runtime, in_chunks=False)
        for layer in tapped(self.layers, residual, attend):
            layer(residual, attend)
        return residual.norm(self.norm_D) if self.is_last else residual.stream()

    def final_norm(self, stream_XD: Tensor) -> Tensor:
        """See NormsStreams."""
        return self.runtime.kernels.rms_norm(stream_XD, self.norm_D, self.eps)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model. A checkpoint's layers for drafting several tokens are left out."""
        return {
            **self.embed.targets("model.embed_tokens"),
            **self.layers.targets("model.layers"),
            "model.norm.weight": norm_target(self.norm_D) if self.is_last else WeightTarget.ignored(),
            **self.head.targets("lm_head"),
            "mtp.*": WeightTarget.ignored(),
        }


class Qwen3NextLayer:
    """A delta net or attention, then experts or one feed-forward, each behind a norm and around a residual."""

    def __init__(
        self,
        index: int,
        shape: Shape,
        rope: Rope,
        runtime: Runtime,
        delta_net: Callable[[int, Shape, Runtime], GatedDeltaNet],
    ) -> None:
        self.name, self.is_last = f"model.layers.{index}", index == shape.num_layers - 1
        attends, is_sparse = isinstance(shape.layers[index], FullAttention), index in shape.sparse_layers
        self.mixer_norm_D = float_parameter(runtime, shape.hidden_size)
        self.mixer = GatedAttention(index, shape, rope, runtime) if attends else delta_net(index, shape, runtime)
        self.mlp_norm_D = float_parameter(runtime, shape.hidden_size)
        dense = GatedMLP(shape.hidden_size, shape.intermediate_size, runtime) if not is_sparse else None
        self.mlp = dense or Experts(shape, runtime)

    def __call__(self, residual: Residual, attend: Attend) -> None:
        residual.add(self.mixer(residual.norm(self.mixer_norm_D), attend), through=self.mixer.output)
        if self.is_last:
            residual.keep(wanted_rows(attend))
        residual.add(residual.norm(self.mlp_norm_D), through=self.mlp)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        return {
            f"{self.name}.input_layernorm.weight": norm_target(self.mixer_norm_D),
            f"{self.name}.post_attention_layernorm.weight": norm_target(self.mlp_norm_D),
            **self.mixer.targets(self.name),
            **self.mlp.targets(f"{self.name}.mlp", "gate_proj", "up_proj", "down_proj"),
        }


class GatedAttention:
    """Attention whose result is multiplied by a sigmoid of the layer's input, feature by feature."""

    def __init__(self, index: int, shape: Shape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.rope, hidden, head_dim = index, rope, shape.hidden_size, shape.head_dim
        self.head_dim, self.kernels = head_dim, runtime.kernels
        self.qkv = QKVParallelLinear(hidden, shape.num_heads, shape.num_kv_heads, head_dim, runtime)
        self.gate = ColumnParallelLinear(hidden, shape.num_heads * head_dim, runtime)
        self.qk_norm = QKNorm(float_parameter(runtime, head_dim), float_parameter(runtime, head_dim), shape.eps)
        self.output = RowParallelLinear(shape.num_heads * head_dim, hidden, runtime)

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        attended_TC = attend(self.index, self.qkv(x_TD), self.rope, self.qk_norm)
        return self.kernels.sigmoid_mul(attended_TC, self.gate(x_TD))

    def targets(self, layer: str) -> dict[str, WeightTarget]:
        """A head's queries lie before its gate in one tensor."""
        name, (k_part, v_part) = f"{layer}.self_attn", self.qkv.parts[1:]
        q_OD, k_OD, v_OD = self.qkv.weight_OD.split_with_sizes([part.size for part in self.qkv.parts])
        return {
            f"{name}.q_proj.weight": by_head([q_OD, self.gate.weight_OD], [self.head_dim] * 2, self.qkv.q_heads),
            f"{name}.k_proj.weight": WeightTarget.shard(k_OD, 0, k_part),
            f"{name}.v_proj.weight": WeightTarget.shard(v_OD, 0, v_part),
            f"{name}.q_norm.weight": norm_target(self.qk_norm.q_weight_E),
            f"{name}.k_norm.weight": norm_target(self.qk_norm.k_weight_E),
            **self.output.targets(f"{name}.o_proj"),
        }


class GatedDeltaNet:
    """Linear attention behind a short convolution; its state forgets and corrects itself. Split by key heads."""

    def __init__(self, index: int, shape: Shape, runtime: Runtime) -> None:
        self.index, self.kernels = index, runtime.kernels
        sizes, hidden = shape.delta, shape.hidden_size
        self.sizes, self.key_heads = sizes, even_part(sizes.num_key_heads, runtime.ranks, "linear_num_key_heads")
        keys, values = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
        what, value_heads = "linear_num_value_heads", sizes.num_value_heads
        parts = [keys, keys, values, values, value_heads, value_heads]
        self.projections = MergedColumnParallelLinear(hidden, parts, runtime, what=what)
        self.widths = [part.size for part in self.projections.parts]
        self.conv_CW = empty_parameter(runtime, sum(self.widths[:3]), sizes.conv_width)
        self.decay_bias_H, self.log_rate_H = (float_parameter(runtime, self.key_heads.size * sizes.group) for _ in "ab")
        self.norm_F = empty_parameter(runtime, sizes.value_dim)
        self.net = DeltaNet(self.conv_CW, self.log_rate_H, self.decay_bias_H, self.norm_F, shape.eps)
        self.output = RowParallelLinear(values, hidden, runtime)
        self._has_conv = is_offered(runtime.kernels.short_convolution)
        self._has_rule = is_offered(runtime.kernels.gated_delta_rule)
        self._has_net = is_offered(runtime.kernels.gated_delta_net)

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        states, sizes = attend.states(self.index), self.sizes
        joined = [sum(self.widths[:3]), *self.widths[3:]]
        mixed_TC, z_TV, beta_TH, decay_TH = self.projections(x_TD).split_with_sizes(joined, -1)
        z_THF = z_TV.view(len(z_TV), -1, sizes.value_dim)
        conv_RCP, memory_RHEF = states.tensors["conv"], states.tensors["memory"]
        if self._has_net:
            given = mixed_TC, beta_TH, decay_TH, z_THF, self.net, conv_RCP, memory_RHEF, states
            return self.kernels.gated_delta_net(*given).flatten(1)
        convolve = self.kernels.short_convolution if self._has_conv else plain_short_convolution
        rule = self.kernels.gated_delta_rule if self._has_rule else plain_gated_delta_rule
        mixed_TC = convolve(mixed_TC, self.conv_CW, conv_RCP, states)
        q_TKE, k_TKE, v_THF = (
            one.view(len(one), -1, size)
            for one, size in zip(
                mixed_TC.split_with_sizes(self.widths[:3], -1),
                (sizes.key_dim, sizes.key_dim, sizes.value_dim),
                strict=True,
            )
        )
        gates = self.kernels.delta_gates(beta_TH, decay_TH, self.log_rate_H, self.decay_bias_H)
        out_THF = rule(q_TKE, k_TKE, v_THF, *gates, memory_RHEF, states)
        return self.kernels.rms_norm_silu_mul(out_THF, self.norm_F, self.net.eps, z_THF).flatten(1)

    def targets(self, layer: str) -> dict[str, WeightTarget]:
        """The convolution's rows lie by kind: queries, keys, values."""
        name, value_heads = f"{layer}.linear_attn", self.key_heads.times(self.sizes.group)
        channels = [
            WeightTarget.shard(view_CW.unsqueeze(1), 0, part)
            for view_CW, part in zip(
                self.conv_CW.split_with_sizes(self.widths[:3]), self.projections.parts, strict=False
            )
        ]
        return {
            **self.projection_targets(name),
            f"{name}.conv1d.weight": WeightTarget.joined(channels),
            f"{name}.dt_bias": WeightTarget.shard(self.decay_bias_H, 0, value_heads, init="ones"),
            f"{name}.A_log": WeightTarget.shard(self.log_rate_H, 0, value_heads, init="zeros"),
            f"{name}.norm.weight": WeightTarget.whole(self.norm_F, init="ones"),
            **self.output.targets(f"{name}.out_proj"),
        }

    def projection_targets(self, name: str) -> dict[str, WeightTarget]:
        """Two tensors, whose rows lie by key head."""
        sizes, views = self.sizes, self.projections.weight_OD.split_with_sizes(self.widths)
        of_head = [sizes.key_dim] * 2 + [sizes.group * sizes.value_dim] * 2
        return {
            f"{name}.in_proj_qkvz.weight": by_head(views[:4], of_head, self.key_heads),
            f"{name}.in_proj_ba.weight": by_head(views[4:], [sizes.group] * 2, self.key_heads),
        }


class Experts:
    """A router and its experts, and a shared expert for every token, whose result is multiplied by a gate."""

    def __init__(self, shape: Shape, runtime: Runtime) -> None:
        num_experts, hidden = shape.num_experts, shape.hidden_size
        self.ranks, self.kernels = runtime.ranks, runtime.kernels
        normalise = shape.normalises_weights
        self.router = SoftmaxRouter(num_experts, hidden, shape.num_chosen, runtime, normalise=normalise, num_gates=1)
        self.experts = ParallelExperts(num_experts, hidden, shape.expert_size, runtime, what="moe_intermediate_size")
        self.shared = GatedMLP(hidden, shape.shared_size, runtime, what="shared_expert_intermediate_size")

    def local(self, x_TD: Tensor) -> Tensor:
        """Partial sum of this rank: (T, D)."""
        expert_TA, weight_TA, gate_T1 = self.router.with_gates(x_TD)
        return self.experts.local_with_shared(x_TD, expert_TA, weight_TA, self.shared, gate_T1)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks and the residual."""
        return self.ranks.add_rms_norm(self.kernels, self.local(x_TD), residual_TD, norm_weight_D, eps)

    def targets(self, name: str, gate: str, up: str, down: str) -> dict[str, WeightTarget]:
        """The router's and the experts' checkpoint tensors, and where this rank puts them."""
        return {
            **self.router.targets(f"{name}.gate"),
            **self.experts.targets(f"{name}.experts", gate, up, down),
            **self.shared.targets(f"{name}.shared_expert", gate, up, down),
            f"{name}.shared_expert_gate.weight": WeightTarget.whole(self.router.gate_GD),
        }


def by_head(views: Sequence[Tensor], sizes: Sequence[int], heads: Part) -> WeightTarget:
    """A checkpoint tensor whose rows lie head by head, and within a head part by part; sizes: rows of each part.

    views: for each part, its rows of this rank's heads.
    """
    of_head, pieces = sum(sizes), []
    for place in range(heads.size):
        row = (heads.start + place) * of_head
        for view_OD, size in zip(views, sizes, strict=True):
            shape = (heads.total * of_head, *view_OD.shape[1:])
            pieces.append(WeightTarget(view_OD[place * size : (place + 1) * size], shape, 0, row, row + size))
            row += size
    return replace(pieces[0], more=tuple(pieces[1:]))


def float_parameter(runtime: Runtime, size: int) -> Tensor:
    """A vector in float32."""
    return torch.empty(size, device=runtime.device, dtype=torch.float32)


def norm_target(weight: Tensor) -> WeightTarget:
    """The checkpoint stores one less."""
    return WeightTarget.whole(weight, init="zeros", add=1.0)
