"""Qwen3-MoE against transformers: logits of small random checkpoints, whole and over ranks; and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline import LLM, SamplingParams
from hookline.core.checkpoint.checkpoint import resolve
from hookline.core.checkpoint.load import load_checkpoint, random_weights
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks, on_ranks
from hookline.plugins.models.qwen3_moe import Qwen3Moe
from tests.hf_models import QWEN3_MOE, build, make_qwen3_moe, one_prompt, run

TOLERANCE = 1e-4  # float32 on both sides; sums of a few hundred terms in another order, logits below 10.
PROMPT = torch.randint(0, 96, (37,), generator=torch.Generator().manual_seed(0)).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
GRID: dict[str, dict[str, Any]] = {
    "plain": {},
    "probabilities that do not add up to one": {"norm_topk_prob": False},
    "every second layer has experts": {"decoder_sparse_step": 2},
    "named layers have none": {"mlp_only_layers": [0, 2]},
    "both": {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4},
    "one expert a token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "many experts": {"num_experts": 33, "num_experts_per_tok": 5},
    "tied, bias": {"tie_word_embeddings": True, "attention_bias": True},
    "yarn rope, one kv head": {"rope_parameters": YARN, "num_key_value_heads": 1},
}


def load(folder: Path, ranks: LocalRanks | None = None) -> Any:
    parts = build(Qwen3Moe, resolve(str(folder)).config, ranks or LocalRanks())
    load_checkpoint(folder, parts[0].weight_targets())
    return parts


@torch.no_grad()
def their_logits(model: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_logits_and_64_greedy_tokens_through_the_engine_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = make_qwen3_moe(tmp_path, **GRID[name])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = their_logits(theirs, PROMPT)
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(run(*load(tmp_path), one_prompt(PROMPT)), expected, rtol=0, atol=TOLERANCE)
    prompts = [PROMPT, PROMPT[:1], PROMPT[5:16]]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(tmp_path), model="qwen3_moe", device="cpu") as llm:
        ours = [output.token_ids for output in llm.generate(prompts, params)]
    assert ours == [greedy(theirs, prompt, 64) for prompt in prompts]


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens of transformers' own cached greedy decoding."""
    prompt_1T = torch.tensor([prompt])  # no token of it is padding, whatever its id
    options = dict(max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    out_1T = model.generate(prompt_1T, attention_mask=torch.ones_like(prompt_1T), pad_token_id=0, **options)
    tokens: list[int] = out_1T[0, len(prompt) :].tolist()
    return tokens


def test_tokens_computed_one_by_one_or_in_chunks_give_the_same_logits(tmp_path: Path) -> None:
    theirs = their_logits(make_qwen3_moe(tmp_path), PROMPT)
    parts = load(tmp_path)
    cuts = [0, 20, 21, 22, 33, *range(34, len(PROMPT) + 1)]
    pieces = [run(*parts, one_prompt(PROMPT[:stop], start)) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), theirs, rtol=0, atol=TOLERANCE)


def test_wanted_rows_alone_go_through_the_last_layers_experts(tmp_path: Path) -> None:
    make_qwen3_moe(tmp_path)
    whole, wanted = run(*load(tmp_path), one_prompt(PROMPT)), [5, 2]
    torch.testing.assert_close(run(*load(tmp_path), one_prompt(PROMPT), wanted), whole[wanted], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["plain", "named layers have none", "many experts"])
def test_ranks_together_give_the_logits_of_one(tmp_path: Path, size: int, name: str) -> None:
    theirs = their_logits(make_qwen3_moe(tmp_path, **GRID[name], vocab_size=97), PROMPT)
    shards = on_ranks(size, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT)))
    torch.testing.assert_close(torch.cat(shards, -1)[:, :97], theirs, rtol=0, atol=TOLERANCE)


def test_a_block_sums_up_over_the_ranks_once_for_attention_and_once_for_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3_moe(tmp_path)
    sums, all_reduce = [], ThreadRanks.all_reduce
    monkeypatch.setattr(ThreadRanks, "all_reduce", lambda self, x: (sums.append(self.rank), all_reduce(self, x))[1])
    on_ranks(2, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT)))
    assert [sums.count(rank) for rank in (0, 1)] == [1 + 2 * 3] * 2  # the embedding, and two a layer


def test_random_weights_do_not_depend_on_the_ranks() -> None:
    config = {**QWEN3_MOE, "num_hidden_layers": 1}
    whole = build(Qwen3Moe, config)[0]
    random_weights(whole.weight_targets(), 5)
    for rank in range(2):
        part = build(Qwen3Moe, config, LocalRanks(rank, 2))[0]
        random_weights(part.weight_targets(), 5)
        everything = whole.weight_targets()
        for name, target in part.weight_targets().items():
            assert target.view is not None
            assert torch.equal(target.view, target.cut(everything[name].view)), name


def test_packed_experts_are_refused_by_the_tensors_they_lack(tmp_path: Path) -> None:
    model = make_qwen3_moe(tmp_path / "usual", num_hidden_layers=1)
    folder = tmp_path / "packed"
    model.save_pretrained(folder, save_original_format=False)
    with pytest.raises(CheckpointError, match=r"24 missing tensors: .*experts\.0\.gate_proj.*; 2 surplus tensors: "):
        load_checkpoint(folder, build(Qwen3Moe, resolve(str(folder)).config)[0].weight_targets())


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(key: str) -> None:
    config = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}
    names = build(Qwen3Moe, {**config, key: 5})[0].weight_targets()
    assert "model.layers.2.mlp.experts.4.up_proj.weight" in names
    assert "model.layers.2.mlp.experts.5.up_proj.weight" not in names


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3"}, ["Qwen3-MoE", "model_type = 'qwen3'", "supported: qwen3_moe"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["architectures", "Qwen3MoeForCausalLM"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "at most num_experts = 8"]),
        ({"num_experts": 0}, ["num_experts = 0", "positive whole number"]),
        ({"moe_intermediate_size": 2.5}, ["moe_intermediate_size = 2.5", "positive whole number"]),
        ({"mlp_only_layers": "all"}, ["mlp_only_layers = 'all'", "a list of layer indices"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step = 0", "positive whole number"]),
        ({"use_sliding_window": True}, ["use_sliding_window = True", "supported: false"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "supported: silu"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "a divisor of num_attention_heads = 4"]),
    ],
)
def test_what_is_not_implemented_is_refused_with_key_and_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Qwen3Moe.spec({**QWEN3_MOE, **change})
    assert all(word in str(error.value) for word in words)


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tp=4 does not divide moe_intermediate_size 6\. Valid tp values: 1, 2, 3, 6"
    ):
        build(Qwen3Moe, {**QWEN3_MOE, "moe_intermediate_size": 6}, LocalRanks(0, 4))
