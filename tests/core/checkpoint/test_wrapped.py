"""The language model inside a checkpoint that also sees: its config and its names of tensors."""

import json
from pathlib import Path
from typing import Any

import pytest

from hookline.core.checkpoint.checkpoint import resolve
from hookline.core.checkpoint.wrapped import language_model, name_inside

TEXT = {"model_type": "small", "hidden_size": 8, "num_hidden_layers": 2, "eos_token_id": 5}
WHOLE: dict[str, Any] = {
    "architectures": ["SmallForConditionalGeneration"],
    "model_type": "small_vl",
    "text_config": TEXT,
    "vision_config": {"hidden_size": 4},
    "tie_word_embeddings": True,
    "eos_token_id": 7,
    "dtype": "bfloat16",
    "image_token_id": 9,
}


def test_a_config_of_a_language_model_is_left_alone() -> None:
    assert language_model({**TEXT, "architectures": ["SmallForCausalLM"]}) is None


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_whole_says_for_the_language_model_what_that_does_not_say(key: str) -> None:
    whole = {**{name: value for name, value in WHOLE.items() if name != "text_config"}, key: TEXT}
    assert language_model(whole) == {**TEXT, "tie_word_embeddings": True, "dtype": "bfloat16"}


def test_the_whole_ties_the_head_whatever_the_language_model_says() -> None:
    inner = {**TEXT, "tie_word_embeddings": False}
    assert (language_model({**WHOLE, "text_config": inner}) or {})["tie_word_embeddings"] is True
    untold = {key: value for key, value in WHOLE.items() if key != "tie_word_embeddings"}
    assert (language_model({**untold, "text_config": inner}) or {})["tie_word_embeddings"] is False


def test_a_prompt_that_is_seen_both_ways_is_told_to_the_model_which_can_refuse_it() -> None:
    found = language_model({**WHOLE, "model_type": "paligemma"}) or {}
    assert found["use_bidirectional_attention"] is True
    assert "use_bidirectional_attention" not in (language_model(WHOLE) or {})


def test_the_thinker_of_a_model_that_talks_too_is_its_language_model() -> None:
    whole = {"model_type": "omni", "thinker_config": WHOLE, "talker_config": {"hidden_size": 4}}
    assert language_model(whole) == language_model(WHOLE)
    stored = ["thinker.model.layers.0.mlp.up_proj.weight", "thinker.lm_head.weight", "thinker.visual.blocks.0.weight",
              "talker.model.layers.0.mlp.up_proj.weight", "token2wav.scale"]  # fmt: skip
    found = list(map(name_inside(stored), stored))
    assert found == ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", None, None, None]
    newer = ["thinker.model.language_model.norm.weight", "thinker.model.visual.norm.weight", "thinker.lm_head.weight"]
    assert list(map(name_inside(newer), newer)) == ["model.norm.weight", None, "lm_head.weight"]


def test_values_beside_a_tower_are_the_language_models() -> None:
    flat = {**TEXT, "vision_config": {"hidden_size": 4}, "architectures": ["SmallForConditionalGeneration"]}
    assert language_model(flat) == TEXT


@pytest.mark.slow
def test_sizes_that_are_left_to_the_class_are_its_defaults() -> None:
    bare = {"model_type": "llama", "vocab_size": 64, "rope_theta": 500.0}
    found = language_model({"text_config": bare}) or {}
    assert (found["hidden_size"], found["num_hidden_layers"], found["vocab_size"]) == (4096, 32, 64)
    assert found["rope_parameters"]["rope_theta"] == 500.0
    assert language_model({"text_config": {"model_type": "of_nobody"}}) == {"model_type": "of_nobody"}
    broken = {"model_type": "llama", "hidden_size": "wide"}
    assert language_model({"text_config": broken}) == broken, "the model that reads it says what is wrong"


@pytest.mark.parametrize(
    ("stored", "inside"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.transformer.h.0.attn.weight", "transformer.h.0.attn.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.weight", None),
        ("vision_tower.text_model.weight", None),
        ("mtp.layers.0.language_model.weight", None),
        ("multi_modal_projector.linear.weight", None),
    ],
)
def test_tensors_of_the_language_model_lose_their_prefix_and_others_are_left_out(
    stored: str, inside: str | None
) -> None:
    assert name_inside([stored, "model.language_model.embed_tokens.weight"])(stored) == inside


def test_a_language_model_without_a_prefix_keeps_its_names() -> None:
    stored = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "visual.blocks.0.weight", "mtp.norm.weight"]
    name = name_inside(stored)
    assert [name(one) for one in stored] == [*stored[:2], None, None]


def test_overrides_reach_the_language_model_with_and_without_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WHOLE))
    found = resolve(str(tmp_path), {"num_hidden_layers": 1, "text_config": {"hidden_size": 16}, "eos_token_id": 3})
    assert (found.config["num_hidden_layers"], found.config["hidden_size"], found.eos_token_ids) == (1, 16, (3,))
    assert found.wrapper == ("SmallForConditionalGeneration",)
    assert resolve(str(tmp_path)).eos_token_ids == (5,)


@pytest.mark.slow
def test_names_that_transformers_changes_for_the_whole_are_changed_before_the_prefix_is_left_out() -> None:
    stored = ["language_model.model.blocks.0.norm.weight", "vision_tower.encoder.blocks.0.wo.weight"]
    inside = name_inside([*stored, "language_model.lm_head.weight"], "kimi_k25")
    assert inside(stored[0]) == inside(stored[0].replace("blocks", "layers")) == "model.layers.0.norm.weight"
    assert inside(stored[1]) is None
    assert inside("language_model.lm_head.weight") == "lm_head.weight"
