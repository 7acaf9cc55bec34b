"""Values of a config.json: each is read in its form, or refused by its name, in one line."""

from collections.abc import Callable
from typing import Any

import pytest

from hookline.core.contracts import FullAttention, SlidingWindow
from hookline.core.errors import ConfigError
from hookline.core.layers import ConfigValues, layer_caches

Read = Callable[[ConfigValues], Any]
READ: list[tuple[dict[str, Any], Read, Any]] = [
    ({"hidden_size": 8}, lambda values: values.size("hidden_size"), 8),
    ({"hidden_size": None}, lambda values: values.size("hidden_size", 16), 16),
    ({"rms_norm_eps": 1e-5}, lambda values: values.eps(), 1e-5),
    ({}, lambda values: values.flag("tie_word_embeddings"), False),
    ({"tie_word_embeddings": None}, lambda values: values.flag("tie_word_embeddings", True), True),
    ({"tie_word_embeddings": False}, lambda values: values.flag("tie_word_embeddings", True), False),
    ({"limit": 7}, lambda values: values.positive("limit"), 7.0),
]
REFUSED: list[tuple[dict[str, Any], Read]] = [
    ({"hidden_size": 2**24 + 1}, lambda values: values.size("hidden_size")),
    ({}, lambda values: values.size("hidden_size")),
    ({"hidden_size": True}, lambda values: values.size("hidden_size")),
    ({"num_hidden_layers": 10_001}, lambda values: values.num_layers()),
    ({"tie_word_embeddings": "yes"}, lambda values: values.flag("tie_word_embeddings")),
    ({"limit": float("nan")}, lambda values: values.positive("limit")),
    ({"hidden_act": "gelu"}, lambda values: values.only("hidden_act", "silu")),
    ({"layer_types": ["full_attention"]}, lambda values: values.windows(["full_attention"] * 2, 4)),
    ({"layer_types": ["linear_attention"]}, lambda values: values.windows(["full_attention"], 4)),
    ({"quantization_config": {"bits": 4}}, lambda values: values.refuse_quantised()),
    ({"architectures": ["Other"]}, lambda values: values.model_type({"mine": "MineForCausalLM"})),
    ({"num_key_value_heads": 3}, lambda values: values.check_heads(4, 3, 8)),
]


@pytest.mark.parametrize(("config", "read", "wanted"), READ, ids=lambda one: str(one) if isinstance(one, dict) else "")
def test_values_are_read_in_their_form(config: dict[str, Any], read: Read, wanted: Any) -> None:
    assert read(ConfigValues(config, "mine")) == wanted


@pytest.mark.parametrize(("config", "read"), REFUSED, ids=lambda one: str(one) if isinstance(one, dict) else "")
def test_others_are_refused_in_one_line_with_model_key_and_what_is_supported(
    config: dict[str, Any], read: Read
) -> None:
    key = next(iter(config), "hidden_size")
    with pytest.raises(ConfigError, match=f"mine does not support {key} = .+; supported: .+") as refused:
        read(ConfigValues(config, "mine"))
    assert len(str(refused.value).splitlines()) == 1


def test_a_window_that_holds_every_sequence_is_none() -> None:
    assert layer_caches((4, None, 16), 16) == (SlidingWindow(4), FullAttention(), FullAttention())
