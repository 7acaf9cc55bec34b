"""Llama (dense), arXiv:2307.09288: grouped-query attention with RoPE, SwiGLU, norms before each part.

Knows its config.json and its weights' names, as Hugging Face has them; hookline_smollm2/gguf_checkpoint.py translates
GGUF's. Legend: T tokens, N rows whose logits are wanted, D hidden, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from hookline.core.contracts import Attend, CheckpointSource, ModelSpec, Rope, Runtime, WeightTarget
from hookline.core.errors import ConfigError
from hookline.core.layers import (
    GatedMLP,
    ParallelHead,
    QKVParallelLinear,
    Residual,
    RowParallelLinear,
    VocabParallelEmbedding,
    empty_parameter,
    rope_settings,
    rope_table,
)
from hookline_smollm2 import SmolLM2Config

FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None}
"""What this implementation computes; any other value is refused."""


class Llama:
    """Embedding, layers, final norm, head. Implements hookline.core.contracts.Model and OpensCheckpoint."""

    def __init__(self, hf_config: Mapping[str, Any], runtime: Runtime) -> None:
        spec = self.spec(hf_config)
        rope = Rope(rope_table(rope_settings(hf_config), spec.head_dim, spec.max_position).to(runtime.device))
        self.runtime, self.eps = runtime, float(hf_config.get("rms_norm_eps", 1e-6))
        self.embed = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, runtime)
        inner = whole_number(hf_config, "intermediate_size")
        self.layers = [LlamaLayer(index, spec, inner, rope, runtime) for index in range(spec.num_layers)]
        self.norm_D = empty_parameter(runtime, spec.hidden_size)
        tied_to = self.embed if hf_config.get("tie_word_embeddings") else None
        self.head = ParallelHead(spec.vocab_size, spec.hidden_size, runtime, tied_to=tied_to)

    @classmethod
    def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
        """See Model."""
        if hf_config.get("model_type", "llama") != "llama":
            refuse(hf_config, "model_type", "llama")
        for key, value in FIXED.items():
            if hf_config.get(key, value) != value:
                refuse(hf_config, key, repr(value))
        whole_number(hf_config, "intermediate_size")
        heads, hidden = whole_number(hf_config, "num_attention_heads"), whole_number(hf_config, "hidden_size")
        kv_heads = whole_number(hf_config, "num_key_value_heads", heads)
        head_dim = whole_number(hf_config, "head_dim", hidden // heads)
        if heads % kv_heads:
            refuse(hf_config, "num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
        if head_dim % 2:
            refuse(hf_config, "head_dim", "an even number")
        return ModelSpec(
            num_layers=whole_number(hf_config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            vocab_size=whole_number(hf_config, "vocab_size"),
            max_position=rope_settings({"max_position_embeddings": 2048, **hf_config}).max_position,
        )

    @classmethod
    def open_checkpoint(cls, config: SmolLM2Config) -> CheckpointSource | None:
        """See OpensCheckpoint."""
        if not config.checkpoint.endswith(".gguf"):
            return None
        from hookline_smollm2.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint.find(config.checkpoint)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        residual = Residual(self.embed(token_ids_T), self.eps, self.runtime)
        for layer in self.layers:
            layer(residual, attend)
        return residual.norm(self.norm_D)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See Model."""
        return self.head(hidden_ND)

    def weight_targets(self) -> Mapping[str, WeightTarget]:
        """See Model."""
        targets = {
            **self.embed.targets("model.embed_tokens"),
            "model.norm.weight": WeightTarget.whole(self.norm_D, init="ones"),
            **self.head.targets("lm_head"),
        }
        for layer in self.layers:
            targets |= layer.weight_targets()
        return targets


class LlamaLayer:
    """Attention and a gated feed-forward, each behind a norm and around a residual."""

    def __init__(self, index: int, spec: ModelSpec, inner: int, rope: Rope, runtime: Runtime) -> None:
        hidden = spec.hidden_size
        self.index, self.rope = index, rope
        self.attention_norm_D = empty_parameter(runtime, hidden)
        self.qkv = QKVParallelLinear(hidden, spec.num_heads, spec.num_kv_heads, spec.head_dim, runtime)
        self.output = RowParallelLinear(spec.num_heads * spec.head_dim, hidden, runtime)
        self.mlp_norm_D = empty_parameter(runtime, hidden)
        self.mlp = GatedMLP(hidden, inner, runtime)

    def __call__(self, residual: Residual, attend: Attend) -> None:
        """Norm, attention, add; norm, feed-forward, add."""
        attended_TD = attend(self.index, residual.norm(self.attention_norm_D, self.qkv), self.rope)
        residual.add(attended_TD, through=self.output)
        residual.add(residual.norm_each(self.mlp_norm_D), through=self.mlp)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Hugging Face's names -> where this rank puts them."""
        layer = f"model.layers.{self.index}"
        attention = f"{layer}.self_attn"
        return {
            f"{layer}.input_layernorm.weight": WeightTarget.whole(self.attention_norm_D, init="ones"),
            f"{layer}.post_attention_layernorm.weight": WeightTarget.whole(self.mlp_norm_D, init="ones"),
            **self.qkv.targets(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.output.targets(f"{attention}.o_proj"),
            **self.mlp.targets(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj"),
        }


def whole_number(hf_config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size of the config.

    Raises: ConfigError if it is missing or no positive whole number.
    """
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(hf_config, key, "a positive whole number")
    return value


def refuse(hf_config: Mapping[str, Any], key: str, supported: str) -> NoReturn:
    """Say what is not implemented, as a ConfigError."""
    value = repr(hf_config[key]) if key in hf_config else "missing"
    raise ConfigError(f"hookline-smollm2's Llama does not support {key} = {value[:120]}; supported: {supported}")
