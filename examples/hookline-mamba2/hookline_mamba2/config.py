"""What a config.json of Mamba-2 says. Knows no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookline.core.layers import ConfigValues

NO_LIMIT = [0.0, float("inf")]
NO_LIMIT_AS_WRITTEN = [0.0, {"__float__": "Infinity"}]
"""By transformers 5, since JSON has no infinity."""


@dataclass(frozen=True)
class Sizes:
    """Of the whole model. inner: num_heads * head_dim. width: tokens that the short convolution sees."""

    num_layers: int
    hidden: int
    vocab: int
    num_heads: int
    head_dim: int
    num_groups: int
    state: int
    width: int
    eps: float
    has_bias: bool
    has_convolution_bias: bool
    is_tied: bool

    @property
    def inner(self) -> int:
        """Features between the two products of a mixer."""
        return self.num_heads * self.head_dim


def read_config(hf_config: Mapping[str, Any]) -> Sizes:
    """The sizes. `residual_in_fp32` is not read: the residual stream has the model's dtype, as in every model here.

    Raises: ConfigError for what the model does not implement.
    """
    values = ConfigValues(hf_config, "mamba2")
    values.model_type({"mamba2": "Mamba2ForCausalLM"})
    values.refuse_quantised()
    values.only("hidden_act", "silu")
    if list(hf_config.get("time_step_limit") or NO_LIMIT) not in (NO_LIMIT, NO_LIMIT_AS_WRITTEN):
        values.refuse("time_step_limit", "[0, Infinity]")
    sizes = Sizes(
        num_layers=values.num_layers(),
        hidden=values.size("hidden_size"),
        vocab=values.size("vocab_size"),
        num_heads=values.size("num_heads", 128),
        head_dim=values.size("head_dim", 64),
        num_groups=values.size("n_groups", 8),
        state=values.size("state_size", 128),
        width=values.size("conv_kernel", 4),
        eps=values.eps("layer_norm_epsilon", 1e-5),
        has_bias=values.flag("use_bias"),
        has_convolution_bias=values.flag("use_conv_bias", True),
        is_tied=values.flag("tie_word_embeddings"),
    )
    if sizes.inner != values.positive("expand", 2) * sizes.hidden:
        values.refuse("num_heads", f"num_heads * head_dim = {sizes.inner} equal to expand * hidden_size")
    if sizes.num_heads % sizes.num_groups:
        values.refuse("n_groups", f"a divisor of num_heads = {sizes.num_heads}")
    if sizes.width < 2:
        values.refuse("conv_kernel", "2 or more")
    return sizes
