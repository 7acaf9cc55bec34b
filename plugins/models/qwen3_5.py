"""Qwen3.5 and Qwen3.6, dense and with experts: Qwen3-Next's network, its delta nets with projections stored apart.

Three of four layers are gated delta nets, arXiv:2412.06464, the fourth attends behind a gate; a quarter of each head is
rotated. Every layer has one feed-forward, or experts and a shared one, as in Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.core.contracts import Runtime, WeightTarget
from hookline.plugins.models.qwen3_5_config import read_config
from hookline.plugins.models.qwen3_next import GatedDeltaNet, Qwen3Next
from hookline.plugins.models.qwen3_next_config import Shape


class Qwen3_5(Qwen3Next):
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model."""

    @staticmethod
    def shape(hf_config: Mapping[str, Any]) -> Shape:
        """The sizes in a config.json."""
        return read_config(hf_config)

    @staticmethod
    def delta_net(index: int, shape: Shape, runtime: Runtime) -> GatedDeltaNet:
        """The mixer of a layer that keeps a state."""
        return DeltaNetOfParts(index, shape, runtime)


class DeltaNetOfParts(GatedDeltaNet):
    """A delta net whose queries, keys and values are one tensor, and the gate, beta and decay one each."""

    def projection_targets(self, name: str) -> dict[str, WeightTarget]:
        """Rows lie by kind, in each kind by head."""
        views, parts = self.projections.weight_OD.split_with_sizes(self.widths), self.projections.parts
        *qkv, z, beta, decay = (
            WeightTarget.shard(view_OD, 0, part) for view_OD, part in zip(views, parts, strict=True)
        )
        return {
            f"{name}.in_proj_qkv.weight": WeightTarget.joined(qkv),
            f"{name}.in_proj_z.weight": z,
            f"{name}.in_proj_b.weight": beta,
            f"{name}.in_proj_a.weight": decay,
        }
