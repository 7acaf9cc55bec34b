"""The engine in batch-invariant mode on a GPU: each request's bits in random batches are those that it gets alone.

Its kernels: tests/plugins/test_triton_invariant_bits.py. Without conftest's fixtures: pytest --noconftest runs it
anywhere. HOOKLINE_BATCHES says how many random batches the engine computes (default 60).
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from hookline import LLM
from tests.batch_invariance import (
    Load,
    alone,
    bits,
    decodes_that_joined,
    launches_of,
    make_load,
    one_after_the_other,
    try_batches,
)

pytestmark = pytest.mark.gpu
NUM_BATCHES = int(os.environ.get("HOOKLINE_BATCHES", "60"))
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
"""Qwen3-0.6B with four of its layers."""
WAYS = {
    "as it is": dict(max_num_seqs=64),
    "chunked beside decodes": dict(max_num_seqs=64, max_num_batched_tokens=192),
    "preempted": dict(max_num_seqs=64, num_blocks=70, max_num_batched_tokens=2048),
    "without graphs": dict(max_num_seqs=64, cuda_graphs=False, overlap=False),
}


def engine(scheduler: str = "chunked", *, is_invariant: bool = True, **sizes) -> LLM:
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_model_len": 4096, "memory_fraction": 0.3, "batch_invariant": is_invariant, **sizes}
    return LLM(model=model, device="cuda", dtype="bfloat16", kernels="triton", scheduler=scheduler, engine=sizes)


@pytest.fixture(scope="module")
def expected():
    load = make_load(56, 150_000, 2400, most_tokens=32, logprobs=(2,))  # each number has graphs of its own
    with engine(max_num_seqs=1) as llm:
        return load, alone(llm, load)


@pytest.mark.parametrize("scheduler", ["chunked", "prefill_first"])
@pytest.mark.parametrize("way", WAYS)
def test_requests_in_random_batches_get_the_bits_that_they_get_alone(expected, way, scheduler):
    load, answers = expected
    with engine(scheduler, **WAYS[way]) as llm:
        seen = try_batches(llm, load, answers, -(-NUM_BATCHES // (2 * len(WAYS))), seed=len(way))
    print(f"{way}, {scheduler}: {seen.batches} batches, {seen.preemptions} preemptions, {seen.cached_tokens} cached")
    assert not seen.other, f"{len(seen.other)} differ: {seen.other[:5]}"
    assert seen.cached_tokens
    assert seen.preemptions or way != "preempted"


def test_requests_that_join_prompts_get_the_tokens_that_they_get_alone():
    asked = make_load(40, 150_000, 900, most_tokens=40)
    load = Load(asked.prompts, [replace(one, prompt_logprobs=None) for one in asked.params])
    with engine("prefill_first", max_num_seqs=64, max_num_batched_tokens=2048) as llm:
        answers = alone(llm, load)
        launched = launches_of(llm.engine.executor.prompt_graphs)
        assert [bits(output) for output in one_after_the_other(llm, load)] == answers
    joined = decodes_that_joined(launched)
    assert len(joined) >= 8 and len(set(joined)) > 5


def test_without_the_mode_some_request_gets_other_bits(expected):
    """So the comparison sees what it is for."""
    load, _ = expected
    with engine(is_invariant=False, max_num_seqs=64) as llm:
        assert try_batches(llm, load, alone(llm, load), 3).other
