"""The layer behind the last one in checkpoints of DeepSeek V3, R1, V3.2, GLM-4.7-Flash and GLM-5, which drafts tokens.

It normalises the embedding of the next token and the model's last hidden state, projects both to one, and passes that
through a layer like the model's own; embedding and head are the model's. Several such layers are drafted with the first
one. Source: multi-token prediction, DeepSeek-V3 technical report, arXiv:2412.19437, section 2.2.
Legend: T entries, N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Attend, ModelSpec, Rope, Runtime, WeightTarget
from hookline.core.errors import CheckpointError
from hookline.core.layers import (
    FinalNorm,
    ParallelHead,
    ReplicatedLinear,
    Residual,
    VocabParallelEmbedding,
    empty_parameter,
    rope_table,
)
from hookline.plugins.models.deepseek import Deepseek, DeepseekLayer
from hookline.plugins.models.deepseek_config import LatentShape, read_config


class DeepseekNextn:
    """Two norms, a projection, a layer, a norm, and the model's embedding and head. Implements DraftHead."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        shape = read_config(hf_config)
        self.spec: ModelSpec = replace(Deepseek.spec(hf_config), num_layers=1)
        self.runtime, self.eps, self.is_tied = runtime, shape.eps, shape.is_tied
        self.name = f"model.layers.{shape.num_layers}"
        num_positions = max(shape.max_position, runtime.max_model_len)
        rope = Rope(rope_table(shape.rope, shape.rope_dim, num_positions).to(runtime.device))
        hidden = shape.hidden_size
        self.embed = VocabParallelEmbedding(shape.vocab_size, hidden, runtime, is_tied=shape.is_tied)
        self.model_norm = FinalNorm(hidden, shape.eps, runtime)
        self.token_norm_D, self.hidden_norm_D = empty_parameter(runtime, hidden), empty_parameter(runtime, hidden)
        self.project = ReplicatedLinear(2 * hidden, [hidden], runtime)
        self.layer = DeepseekLayer(shape.num_layers, _with_layer(shape), rope, runtime)
        self.norm = FinalNorm(hidden, shape.eps, runtime)
        self.head = ParallelHead(shape.vocab_size, hidden, runtime, tied_to=self.embed if shape.is_tied else None)

    def weight_targets(self, stored: Mapping[str, tuple[int, ...]]) -> Mapping[str, WeightTarget]:
        """See DraftHead. The embedding and the head are read from the layer's copies if it has any."""
        if stored and not any(name.startswith(f"{self.name}.") for name in stored):
            raise CheckpointError(f"it has no tensors {self.name}.*, which are the layer that drafts tokens")
        embed = _first_stored(stored, f"{self.name}.embed_tokens", "model.embed_tokens")
        head = _first_stored(stored, f"{self.name}.shared_head.head", "lm_head")
        return {
            **self.embed.targets(embed),
            **({} if self.is_tied else self.head.targets(head)),
            **self.model_norm.targets("model.norm"),
            f"{self.name}.enorm.weight": WeightTarget.whole(self.token_norm_D, init="ones"),
            f"{self.name}.hnorm.weight": WeightTarget.whole(self.hidden_norm_D, init="ones"),
            **self.project.targets(f"{self.name}.eh_proj"),
            **self.layer.weight_targets(),
            **self.norm.targets(f"{self.name}.shared_head.norm"),
        }

    def combine(self, streams: Sequence[Tensor]) -> Tensor:
        """See DraftHead: the model's last hidden states behind its final norm."""
        return self.model_norm(streams[-1])

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attend: Attend) -> Tensor:
        """See DraftHead."""
        norm = self.runtime.kernels.rms_norm
        token_TD = norm(self.embed(token_ids_T), self.token_norm_D, self.eps)
        both_TD = torch.cat([token_TD, norm(hidden_TH, self.hidden_norm_D, self.eps)], -1)
        residual = Residual(self.project(both_TD), self.eps, self.runtime, in_chunks=False)
        self.layer(residual, attend)
        return self.norm(residual)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """See DraftHead."""
        return self.head(hidden_NH)


def _with_layer(shape: LatentShape) -> LatentShape:
    """The shape with one more layer, which has experts if the model has any."""
    behind = {shape.num_layers} if shape.routing is not None else set()
    return replace(shape, sparse_layers=shape.sparse_layers | behind)


def _first_stored(stored: Mapping[str, tuple[int, ...]], *names: str) -> str:
    """The first of these tensors that the checkpoint has; else the last one, the model's own."""
    return next((name for name in names if f"{name}.weight" in stored), names[-1])
