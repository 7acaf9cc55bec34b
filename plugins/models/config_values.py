"""Reads a config.json key by key: each value is checked, and what a model does not implement is refused by name.

Knows no model and nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hookline.core.errors import ConfigError

_MOST_SHOWN = 120


@dataclass(frozen=True)
class ConfigValues:
    """A config.json and the name of the model that reads it, for the messages."""

    values: Mapping[str, Any]
    model: str

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a missing or null one is the default.

        Raises: ConfigError.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "a positive whole number")
        return value

    def only(self, key: str, value: Any) -> None:
        """Refuse any other value than this one, which is also what a missing key means."""
        if self.values.get(key, value) != value:
            self.refuse(key, str(value))

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raise ConfigError with the key, its value and what is supported."""
        value = repr(self.values[key]) if key in self.values else "missing"
        raise ConfigError(f"{self.model} does not support {key} = {value[:_MOST_SHOWN]}; supported: {supported}")

    def refuse_other_architectures(self, model_type: str, architecture: str) -> None:
        """Refuse checkpoints of other models, quantised ones, and attention that is not causal over everything."""
        self.only("model_type", model_type)
        if architecture not in (self.values.get("architectures") or [architecture]):
            self.refuse("architectures", architecture)
        self.only("hidden_act", "silu")
        if self.values.get("use_sliding_window"):
            self.refuse("use_sliding_window", "false")
        if set(self.values.get("layer_types") or ()) - {"full_attention"}:
            self.refuse("layer_types", "full_attention in every layer")
        if self.values.get("quantization_config"):
            self.refuse("quantization_config", "unquantised checkpoints")

    def check_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Refuse heads that cannot share the kv heads evenly, or that cannot be rotated."""
        if num_heads % num_kv_heads:
            self.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
        if head_dim % 2 or head_dim < 4:
            self.refuse("head_dim", "an even number from 4")
