"""The Triton kernels of recurrent layers at Qwen3-Next's sizes on a GPU, beside the plain operations."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.contracts import DeltaNet, StateRows
from hookline.core.layers import plain_gated_delta_rule, plain_short_convolution
from tests.small_models import CONFIGS

pytestmark = pytest.mark.gpu
KEY_HEADS, HEADS, SIZE, NUM_ROWS = 16, 32, 128, 300
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
RELATIVE_ERROR = {torch.bfloat16: 8e-3, torch.float32: 1e-5}
STEPS = {
    "decodes": ([1] * 256, 256),
    "prompts": ([2000, 70, 3, 300], 0),
    "mixed": ([1] * 30 + [5, 500], 30),
}


def step_of(counts: list[int], num_decodes: int) -> StateRows:
    starts = np.array([0, *accumulate(counts)], dtype=np.int32)
    rows_B = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))[: len(counts)].cuda()
    is_new_B = torch.zeros(len(counts), dtype=torch.bool, device="cuda")
    return StateRows({}, rows_B, torch.from_numpy(starts).cuda(), is_new_B, num_decodes, max(counts), starts)


def inputs(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a convolution is given, and what the delta rule is given: views of one product, as a model splits it."""
    torch.manual_seed(num_tokens)
    mixed = torch.randn(num_tokens, CHANNELS, device="cuda").to(dtype)
    q, k, v = mixed.split([KEY_HEADS * SIZE, KEY_HEADS * SIZE, HEADS * SIZE], 1)
    log_decay, beta = -torch.rand(num_tokens, HEADS, device="cuda"), torch.rand(num_tokens, HEADS, device="cuda")
    heads = [x.view(num_tokens, -1, SIZE) for x in (q, k, v)]
    return mixed, [*heads, log_decay, beta]


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < RELATIVE_ERROR[out.dtype], f"relative error {error:.2g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_the_delta_rule_equals_the_plain_one(step: str, dtype: torch.dtype) -> None:
    from hookline.plugins.kernels.recurrent.triton_recurrent import gated_delta_rule

    states = step_of(*STEPS[step])
    _, given = inputs(sum(STEPS[step][0]), dtype)
    state = torch.randn(NUM_ROWS, HEADS, SIZE, SIZE, device="cuda")
    expected_state = state.clone()
    expected = plain_gated_delta_rule(*(x.float() for x in given), expected_state, states)
    check(gated_delta_rule(*given, state, states), expected)
    error = ((state - expected_state).norm() / expected_state.norm()).item()
    assert error < (1e-5 if dtype == torch.float32 else 2e-3)  # products of 11 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_the_short_convolution_equals_the_plain_one(step: str, dtype: torch.dtype) -> None:
    from hookline.plugins.kernels.recurrent.triton_recurrent import short_convolution

    states = step_of(*STEPS[step])
    mixed, _ = inputs(sum(STEPS[step][0]), dtype)
    weight = torch.randn(CHANNELS, 4, device="cuda").to(dtype)
    state = torch.randn(NUM_ROWS, CHANNELS, 3, device="cuda").to(dtype)
    expected_state = state.clone()
    expected = plain_short_convolution(mixed.float(), weight.float(), expected_state, states)
    check(short_convolution(mixed, weight, state, states), expected)
    assert torch.equal(state, expected_state)


def test_a_captured_step_with_prompts_follows_the_lengths_on_the_device() -> None:
    from hookline.plugins.kernels.recurrent.triton_recurrent import gated_delta_rule

    states = step_of([1, 1, 300, 100], 2)
    _, given = inputs(402, torch.bfloat16)
    captured = replace(states, query_starts_host=None, max_query_len=400)
    state, lengths = torch.zeros(NUM_ROWS, HEADS, SIZE, SIZE, device="cuda"), captured.query_starts_B1.clone()
    captured.query_starts_B1.copy_(torch.tensor([0, 1, 2, 2, 402], device="cuda"))
    gated_delta_rule(*given, state, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_delta_rule(*given, state, captured)
    captured.query_starts_B1.copy_(lengths)
    state.zero_()
    graph.replay()
    expected_state = torch.zeros_like(state)
    check(out, plain_gated_delta_rule(*(x.float() for x in given), expected_state, states))
    assert ((state - expected_state).norm() / expected_state.norm()).item() < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [2, 3])
def test_a_delta_net_of_one_token_equals_its_operations_one_by_one(group: int, dtype: torch.dtype) -> None:
    from hookline.plugins.kernels.norms.triton_gates import delta_gates
    from hookline.plugins.kernels.norms.triton_norms import rms_norm_silu_mul
    from hookline.plugins.kernels.recurrent.triton_delta_net import delta_net_of_one_token
    from hookline.plugins.kernels.recurrent.triton_recurrent import gated_delta_rule, short_convolution

    states, heads = step_of([1], 1), KEY_HEADS * group
    sizes = [KEY_HEADS * SIZE, KEY_HEADS * SIZE, heads * SIZE]
    torch.manual_seed(group)
    products = torch.randn(1, sum(sizes) + heads * SIZE + 2 * heads, device="cuda").to(dtype)
    mixed, gate, beta, decay = products.split([sum(sizes), heads * SIZE, heads, heads], 1)
    rate, bias = torch.rand(heads, device="cuda"), torch.rand(heads, device="cuda")
    norm, weight = torch.rand(SIZE, device="cuda").to(dtype), torch.randn(sum(sizes), 4, device="cuda").to(dtype)
    net, gate_THF = DeltaNet(weight, rate, bias, norm, 1e-6), gate.view(1, heads, SIZE)
    conv = torch.randn(NUM_ROWS, sum(sizes), 3, device="cuda").to(dtype)
    memory = torch.randn(NUM_ROWS, heads, SIZE, SIZE, device="cuda")
    expected_conv, expected_memory = conv.clone(), memory.clone()
    parts = short_convolution(mixed, weight, expected_conv, states).split(sizes, 1)
    given = [*(part.view(1, -1, SIZE) for part in parts), *delta_gates(beta, decay, rate, bias)]
    expected = rms_norm_silu_mul(gated_delta_rule(*given, expected_memory, states), norm, 1e-6, gate_THF)
    check(delta_net_of_one_token(mixed, beta, decay, gate_THF, net, conv, memory, states), expected)
    assert torch.equal(conv, expected_conv)
    assert ((memory - expected_memory).norm() / expected_memory.norm()).item() < 1e-6


def test_one_request_and_several_get_the_tokens_of_plain_torch() -> None:
    """With an expert for all tokens that is as large as the others, whose launches it then shares."""
    shape = {**CONFIGS["qwen3_5_moe"], "shared_expert_intermediate_size": 24, "vocab_size": 2000, "hidden_size": 256}
    model = {"name": "qwen3_5", "checkpoint": "", "weights": "random", "random_shape": shape}
    sizes = {"max_num_seqs": 4, "max_model_len": 256, "memory_fraction": 0.1}
    prompts, params = [[5, 9, 11], list(range(40)), [7] * 19], SamplingParams(max_tokens=24, temperature=0.0)
    found = []
    for kernels in ("torch", "triton"):
        with LLM(model=model, device="cuda", dtype="float32", kernels=kernels, engine=sizes) as llm:
            outputs = [llm.generate([prompt], params)[0] for prompt in prompts] + llm.generate(prompts, params)
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1] and found[0][:3] == found[0][3:] and len(set(found[0][0])) > 3
