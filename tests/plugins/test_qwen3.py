"""Qwen3 against transformers: logits of small random checkpoints, cached and sharded; and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookline.core.checkpoint.checkpoint import resolve
from hookline.core.checkpoint.load import load_checkpoint, random_weights
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CheckpointError, ConfigError
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks, on_ranks
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.models.qwen3 import Qwen3
from tests.forgetful_ranks import ForgetfulRanks, ForgetfulWholes
from tests.hf_models import QWEN3, build, make_qwen3, one_prompt, run

TOLERANCE = 1e-4  # float32 on both sides; sums of a few hundred terms in another order, logits below 10.
PROMPT = torch.randint(0, QWEN3["vocab_size"], (43,), generator=torch.Generator().manual_seed(0)).tolist()
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
GRID: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group": {"num_key_value_heads": 4},
    "four groups": {"num_key_value_heads": 1},
    "eight groups": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "head_dim is hidden over heads": {"head_dim": 8},
    "large head_dim": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "one layer": {"num_hidden_layers": 1},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "large eps": {"rms_norm_eps": 1e-2},
    "linear rope": {"rope_parameters": LINEAR},
    "dynamic rope within the window": {"rope_parameters": DYNAMIC},
    "yarn rope": {"rope_parameters": YARN, "max_position_embeddings": 16},
    "yarn rope, tied, bias, four groups": {
        "rope_parameters": {**YARN, "attention_factor": 0.8},
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_key_value_heads": 1,
    },
}


def load(folder: Path, ranks: LocalRanks | None = None) -> Any:
    config = resolve(str(folder)).config
    parts = build(Qwen3, config, ranks or LocalRanks())
    load_checkpoint(folder, parts[0].weight_targets())
    return parts


@torch.no_grad()
def their_logits(model: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


@pytest.mark.parametrize("name", GRID)
def test_prefill_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = their_logits(make_qwen3(tmp_path, **GRID[name]), PROMPT)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = run(*load(tmp_path), one_prompt(PROMPT))
    assert float(theirs.abs().max()) > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["plain", "four groups", "yarn rope", "dynamic rope within the window"])
def test_tokens_computed_one_by_one_or_in_chunks_give_the_same_logits(tmp_path: Path, name: str) -> None:
    theirs = their_logits(make_qwen3(tmp_path, **GRID[name]), PROMPT)
    parts = load(tmp_path)
    cuts = [0, 20, 21, 22, 37, *range(38, len(PROMPT) + 1)]
    pieces = [run(*parts, one_prompt(PROMPT[:stop], start)) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces), theirs, rtol=0, atol=TOLERANCE)


def test_the_old_form_of_rope_keys_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    theirs = their_logits(make_qwen3(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}), PROMPT)
    config = resolve(str(tmp_path)).config
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    model, kernels, cache = build(Qwen3, config)
    load_checkpoint(tmp_path, model.weight_targets())
    torch.testing.assert_close(run(model, kernels, cache, one_prompt(PROMPT)), theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["plain", "bias", "tied"])
def test_ranks_together_give_the_logits_of_one(tmp_path: Path, size: int, name: str) -> None:
    theirs = their_logits(make_qwen3(tmp_path, **GRID[name], vocab_size=97, eos_token_id=3), PROMPT)
    shards = on_ranks(size, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT)))
    logits = torch.cat(shards, -1)
    torch.testing.assert_close(logits[:, :97], theirs, rtol=0, atol=TOLERANCE)
    assert bool((logits[:, 97:] == -torch.inf).all())


@pytest.mark.parametrize("size", [1, 2])
def test_rows_computed_in_chunks_between_attentions_give_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    make_qwen3(tmp_path, **GRID["bias"])
    monkeypatch.setattr("hookline.core.distributed.ranks.ROW_TILE", 8)
    whole = on_ranks(size, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT)))
    counts = []

    def three(ranks: LocalRanks, num_rows: int) -> int:
        counts.append(num_rows)
        return 3

    monkeypatch.setattr(LocalRanks, "num_chunks", three)
    chunked = on_ranks(size, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT)))
    torch.testing.assert_close(chunked, whole, atol=TOLERANCE, rtol=0)
    wanted = [len(PROMPT) - 1, 8, 7]
    some = on_ranks(size, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT), wanted))
    torch.testing.assert_close(some, [logits[wanted] for logits in whole], atol=TOLERANCE, rtol=0)
    assert counts == [len(PROMPT)] * (2 * size)


@pytest.mark.parametrize("kind", [ForgetfulRanks, ForgetfulWholes])
@pytest.mark.parametrize("wanted", [[len(PROMPT) - 1, 8, 7], [0, 0, 3], [5], list(range(len(PROMPT)))[::-1]])
def test_wanted_rows_are_right_where_a_rank_knows_only_its_own_rows_of_the_residual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[int], kind: type[ThreadRanks]
) -> None:
    make_qwen3(tmp_path)
    whole = run(*load(tmp_path), one_prompt(PROMPT))
    monkeypatch.setattr("hookline.core.distributed.ranks.ROW_TILE", 4)
    shards = on_ranks(2, lambda ranks: run(*load(tmp_path, ranks), one_prompt(PROMPT), wanted), kind)
    torch.testing.assert_close(torch.cat(shards, -1), whole[wanted], atol=TOLERANCE, rtol=0)


def test_the_last_feed_forward_is_computed_for_the_wanted_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen3(tmp_path)
    num_rows, feed_forward = [], TorchKernels.linear_silu_mul

    def noted(kernels: TorchKernels, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        num_rows.append(len(x_TD))
        return feed_forward(kernels, x_TD, weight_FD)

    monkeypatch.setattr(TorchKernels, "linear_silu_mul", noted)
    model, kernels, cache = load(tmp_path)
    for wanted, last in ((None, len(PROMPT)), ([5, 2], 2)):
        num_rows.clear()
        run(model, kernels, cache, one_prompt(PROMPT), wanted)
        assert num_rows == [*[len(PROMPT)] * (len(model.layers) - 1), last]


def test_random_weights_do_not_depend_on_the_ranks() -> None:
    whole = build(Qwen3, QWEN3)[0]
    random_weights(whole.weight_targets(), 5)
    for rank in range(2):
        part = build(Qwen3, QWEN3, LocalRanks(rank, 2))[0]
        random_weights(part.weight_targets(), 5)
        everything = whole.weight_targets()
        for name, target in part.weight_targets().items():
            if target.view is not None:
                full = everything[name].view
                assert full is not None
                assert torch.equal(target.view, target.cut(full)), name


def test_every_parameter_of_transformers_has_a_target_of_its_shape(tmp_path: Path) -> None:
    hf_model = make_qwen3(tmp_path, attention_bias=True)
    targets = build(Qwen3, resolve(str(tmp_path)).config)[0].weight_targets()
    assert {name: tuple(p.shape) for name, p in hf_model.named_parameters()} == {n: t.shape for n, t in targets.items()}


def test_a_tied_checkpoint_may_hold_the_head_all_the_same(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make_qwen3(tmp_path, tie_word_embeddings=True)
    save_file({"lm_head.weight": model.lm_head.weight.detach().clone()}, tmp_path / "model-extra.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"weight_map": {', '"weight_map": {"lm_head.weight": "model-extra.safetensors",')
    )
    ours = run(*load(tmp_path), one_prompt(PROMPT))
    torch.testing.assert_close(ours, their_logits(model, PROMPT), rtol=0, atol=TOLERANCE)


def test_an_untied_model_does_not_make_do_without_its_head(tmp_path: Path) -> None:
    make_qwen3(tmp_path, tie_word_embeddings=True)
    model = build(Qwen3, {**resolve(str(tmp_path)).config, "tie_word_embeddings": False})[0]
    with pytest.raises(CheckpointError, match=r"1 missing tensor: lm_head\.weight"):
        load_checkpoint(tmp_path, model.weight_targets())


def test_spec_reads_the_sizes_of_the_whole_model() -> None:
    spec = Qwen3.spec({**QWEN3, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.hidden_size, spec.vocab_size, spec.max_position) == (32, 96, 512)


def test_the_rope_table_reaches_the_longest_position() -> None:
    config = {**QWEN3, "rope_scaling": {"type": "linear", "factor": 2.0}}
    model = build(Qwen3, config)[0]
    assert model.layers[0].rope.table_PE.shape == (Qwen3.spec(config).max_position, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, ["model_type = 'llama'", "supported: qwen3"]),
        ({"architectures": ["Qwen3ForTokens"]}, ["architectures = ['Qwen3ForTokens']", "Qwen3ForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "supported: silu"]),
        ({"use_sliding_window": True}, ["use_sliding_window = True", "supported: false"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "full_attention in every layer"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, ["rope_type 'longrope'", "yarn"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "a divisor of num_attention_heads = 4"]),
        ({"head_dim": 15}, ["head_dim = 15", "even"]),
        ({"hidden_size": None}, ["hidden_size = None", "positive whole number"]),
        ({"vocab_size": "big"}, ["vocab_size = 'big'", "positive whole number"]),
    ],
)
def test_what_is_not_implemented_is_refused_with_key_and_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Qwen3.spec({**QWEN3, **change})
    assert all(word in str(error.value) for word in words)


def test_a_missing_size_is_named() -> None:
    config = {key: value for key, value in QWEN3.items() if key != "intermediate_size"}
    with pytest.raises(ConfigError, match="intermediate_size = missing"):
        Qwen3.spec(config)


@pytest.mark.parametrize(
    ("size", "change", "words"),
    [
        (3, {}, ["tp=3", "4 attention heads and 2 kv heads", "1, 2, 4"]),
        (4, {"intermediate_size": 50}, ["tp=4", "intermediate_size 50", "1, 2, 5, 10, 25, 50"]),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(size: int, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(Qwen3, {**QWEN3, **change}, LocalRanks(0, size))
    assert all(word in str(error.value) for word in words)
