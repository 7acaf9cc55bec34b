"""engine.batch_invariant on a CPU: requests in random batches get the bits that they get alone, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hookline import LLM
from hookline.core.contracts import ModelConfig, Runtime
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError, PluginError
from hookline.core.layers import ParallelHead, QKVParallelLinear, WholeQKNorm
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.worker.results.scores import scored, scored_alone
from tests.batch_invariance import alone, make_load, try_batches
from tests.small_models import CONFIGS, SIZES

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunked beside decodes": dict(max_num_batched_tokens=24, max_num_seqs=24),
    "preempted": dict(num_blocks=16, block_size=8, overlap=True),
}
SCHEDULERS = ("chunked", "prefill_first", "longest_first")


def make(name: str = "qwen3", shape: dict[str, Any] = SHAPE, **options: Any) -> LLM:
    model = {"name": name, "checkpoint": "", "weights": "random", "random_shape": shape}
    engine = {"max_model_len": 128, "batch_invariant": True, **options.pop("engine", {})}
    return LLM(model=model, device="cpu", kernels="torch", engine=engine, **options)


@pytest.fixture(scope="module")
def expected():
    load = make_load(20, 500, 90, most_tokens=10)
    with make(engine=dict(max_num_seqs=1)) as llm:
        return load, alone(llm, load)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_requests_in_random_batches_get_the_bits_that_they_get_alone(expected, way):
    load, answers = expected
    with make(engine=WAYS[way], scheduler=SCHEDULERS[len(way) % 3]) as llm:
        seen = try_batches(llm, load, answers, 4, seed=len(way))
    assert not seen.other
    assert seen.cached_tokens
    assert seen.preemptions or way != "preempted"


@pytest.mark.slow
def test_without_the_mode_some_request_gets_other_bits(expected):
    """So the comparison sees what it is for."""
    load, _ = expected
    with make(engine=dict(batch_invariant=False)) as llm:
        assert try_batches(llm, load, alone(llm, load), 2).other


CONFIGS = {
    **CONFIGS,
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    },
}
MODELS = {"gemma3": "gemma3", "mistral_window": "llama", "qwen3_moe": "qwen3_moe", "olmo2": "olmo2", "qwen2": "qwen2"}


def model_batches(config: str, num_batches: int, dtype: str = "bfloat16", **options: Any) -> list[str]:
    load = make_load(14, 96, 60, most_tokens=8)
    options |= {"dtype": dtype}
    with make(MODELS[config], CONFIGS[config], **options, engine=dict(max_num_seqs=1)) as llm:
        answers = alone(llm, load)
    chunked = dict(max_num_batched_tokens=40, max_num_seqs=14)
    with make(MODELS[config], CONFIGS[config], **options, engine=chunked) as llm:
        return try_batches(llm, load, answers, num_batches).other


@pytest.mark.slow
@pytest.mark.parametrize("config", ["gemma3", "qwen3_moe"])
def test_other_models_keep_the_bits_in_bfloat16(config):
    assert not model_batches(config, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", MODELS)
def test_every_model_that_declares_the_mode_keeps_the_bits(config, dtype):
    assert not model_batches(config, 40, dtype)


@pytest.mark.nightly
def test_ranks_keep_the_bits():
    assert not model_batches("qwen2", 20, tp=2)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_random_batches_keep_the_bits(way, scheduler, dtype):
    """56 for each of 18 ways."""
    load = make_load(24, 500, 90, most_tokens=16)
    with make(dtype=dtype, engine=dict(max_num_seqs=1)) as llm:
        answers = alone(llm, load)
    with make(dtype=dtype, engine=WAYS[way], scheduler=scheduler) as llm:
        seen = try_batches(llm, load, answers, 56, seed=len(scheduler))
    assert not seen.other
    assert seen.preemptions or way != "preempted"


def refusal(**options: Any) -> str:
    with pytest.raises((PluginError, ConfigError)) as raised:
        make(**options).close()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_model_that_does_not_declare_the_mode_is_refused():
    message = refusal(name="gpt_oss", shape=CONFIGS["gpt_oss"])
    assert message.startswith("model 'gpt_oss'")
    assert "engine.batch_invariant is true, which it does not declare" in message


class Counting(PlainKernels):
    """Counts its products."""

    products = 0

    def linear(self, *given: Any) -> torch.Tensor:
        self.products += 1
        return super().linear(*given)


@pytest.mark.parametrize("is_on", [False, True])
def test_the_head_multiplies_by_the_kernels_in_this_mode_alone(is_on):
    kernels: Any = Counting(None, None)  # type: ignore[arg-type]
    place = Runtime(torch.device("cpu"), torch.float32, LocalRanks(), kernels, ModelConfig(), batch_invariant=is_on)
    head = ParallelHead(10, 4, place)
    head.weight_VD.normal_()
    hidden_ND = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden_ND), hidden_ND @ head.weight_VD.T)
    assert kernels.products == is_on


def test_norms_over_the_heads_of_several_ranks_are_refused_in_one_line():
    kernels: Any = PlainKernels(None, None)  # type: ignore[arg-type]
    place = Runtime(torch.device("cpu"), torch.float32, LocalRanks(0, 2), kernels, batch_invariant=True)
    with pytest.raises(ConfigError, match=r"engine.batch_invariant=true with tp=2: .*; use tp=1$"):
        WholeQKNorm(QKVParallelLinear(16, 4, 2, 4, place), place, 1e-6)


def test_equally_likely_tokens_come_in_their_order_however_many_are_asked_for():
    raw_NV = torch.zeros(3, 200)
    raw_NV[:, [50, 7, 120]] = 2.0
    for count in (1, 2, 3):
        found_NX = scored_alone(raw_NV, torch.tensor([7, 50, 0]), count)
        assert found_NX[:, 2 : 2 + count].tolist() == [[7, 50, 120][:count]] * 3
        assert torch.equal(found_NX[:, :2], scored(raw_NV, torch.tensor([7, 50, 0]), 0))
