"""DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash: multi-head latent attention and experts.

arXiv:2405.04434, arXiv:2412.19437.

Attention is computed in its absorbed form, for prompts and decodes alike: the matrix that makes a head's keys of the
latent multiplies its queries, and the matrix that makes its values multiplies its attention output. So all heads attend
over the latents themselves, which are the cache's keys, with the rotated part of the keys before them; values are their
last numbers.
Knows its config.json and its weight names; not how attention or experts are computed, what a request is, or where
weights lie. Every rank computes all latents, and attends with its own heads.
Legend: T tokens, N rows whose logits are wanted, D hidden, H heads of this rank, L latent, R rotated numbers of a key,
E = R + L, P numbers of a query that are not rotated, F numbers of a value, C columns of all heads, X experts, A experts
of a token, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    Attend,
    AttentionForm,
    DraftHead,
    ModelSpec,
    Part,
    Rope,
    Runtime,
    WeightTarget,
    is_offered,
    wanted_rows,
)
from hookline.core.layers import (
    ColumnParallelLinear,
    FinalNorm,
    GatedMLP,
    ParallelExperts,
    ParallelHead,
    ReplicatedLinear,
    Residual,
    RowParallelLinear,
    StageLayers,
    VocabParallelEmbedding,
    empty_parameter,
    even_part,
    plain_route_experts,
    rope_table,
    stage_input,
    tapped,
    with_shared_experts,
)
from hookline.plugins.models.deepseek_config import NORM_EPS, LatentShape, Routing, read_config


class Deepseek:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    runs_in_stages = True

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        rope = Rope(rope_table(shape.rope, shape.rope_dim, shape.max_position).to(runtime.device))
        self.runtime, self.eps = runtime, shape.eps
        self.embed = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, runtime, is_tied=shape.is_tied)
        self.layers = StageLayers(lambda index: DeepseekLayer(index, shape, rope, runtime), shape.num_layers, runtime)
        self.norm = FinalNorm(shape.hidden_size, shape.eps, runtime)
        tied_to = self.embed if shape.is_tied else None
        self.head = ParallelHead(shape.vocab_size, shape.hidden_size, runtime, tied_to=tied_to)
        self.num_layers = shape.num_layers

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model. The one kv head is the latent, which every rank has."""
        shape = read_config(hf_config)
        return ModelSpec(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=1,
            head_dim=shape.rope_dim + shape.latent,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            max_position=shape.max_position,
            attention=frozenset({"scale"}),
            value_dim=shape.latent,
        )

    @classmethod
    def draft_head(cls) -> type[DraftHead]:
        """See HasDraftHead."""
        from hookline.plugins.models.deepseek_nextn import DeepseekNextn

        return DeepseekNextn

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
        """See Model. Layers behind the last one, which draft tokens (deepseek_nextn.py), are left out, and indexers."""
        indexers = {
            f"model.layers.{index}.self_attn.indexer.*": WeightTarget.ignored() for index in range(self.num_layers)
        }
        return {
            **self.embed.targets("model.embed_tokens"),
            **self.layers.targets("model.layers"),
            **self.norm.targets("model.norm"),
            **self.head.targets("lm_head"),
            **indexers,
            f"model.layers.{self.num_layers}.*": WeightTarget.ignored(),
        }


class DeepseekLayer:
    """Attention, then experts or one feed-forward, each behind a norm and around a residual."""

    def __init__(self, index: int, shape: LatentShape, rope: Rope, runtime: Runtime) -> None:
        self.name, self.is_last = f"model.layers.{index}", index == shape.num_layers - 1
        self.attention_norm_D = empty_parameter(runtime, shape.hidden_size)
        self.attention = LatentAttention(index, shape, rope, runtime)
        self.mlp_norm_D = empty_parameter(runtime, shape.hidden_size)
        self.mlp: Experts | GatedMLP
        if shape.routing is not None and index in shape.sparse_layers:
            self.mlp = Experts(shape.hidden_size, shape.routing, runtime)
        else:
            self.mlp = GatedMLP(shape.hidden_size, shape.intermediate_size, runtime)

    def __call__(self, residual: Residual, attend: Attend) -> None:
        """Norm, attention, add; norm, experts or feed-forward, add."""
        attended_TC = self.attention(residual.norm(self.attention_norm_D), attend)
        residual.add(attended_TC, through=self.attention.output)
        if self.is_last:
            residual.keep(wanted_rows(attend))
        residual.add(residual.norm(self.mlp_norm_D), through=self.mlp)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """The layer's checkpoint tensors, and where this rank puts them."""
        return {
            f"{self.name}.input_layernorm.weight": WeightTarget.whole(self.attention_norm_D, init="ones"),
            f"{self.name}.post_attention_layernorm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones"),
            **self.attention.targets(f"{self.name}.self_attn"),
            **self.mlp.targets(f"{self.name}.mlp", "gate_proj", "up_proj", "down_proj"),
        }


class LatentAttention:
    """All heads attend over one latent for each token; see the module."""

    def __init__(self, index: int, shape: LatentShape, rope: Rope, runtime: Runtime) -> None:
        self.index, self.shape, self.rope, self.kernels = index, shape, rope, runtime.kernels
        heads = even_part(shape.num_heads, runtime.ranks, "num_attention_heads")
        hidden, bias, query_dim = shape.hidden_size, shape.attention_bias, shape.plain_dim + shape.rope_dim
        self.has_q_latent, num_down = shape.q_rank > 0, shape.latent + shape.rope_dim
        # Queries of the layer's input share its product, if both are stored alike and have no bias.
        self.shares_product = not (self.has_q_latent or bias) and runtime.weights is None
        self.down: ColumnParallelLinear
        if self.shares_product:
            self.down = QueriesAndLatent(hidden, heads.times(query_dim), num_down, runtime)
            self.widths = [heads.size * query_dim, num_down]
        else:
            self.widths = [*([shape.q_rank] if self.has_q_latent else []), num_down]
            self.down = ReplicatedLinear(hidden, self.widths, runtime, bias=bias)
            self.queries = ColumnParallelLinear(shape.q_rank or hidden, shape.num_heads * query_dim, runtime)
        self.q_norm_Q = empty_parameter(runtime, shape.q_rank)
        self.latent_norm_L = empty_parameter(runtime, shape.latent)
        self.up = ColumnParallelLinear(shape.latent, shape.num_heads * (shape.plain_dim + shape.value_dim), runtime)
        # Made plain, for queries are multiplied by its transpose.
        up_HOL = self.up.weight_OD.view(heads.size, shape.plain_dim + shape.value_dim, shape.latent)
        self.keys_HPL, self.values_HFL = up_HOL[:, : shape.plain_dim], up_HOL[:, shape.plain_dim :]
        self.output = RowParallelLinear(shape.num_heads * shape.value_dim, hidden, runtime, bias=bias)
        self.form = AttentionForm(scale=shape.scale)

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        """The attention output of this rank's heads: (T, D) -> (T, H * F)."""
        kernels, num_heads = self.kernels, len(self.keys_HPL)
        *of_queries, latent_TE = self.down(x_TD).split_with_sizes(self.widths, -1)
        if self.shares_product:
            (q_TC,) = of_queries
        else:
            for latent_TQ in of_queries:
                x_TD = kernels.rms_norm(latent_TQ, self.q_norm_Q, NORM_EPS)
            q_TC = self.queries(x_TD)
        qk_TC = kernels.latent_queries_keys(
            q_TC.view(len(x_TD), num_heads, -1), latent_TE, self.keys_HPL, self.latent_norm_L, NORM_EPS,
            self.shape.is_interleaved,
        )  # fmt: skip
        attended_TC = attend(self.index, qk_TC, self.rope, None, self.form)
        return kernels.heads_linear(attended_TC.view(len(x_TD), num_heads, -1), self.values_HFL)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """The projections and their norms."""
        of_latent = f"{name}.kv_a_proj_with_mqa"
        if self.shares_product:
            down = self.down.targets(f"{name}.q_proj", of_latent)
        elif self.has_q_latent:
            q_norm = {f"{name}.q_a_layernorm.weight": WeightTarget.whole(self.q_norm_Q, init="ones")}
            down = {**self.down.targets(f"{name}.q_a_proj", of_latent), **q_norm}
            down |= self.queries.targets(f"{name}.q_b_proj")
        else:
            down = {**self.down.targets(of_latent), **self.queries.targets(f"{name}.q_proj")}
        return {
            **down,
            f"{name}.kv_a_layernorm.weight": WeightTarget.whole(self.latent_norm_L, init="ones"),
            **self.up.targets(f"{name}.kv_b_proj"),
            **self.output.targets(f"{name}.o_proj"),
        }


class QueriesAndLatent(ColumnParallelLinear):
    """Queries of this rank's heads, and the latent with its rotated key, which every rank computes whole."""

    def __init__(self, in_features: int, queries: Part, num_latent: int, runtime: Runtime) -> None:
        self._allocate(in_features, [queries, Part(num_latent, 0, num_latent)], runtime, bias=False)


class Experts:
    """A router and the experts it chooses from, and experts that every token takes, as one feed-forward."""

    def __init__(self, hidden: int, routing: Routing, runtime: Runtime) -> None:
        self.ranks, self.kernels, size = runtime.ranks, runtime.kernels, routing.expert_size
        # Experts of a checkpoint that is quantised may be stored in another way than those that every token takes.
        joined = routing.num_shared if runtime.weights is None else 0
        self.router = Router(hidden, routing, joined, runtime)
        self.experts = ParallelExperts(
            routing.num_experts, hidden, size, runtime, what="moe_intermediate_size", num_shared=joined
        )
        self.shared: GatedMLP | None = None
        if routing.num_shared > joined:
            what = "n_shared_experts * moe_intermediate_size"
            self.shared = GatedMLP(hidden, routing.num_shared * size, runtime, what=what)

    def local(self, x_TD: Tensor) -> Tensor:
        """Partial sum of this rank: (T, D)."""
        routed_TD = self.experts.local(x_TD, *self.router(x_TD))
        return routed_TD if self.shared is None else routed_TD + self.shared.local(x_TD)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks and the residual."""
        if self.shared is None:
            return self.experts.add_rms_norm(x_TD, *self.router(x_TD), residual_TD, norm_weight_D, eps)
        return self.ranks.add_rms_norm(self.kernels, self.local(x_TD), residual_TD, norm_weight_D, eps)

    def targets(self, name: str, gate: str, up: str, down: str) -> dict[str, WeightTarget]:
        """The router's and the experts' checkpoint tensors, and where this rank puts them."""
        of_shared = f"{name}.shared_experts"
        shared = {} if self.shared is None else self.shared.targets(of_shared, gate, up, down)
        experts = self.experts.targets(f"{name}.experts", gate, up, down, of_shared)
        return {**self.router.targets(f"{name}.gate"), **experts, **shared}


class Router:
    """Scores every expert for every token in float32, and takes the best few, of the best groups if there are any.

    num_shared: experts behind those that are scored, which every token takes with weight 1.
    """

    def __init__(self, hidden: int, routing: Routing, num_shared: int, runtime: Runtime) -> None:
        self.routing, self.num_shared, self.kernels = routing, num_shared, runtime.kernels
        self.weight_XD = torch.empty(routing.num_experts, hidden, dtype=torch.float32, device=runtime.device)
        self.correction_X = torch.empty(routing.num_experts, dtype=torch.float32, device=runtime.device)
        self._route = (
            runtime.kernels.route_experts if is_offered(runtime.kernels.route_experts) else plain_route_experts
        )

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, and their weights: (T, A) int64 and (T, A) float32."""
        routing = self.routing
        logits_TX = self.kernels.router_logits(x_TD, self.weight_XD)
        if routing.by_softmax and routing.num_groups == 1 and routing.factor == 1:
            if self.num_shared:
                return self._route(logits_TX, routing.num_chosen, False, None, self.num_shared)
            return self._route(logits_TX, routing.num_chosen, False)
        score_TX = logits_TX.softmax(-1) if routing.by_softmax else logits_TX.sigmoid()
        choice_TX = score_TX if routing.by_softmax else score_TX + self.correction_X
        if routing.num_groups > 1:
            choice_TX = self._of_best_groups(choice_TX)
        expert_TA = choice_TX.topk(routing.num_chosen).indices
        weight_TA = score_TX.gather(1, expert_TA)
        if routing.normalises:
            weight_TA = weight_TA / (weight_TA.sum(-1, keepdim=True) + 1e-20)
        return with_shared_experts(expert_TA, weight_TA * routing.factor, routing.num_experts, self.num_shared)

    def _of_best_groups(self, choice_TX: Tensor) -> Tensor:
        """The scores, -inf where an expert is in none of a token's best groups.

        A group is as good as its best expert, or with sigmoids as the sum of its best two.
        """
        routing = self.routing
        choice_TGX = choice_TX.view(len(choice_TX), routing.num_groups, -1)
        best_TG = choice_TGX.topk(1 if routing.by_softmax else 2).values.sum(-1)
        chosen_TB = best_TG.topk(routing.num_chosen_groups).indices
        is_left_out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, chosen_TB, False)
        return choice_TGX.masked_fill(is_left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """The whole matrix, and the correction if scores are sigmoids."""
        targets = {f"{name}.weight": WeightTarget.whole(self.weight_XD)}
        if not self.routing.by_softmax:
            targets[f"{name}.e_score_correction_bias"] = WeightTarget.whole(self.correction_X, init="zeros")
        return targets
