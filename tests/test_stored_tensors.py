"""Checkpoints that store more, less or other tensors than their model has: the tokens are transformers'.

Heads that a config.json ties to the embedding, buffers that models no longer store, and stale copies.

Small random models in float32, greedy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import LLM
from hookline.core.errors import CheckpointError
from tests.small_models import CONFIGS, transformers_model
from tests.test_model_parity import model_name
from tests.test_parity import greedy, random_prompts, transformers_greedy
from tests.transformers_cases import CASES, make_checkpoint

NUM_TOKENS = 24
PROMPTS = [[token + 1 for token in prompt] for prompt in random_prompts(90, (9, 3))]
HEADS = {"gpt2": ("lm_head.weight", "transformer.wte.weight")}
NATIVE = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_5")
CONFIGS_OF = {
    "qwen3": {**CONFIGS["qwen2"], "model_type": "qwen3"},
    "qwen3_moe": {
        **{**CONFIGS["qwen2"], "model_type": "qwen3_moe"},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    },
    **CONFIGS,
}
TP_2 = ("llama",)
"""Two processes take seconds to start; the layer is the same in all models."""


def rewrite(folder: Path, change: Any) -> None:
    """Save all tensors in one file, changed by this function."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def tied_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    transformers_model({**config, "tie_word_embeddings": True}).save_pretrained(folder)


def their_tokens(folder: Path) -> list[list[int]]:
    """Of the checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return [transformers_greedy(model, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]


def our_tokens(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(str(folder), device="cpu", **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, greedy(NUM_TOKENS))]


def another_head(
    tensors: dict[str, Any], head: str = "lm_head.weight", embed: str = "model.embed_tokens.weight"
) -> None:
    torch.manual_seed(1)
    tensors[head] = torch.randn_like(tensors[embed]) * 0.3


def copied_head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def only_head(tensors: dict[str, Any], head: str = "lm_head.weight", embed: str = "model.embed_tokens.weight") -> None:
    tensors[head] = tensors.pop(embed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_a_stored_head_unlike_the_embedding_is_served_as_transformers_does(name: str, tmp_path: Path) -> None:
    tied_checkpoint(tmp_path, CONFIGS_OF[name])
    as_tied = our_tokens(tmp_path)
    rewrite(tmp_path, another_head)
    expected = their_tokens(tmp_path)
    assert our_tokens(tmp_path) == expected != as_tied
    model = model_name(name) if name in CONFIGS else name
    assert our_tokens(tmp_path, model={"name": model, "checkpoint": str(tmp_path)}) == expected


@pytest.fixture(scope="module", params=[another_head, only_head, copied_head])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A Llama with such a head, and its tokens."""
    folder = tmp_path_factory.mktemp("stored")
    tied_checkpoint(folder, {**CONFIGS["llama"], "vocab_size": 97})
    rewrite(folder, request.param)
    return folder, their_tokens(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=["tp_2", "pp_2", "tp_2_pp_2"])
def test_ranks_and_stages_serve_the_head_that_is_stored(options: Any, stored: tuple[Path, list[list[int]]]) -> None:
    folder, expected = stored
    assert our_tokens(folder, **options) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_a_head_that_differs_in_the_last_row_alone_is_found_by_the_rank_that_has_it(tmp_path: Path) -> None:
    def last_row(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][95] = tensors["lm_head.weight"][96 - 30] * 4

    tied_checkpoint(tmp_path, CONFIGS["llama"])
    rewrite(tmp_path, last_row)
    assert our_tokens(tmp_path, tp=2) == their_tokens(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("change", [another_head, only_head])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_any_model_of_transformers_serves_the_head_that_is_stored(
    name: str, tp: int, change: Any, tmp_path: Path
) -> None:
    if tp == 2 and not CASES[name].has_plan:
        pytest.skip("transformers has no tensor-parallel plan for it")
    make_checkpoint(tmp_path, CASES[name], tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: change(tensors, *HEADS.get(name, ())))
    expected = their_tokens(tmp_path)
    assert our_tokens(tmp_path, model="transformers", tp=tp) == expected


@pytest.mark.parametrize("change", [copied_head, only_head])
def test_a_tied_checkpoint_may_store_a_copy_or_the_head_alone(change: Any, tmp_path: Path) -> None:
    tied_checkpoint(tmp_path, CONFIGS_OF["qwen3"])
    expected = our_tokens(tmp_path)
    rewrite(tmp_path, change)
    assert our_tokens(tmp_path) == expected


def test_a_head_of_its_own_is_told_once_with_the_way_to_say_so(tmp_path: Path, caplog: Any) -> None:
    tied_checkpoint(tmp_path, CONFIGS_OF["qwen3"])
    rewrite(tmp_path, another_head)
    found = our_tokens(tmp_path)
    told = [one.getMessage() for one in caplog.records if "differs from its embedding" in one.getMessage()]
    assert len(told) == 1 and "model.hf_overrides.tie_word_embeddings=false" in told[0]
    caplog.clear()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert our_tokens(tmp_path) == found
    assert not [one for one in caplog.records if "differs from its embedding" in one.getMessage()]


def test_a_copy_in_another_dtype_is_a_copy(tmp_path: Path, caplog: Any) -> None:
    def rounded(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()

    tied_checkpoint(tmp_path, CONFIGS_OF["qwen3"])
    rewrite(tmp_path, rounded)
    our_tokens(tmp_path)
    assert not [one for one in caplog.records if "differs from its embedding" in one.getMessage()]


def test_a_stored_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    def longer(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = torch.zeros(100, 32)

    tied_checkpoint(tmp_path, CONFIGS_OF["qwen3"])
    rewrite(tmp_path, longer)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has \[100, 32\] and needs \[96, 32\]"):
        our_tokens(tmp_path)


def test_a_tied_checkpoint_without_either_names_the_embedding(tmp_path: Path) -> None:
    tied_checkpoint(tmp_path, CONFIGS_OF["qwen3"])
    rewrite(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing tensor: model\.embed_tokens\.weight"):
        our_tokens(tmp_path)


def old_buffers(tensors: dict[str, Any]) -> None:
    """As transformers 4 and others stored them."""
    for index in range(2):
        layer = f"model.layers.{index}.self_attn"
        tensors[f"{layer}.rotary_emb.inv_freq"] = torch.rand(4)
        tensors[f"{layer}.rotary_emb.cos_cached"] = torch.rand(8, 4)
        tensors[f"{layer}.bias"] = torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril()
        tensors[f"{layer}.masked_bias"] = torch.tensor(-1e4)
        tensors[f"{layer}._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    tensors["model.rotary_emb.sliding_attention_inv_freq"] = torch.rand(4)
    tensors["model.rotary_emb.original_inv_freq"] = torch.rand(4)
    tensors["model.embed_positions.position_ids"] = torch.arange(256)[None]


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_buffers_that_old_checkpoints_store_change_nothing(name: str, tmp_path: Path) -> None:
    tied_checkpoint(tmp_path, CONFIGS_OF[name])
    expected = our_tokens(tmp_path)
    rewrite(tmp_path, old_buffers)
    assert our_tokens(tmp_path) == expected


MASKS = {
    "gpt2": ("transformer.h.0.attn", "h.1.attn"),
    "gpt_neox": ("gpt_neox.layers.0.attention", "gpt_neox.layers.1.attention"),
    "codegen": ("transformer.h.0.attn",),
    "phi": ("model.layers.0.self_attn",),
}
"""Where a model's layers have their attention; GPT-2's own checkpoint stores names without the first part."""


@pytest.fixture(scope="module", params=MASKS)
def unmasked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[list[int]]]:
    """A model's name, its checkpoint without masks, and its tokens."""
    folder = tmp_path_factory.mktemp("unmasked")
    make_checkpoint(folder, CASES[request.param])
    return request.param, folder, their_tokens(folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_that_old_checkpoints_store_change_nothing(
    dtype: torch.dtype, unmasked: tuple[str, Path, list[list[int]]], tmp_path: Path
) -> None:
    name, folder, expected = unmasked
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

    def masks(tensors: dict[str, Any]) -> None:
        for attention in MASKS[name]:
            tensors[f"{attention}.bias"] = torch.ones(1, 1, 256, 256).tril().to(dtype)
            tensors[f"{attention}.causal_mask"] = torch.ones(1, 1, 256, 256).tril().to(dtype)
            tensors[f"{attention}.masked_bias"] = torch.tensor(-1e9)
            tensors[f"{attention}.rotary_emb.inv_freq"] = torch.rand(4)

    rewrite(tmp_path, masks)
    assert our_tokens(tmp_path, model="transformers") == expected


@pytest.mark.slow
def test_a_stale_copy_in_a_shard_that_the_index_does_not_name_is_left_out(tmp_path: Path) -> None:
    tied_checkpoint(tmp_path, CONFIGS["llama"])
    rewrite(tmp_path, lambda tensors: None)
    expected, tensors = their_tokens(tmp_path), load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        stale = {name: tensors[name] * 0 for name in names if name not in own}
        save_file({**stale, **{name: tensors[name] for name in own}}, tmp_path / file)
    weight_map = {name: file for file, own in shards.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert our_tokens(tmp_path) == expected
