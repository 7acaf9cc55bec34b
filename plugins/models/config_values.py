"""Reads a config.json key by key: each value is checked, and what a model does not implement is refused by name.

Knows no model and nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hookline.core.errors import ConfigError, shown

MAX_SIZE = 2**24
"""Largest size that is believed: a larger one is a broken file, and would take the machine's memory."""
MAX_LAYERS = 10_000
"""Most layers that are believed."""


@dataclass(frozen=True)
class ConfigValues:
    """A config.json and the name of the model that reads it, for the messages."""

    values: Mapping[str, Any]
    model: str

    def size(self, key: str, default: int | None = None, *, limit: int = MAX_SIZE) -> int:
        """A whole number from 1 to the limit; a missing or null one is the default.

        Raises: ConfigError.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            self.refuse(key, f"a positive whole number of at most {limit}")
        return value

    def num_layers(self) -> int:
        """The number of layers.

        Raises: ConfigError.
        """
        return self.size("num_hidden_layers", limit=MAX_LAYERS)

    def eps(self, key: str = "rms_norm_eps", default: float = 1e-6) -> float:
        """A norm's epsilon.

        Raises: ConfigError unless it is a positive number.
        """
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
            self.refuse(key, "a number between 0 and 1")
        return float(value)

    def texts(self, key: str) -> list[str]:
        """A list of texts; a missing or null one is empty.

        Raises: ConfigError.
        """
        value = self.values.get(key) or []
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            self.refuse(key, "a list of texts")
        return list(value)

    def only(self, key: str, value: Any) -> None:
        """Refuse any other value than this one, which is also what a missing key means."""
        if self.values.get(key, value) != value:
            self.refuse(key, str(value))

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raise ConfigError with the key, its value and what is supported."""
        value = shown(self.values[key]) if key in self.values else "missing"
        raise ConfigError(f"{self.model} does not support {key} = {value}; supported: {supported}")

    def refuse_other_architectures(self, model_type: str, *architectures: str) -> None:
        """Refuse checkpoints of other models, quantised ones, and attention that is not causal over everything."""
        self.only("model_type", model_type)
        if not set(architectures).intersection(self.texts("architectures") or architectures):
            self.refuse("architectures", " or ".join(architectures))
        self.only("hidden_act", "silu")
        if self.values.get("use_sliding_window"):
            self.refuse("use_sliding_window", "false")
        if set(self.texts("layer_types")) - {"full_attention"}:
            self.refuse("layer_types", "full_attention in every layer")
        if self.values.get("quantization_config"):
            self.refuse("quantization_config", "unquantised checkpoints")

    def check_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Refuse heads that cannot share the kv heads evenly, or that cannot be rotated."""
        if num_heads % num_kv_heads:
            self.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
        if head_dim % 2 or head_dim < 4:
            self.refuse("head_dim", "an even number from 4")
