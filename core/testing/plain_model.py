"""A small model that is obviously right: embedding, layers of attention and a gated feed-forward, a head.

Used to test the models' conformance suite, and a model plugin to start from. It uses core's tensor-parallel layers and
the rotary table, and refuses unsupported configs. Legend: as in core/contracts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Attend, ModelSpec, Rope, Runtime, WeightTarget
from hookline.core.errors import ConfigError
from hookline.core.layers import (
    GatedMLP,
    ParallelHead,
    QKVParallelLinear,
    Residual,
    RowParallelLinear,
    VocabParallelEmbedding,
    rope_settings,
    rope_table,
)

EPS = 1e-6
"""Of its norms."""
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size")
"""Keys of a config.json that must be there."""
PLAIN_CONFIG = {
    "model_type": "plain",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "vocab_size": 31,
    "max_position_embeddings": 64,
}
"""A config.json of a PlainModel that any test can afford."""


class PlainModel:
    """Implements hookline.core.contracts.Model. The head dim is hidden_size / num_attention_heads."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        spec = self.spec(hf_config)
        settings = rope_settings(hf_config)
        rope = Rope(rope_table(settings, spec.head_dim, settings.max_position).to(runtime.device))
        self.runtime = runtime
        self.embed = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, runtime)
        self.layers = [PlainLayer(index, spec, rope, runtime) for index in range(spec.num_layers)]
        self.norm_D = torch.empty(spec.hidden_size, device=runtime.device, dtype=runtime.dtype)
        self.head = ParallelHead(spec.vocab_size, spec.hidden_size, runtime)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model. Raises: ConfigError for another model_type, or a key that it does not know."""
        known = {*PLAIN_CONFIG, "rope_scaling", "rope_parameters", "rope_theta"}
        unknown = [key for key, value in hf_config.items() if key not in known and value is not None]
        if hf_config.get("model_type") != "plain" or unknown:
            raise ConfigError(f"not a plain model: model_type {hf_config.get('model_type')!r}, unknown keys {unknown}")
        for key in SIZES:
            if not isinstance(hf_config.get(key), int) or hf_config[key] < 1:
                raise ConfigError(f"{key} = {hf_config.get(key)!r} must be a positive whole number")
        layers, heads, kv_heads, hidden, vocab = (hf_config[key] for key in SIZES)
        if heads % kv_heads or hidden % (2 * heads):
            raise ConfigError(f"{heads} heads over {kv_heads} kv heads do not fit a hidden size of {hidden}")
        return ModelSpec(layers, heads, kv_heads, hidden // heads, hidden, vocab, rope_settings(hf_config).max_position)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        residual = Residual(self.embed(token_ids_T), EPS, self.runtime)
        for layer in self.layers:
            layer(residual, attend)
        return residual.norm(self.norm_D)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        targets = {
            **self.embed.targets("embed"),
            **self.head.targets("head"),
            "norm.weight": WeightTarget.whole(self.norm_D, init="ones"),
        }
        for layer in self.layers:
            targets |= layer.weight_targets()
        return targets


class PlainLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, index: int, spec: ModelSpec, rope: Rope, runtime: Runtime) -> None:
        hidden = spec.hidden_size
        self.index, self.rope = index, rope
        self.attention_norm_D, self.mlp_norm_D = torch.empty(2, hidden, device=runtime.device, dtype=runtime.dtype)
        self.qkv = QKVParallelLinear(hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim, runtime)
        self.output = RowParallelLinear(hidden, hidden, runtime)
        self.mlp = GatedMLP(hidden, 2 * hidden, runtime, what="2 * hidden_size")

    def __call__(self, residual: Residual, attend: Attend) -> None:
        """Norm, attention, add; norm, feed-forward, add."""
        attended_TD = attend(self.index, self.qkv(residual.norm(self.attention_norm_D)), self.rope)
        residual.add(attended_TD, through=self.output)
        residual.add(residual.norm(self.mlp_norm_D), through=self.mlp)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Names as layers.0.q.weight."""
        layer = f"layers.{self.index}"
        return {
            f"{layer}.attention_norm.weight": WeightTarget.whole(self.attention_norm_D, init="ones"),
            f"{layer}.mlp_norm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones"),
            **self.qkv.targets(f"{layer}.q", f"{layer}.k", f"{layer}.v"),
            **self.output.targets(f"{layer}.output"),
            **self.mlp.targets(layer, "gate", "up", "down"),
        }
