"""Reads a config.json key by key: each value is checked, and what a model does not implement is refused by name.

A model calls it for each key that it reads, when its config is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hookline.core.checkpoint.safetensors_files import UNQUANTISED, quantisation
from hookline.core.contracts import FullAttention, LayerCache, SlidingWindow
from hookline.core.errors import ConfigError, shown

MAX_SIZE = 2**24
"""Largest size that is accepted: a larger one is a broken file, and would take all of the machine's memory."""
MAX_LAYERS = 10_000
"""Most layers that are accepted."""
MAX_NUMBER = 1e6
"""Largest number that is accepted where a config.json has a factor or a limit."""
HEAD, OTHER_HEADS = "ForCausalLM", ("ForSequenceClassification", "Model")
"""Endings of architectures' names: with a language model's head, and with another head or none."""


@dataclass(frozen=True)
class ConfigValues:
    """A config.json and the name of the model that reads it, for error messages.

    values: the parsed file, of which no value is trusted. Every method that reads a key raises ConfigError, with the
    key, its value and what is supported, if the value is not of the method's kind.
    """

    values: Mapping[str, Any]
    model: str

    def size(self, key: str, default: int | None = None, *, limit: int = MAX_SIZE) -> int:
        """A whole number from 1 to the limit; a missing or null one is the default, and refused without one."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            self.refuse(key, f"a positive whole number of at most {limit}")
        return value

    def num_layers(self) -> int:
        """`num_hidden_layers`, at most MAX_LAYERS."""
        return self.size("num_hidden_layers", limit=MAX_LAYERS)

    def eps(self, key: str = "rms_norm_eps", default: float = 1e-6) -> float:
        """A norm's epsilon, between 0 and 1; a missing one is the default."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
            self.refuse(key, "a number between 0 and 1")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; a missing or null one is the default."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return default if value is None else value

    def texts(self, key: str) -> list[str]:
        """A list of texts; a missing or null one is empty."""
        value = self.values.get(key) or []
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            self.refuse(key, "a list of texts")
        return list(value)

    def only(self, key: str, value: Any) -> None:
        """Refuse any value but this one, which a missing key also means."""
        if self.values.get(key, value) != value:
            self.refuse(key, str(value))

    def refuse(self, key: str, supported: str) -> NoReturn:
        """Raise ConfigError with the key, its value and, in words, what is supported."""
        value = shown(self.values[key]) if key in self.values else "missing"
        raise ConfigError(f"{self.model} does not support {key} = {value}; supported: {supported}")

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number of at most MAX_NUMBER; a missing or null one is the default, and refused without one."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            self.refuse(key, f"a positive number of at most {MAX_NUMBER:g}")
        return float(value)

    def windows(self, pattern: Sequence[str], window: int | None) -> tuple[int | None, ...]:
        """The window of each layer in tokens, None for all before it, by `layer_types`, or by the pattern without it.

        window: of the layers that the list calls sliding_attention; None if they see everything. A list of another
        length, or with a type that is neither sliding nor full attention, is refused.
        """
        types, num_layers = self.texts("layer_types") or list(pattern), len(pattern)
        if len(types) != num_layers:
            self.refuse("layer_types", f"one type for each of the {num_layers} layers")
        if set(types) - {"full_attention", "sliding_attention"}:
            self.refuse("layer_types", "full_attention and sliding_attention")
        return tuple(window if one == "sliding_attention" else None for one in types)

    def model_type(self, architectures: Mapping[str, str | Sequence[str]]) -> str:
        """The model type, which must be one of these, each with its architectures; a missing one is the first.

        An architecture may also be the body alone, or have a classification head, for pooled requests. Architectures
        of other model types are refused.
        """
        found = self.values.get("model_type", next(iter(architectures)))
        if not isinstance(found, str) or found not in architectures:
            self.refuse("model_type", ", ".join(architectures))
        known = architectures[found]
        names = [known] if isinstance(known, str) else [*known]
        names += [name.replace(HEAD, other) for name in names if HEAD in name for other in OTHER_HEADS]
        if not set(names).intersection(self.texts("architectures") or names):
            self.refuse("architectures", " or ".join(names))
        return found

    def refuse_quantised(self, *, but: str | None = None) -> None:
        """Refuse checkpoints whose weights are quantised; but: by any other method than this one."""
        found = quantisation(self.values)
        if found is not None and found[0] != but:
            served = "unquantised checkpoints" if but is None else f"{but}, and unquantised checkpoints"
            raise ConfigError(f"{self.model} does not support {found[1]}; supported: {served}; {UNQUANTISED}")

    def check_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Refuse heads that cannot share the kv heads evenly, or that cannot be rotated."""
        if num_heads % num_kv_heads:
            self.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
        if head_dim % 2 or head_dim < 4:
            self.refuse("head_dim", "an even number from 4")


def layer_caches(windows: Sequence[int | None], max_position: int) -> tuple[LayerCache, ...]:
    """The caches of layers with these windows, for ModelSpec.layers; a window of max_position is full attention."""
    return tuple(
        FullAttention() if window is None or window >= max_position else SlidingWindow(window) for window in windows
    )
