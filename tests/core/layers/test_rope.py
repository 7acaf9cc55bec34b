"""Rope tables equal those of transformers for every supported scaling, in both forms a config.json takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.core.errors import ConfigError
from hookline.core.layers import rope_settings, rope_table

HEAD_DIM, LENGTH = 32, 64
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    "yarn without original length": {"rope_type": "yarn", "factor": 2.0},
    "yarn with attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn with betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn with mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn by lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": LENGTH // 4},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LENGTH // 2,
    },
    "llama3 without original length": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 6.0,
    },
}


def theirs(scaling: dict[str, Any], length: int, theta: float = 10_000.0) -> Tensor:
    """Cosines then sines of positions below `length`, as one forward of transformers computes them."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = Qwen3Config(
        head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters={"rope_theta": theta, **scaling}
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), -1)


def ours(config: dict[str, Any], length: int) -> Tensor:
    return rope_table(rope_settings({"max_position_embeddings": LENGTH, **config}), HEAD_DIM, length)


@pytest.mark.slow  # transformers' models take seconds to import
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_table_equals_the_one_of_transformers(name: str, theta: float) -> None:
    scaling = SCALINGS[name]
    length = LENGTH if name == "dynamic" else 4 * LENGTH
    table = ours({"rope_parameters": {"rope_theta": theta, **scaling}}, length)
    # Same formulas in the same precision: what is left is the order of YaRN's two products.
    torch.testing.assert_close(table, theirs(dict(scaling), length, theta), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_the_old_form_means_the_same_as_the_new(name: str, key: str) -> None:
    scaling = dict(SCALINGS[name])
    old = {"rope_theta": 5_000.0, "rope_scaling": {key: scaling.pop("rope_type"), **scaling}}
    new = {"rope_parameters": {"rope_theta": 5_000.0, **SCALINGS[name]}}
    assert rope_settings({"max_position_embeddings": LENGTH, **old}) == rope_settings(
        {"max_position_embeddings": LENGTH, **new}
    )


def test_scaling_laid_over_a_new_config_keeps_its_theta() -> None:
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0}, "rope_scaling": SCALINGS["linear"]}
    settings = rope_settings({"max_position_embeddings": LENGTH, **config})
    assert (settings.rope_type, settings.rope_theta) == ("linear", 5_000.0)


def test_a_config_without_rope_keys_gets_the_defaults() -> None:
    settings = rope_settings({"max_position_embeddings": LENGTH, "rope_scaling": None})
    assert (settings.rope_type, settings.rope_theta, settings.max_position) == ("default", 10_000.0, LENGTH)


@pytest.mark.slow
def test_dynamic_rows_beyond_the_window_equal_transformers_for_a_prompt_that_ends_there() -> None:
    table = ours({"rope_scaling": SCALINGS["dynamic"]}, 3 * LENGTH)
    for last in (LENGTH, LENGTH + 1, 2 * LENGTH, 3 * LENGTH - 1):
        expected = theirs(SCALINGS["dynamic"], last + 1)[last]
        torch.testing.assert_close(table[last], expected, rtol=0, atol=1e-4)


def test_a_dynamic_row_does_not_depend_on_the_length_of_the_table() -> None:
    config = {"rope_scaling": SCALINGS["dynamic"]}
    assert torch.equal(ours(config, 3 * LENGTH)[: 2 * LENGTH], ours(config, 2 * LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
@pytest.mark.parametrize("is_nested", [True, False])
def test_a_partial_table_has_the_columns_and_values_of_transformers(name: str, is_nested: bool) -> None:
    share = {"partial_rotary_factor": 0.25}
    scaling = {"rope_theta": 10_000.0, **SCALINGS[name], **share}
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    config = Qwen3Config(head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=dict(scaling))
    frequencies = ROPE_INIT_FUNCTIONS.get(name, Phi3RotaryEmbedding.compute_default_rope_parameters)
    frequency_F, attention_factor = frequencies(config)
    angle_PF = torch.outer(torch.arange(LENGTH, dtype=torch.float32), frequency_F)
    given = {"rope_parameters": scaling} if is_nested else {**share, "rope_scaling": SCALINGS[name]}
    settings = rope_settings({"max_position_embeddings": LENGTH, **given}, allow_partial=True)
    table = rope_table(settings, HEAD_DIM, LENGTH)
    expected = torch.cat((angle_PF.cos(), angle_PF.sin()), -1) * attention_factor
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("factor", [0, -1, 1.5, "0.5", float("nan")])
def test_a_senseless_partial_rotary_factor_is_refused(factor: Any) -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        rope_settings({"max_position_embeddings": LENGTH, "partial_rotary_factor": factor}, allow_partial=True)


def test_a_part_of_an_odd_number_of_values_is_refused_with_both_numbers() -> None:
    config = {"max_position_embeddings": LENGTH, "partial_rotary_factor": 0.1}
    with pytest.raises(ConfigError, match="rotates 3 of a head's 32 values"):
        rope_settings(config, allow_partial=True).rotary_dim(HEAD_DIM)


def test_each_type_of_layer_has_settings_of_its_own() -> None:
    by_type = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0},
    }
    config = {"max_position_embeddings": LENGTH, "rope_parameters": by_type}
    local, whole = rope_settings(config, "sliding_attention"), rope_settings(config, "full_attention")
    assert (local.rope_type, local.rope_theta, local.factor) == ("default", 500.0, 1.0)
    assert (whole.rope_type, whole.rope_theta, whole.factor) == ("linear", 10_000.0, 8.0)
    assert rope_settings({"max_position_embeddings": LENGTH}, "full_attention", default_theta=1e6).rope_theta == 1e6
    with pytest.raises(ConfigError, match="sliding_attention"):
        rope_settings(config)


def test_settings_for_all_layers_hold_for_every_type() -> None:
    config = {"max_position_embeddings": LENGTH, "rope_parameters": {"rope_theta": 500.0, **SCALINGS["linear"]}}
    assert rope_settings(config, "sliding_attention") == rope_settings(config)


def test_position_zero_is_not_rotated() -> None:
    half = HEAD_DIM // 2
    assert torch.equal(ours({}, 1), torch.cat((torch.ones(1, half), torch.zeros(1, half)), -1))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("default", LENGTH),
        ("linear", int(2.5 * LENGTH)),
        ("yarn", 4 * LENGTH),
        ("yarn without original length", 2 * LENGTH),
        ("yarn by lengths", LENGTH),
        ("dynamic", 3 * LENGTH),
        ("llama3", LENGTH),
    ],
)
def test_scaling_stretches_the_longest_position(name: str, expected: int) -> None:
    config = {"max_position_embeddings": LENGTH, "rope_scaling": SCALINGS[name]}
    assert rope_settings(config).max_position == expected


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope", "factor": 8.0}, ["'longrope'", "default, linear, dynamic, llama3, yarn"]),
        ({"rope_type": "llama3", "factor": 8.0}, ["low_freq_factor", "None"]),
        ({**SCALINGS["llama3"], "high_freq_factor": 1.0}, ["high_freq_factor = 1.0", "above low_freq_factor"]),
        ({"rope_type": "yarm", "factor": 8.0}, ["'yarm'", "Did you mean 'yarn'?"]),
        ({"rope_type": "linear"}, ["'factor'", "None"]),
        ({"rope_type": "linear", "factor": 0.5}, ["'factor'", "0.5"]),
        ({"rope_type": "linear", "factor": "2"}, ["'factor'", "'2'"]),
        ({"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}, ["'short_factor'", "linear"]),
        ({"rope_type": "default", "factor": 2.0}, ["'factor'", "default"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(scaling: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        rope_settings({"max_position_embeddings": LENGTH, "rope_scaling": scaling})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_theta": 0}, "rope_theta = 0 must be a number above 1, at most 1e+30"),
        ({"rope_theta": 7e-195}, "rope_theta = 7e-195 must be a number above 1"),
        ({"rope_theta": 1e99}, "rope_theta = 1e+99 must be a number above 1, at most 1e+30"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1e99}},
            "attention_factor = 1e+99 must be a positive number, at most 1e+30",
        ),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"rope_theta": "1e6"}, "rope_theta = '1e6'"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings = 2147483648 must be"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "the scaled length = "),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "at least 1, not inf"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": float("nan")}}, "attention_factor = nan"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast = -1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "max_position_embeddings": 0}, "needs max_position"),
    ],
)
def test_senseless_numbers_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        rope_settings({"max_position_embeddings": 64, **config})


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3"])
@pytest.mark.parametrize("factor", [1e308, 1e300, 1e31, 10**300])
def test_a_factor_whose_length_is_infinite_is_the_checkpoint_s_fault(kind, factor):
    further = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": factor, **further}
    with pytest.raises(ConfigError, match=r"the scaled length = .+ must be a number of tokens, at most 16777216"):
        rope_settings({"max_position_embeddings": 4096, "rope_scaling": scaling})


@pytest.mark.parametrize("kind", ["mrope", "default", "linear"])
def test_frequencies_shared_out_for_images_are_plain_ones_for_text(kind: str) -> None:
    factor = {"factor": 2.0} if kind == "linear" else {}
    shared = {"type": kind, "mrope_section": [1, 1, 2], "mrope_interleaved": True, **factor}
    plain = {"rope_type": "default" if kind == "mrope" else kind, **factor}
    found = rope_settings({"rope_scaling": shared, "max_position_embeddings": 64})
    assert found == rope_settings({"rope_scaling": plain, "max_position_embeddings": 64})
