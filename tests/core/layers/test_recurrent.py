"""The plain recurrent operations beside transformers' Qwen3-Next, whole and in chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from hookline.core.contracts import StateRows
from hookline.core.layers import plain_gated_delta_rule, plain_short_convolution

KEY_HEADS, HEADS, KEY_DIM, DIM = 2, 4, 16, 8
EXACT = 2e-5  # float32, sums of some hundred terms


def step(rows: list[int], counts: list[int], num_decodes: int = 0) -> StateRows:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    is_new_B = torch.zeros(len(rows), dtype=torch.bool)
    of_step = torch.tensor(rows), torch.from_numpy(starts), is_new_B, num_decodes, max(counts), starts
    return StateRows({}, *of_step)


def inputs(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    q, k = (torch.randn(num_tokens, KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    v = torch.randn(num_tokens, HEADS, DIM, generator=generator)
    log_decay = -2 * torch.rand(num_tokens, HEADS, generator=generator)
    return [q, k, v, log_decay, torch.rand(num_tokens, HEADS, generator=generator)]


def of_transformers(given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, log_decay, beta = (tensor.unsqueeze(0) for tensor in given)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": None}
    out, state = qwen3_next.torch_recurrent_gated_delta_rule(q, k, v, g=log_decay, beta=beta, **options)
    return out[0], state[0]


@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 150])
def test_a_prompt_gets_what_transformers_computes_for_it(num_tokens: int) -> None:
    given, state = inputs(num_tokens), torch.zeros(3, HEADS, KEY_DIM, DIM)
    out = plain_gated_delta_rule(*given, state, step([1], [num_tokens]))
    expected, expected_state = of_transformers(given)
    torch.testing.assert_close(out, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state[1], expected_state, rtol=EXACT, atol=EXACT)
    assert not state[[0, 2]].any()


@pytest.mark.slow
def test_chunks_and_decodes_give_what_the_whole_prompt_gives() -> None:
    given, other = inputs(90), inputs(41)
    state = torch.zeros(5, HEADS, KEY_DIM, DIM)
    first = plain_gated_delta_rule(*(tensor[:70] for tensor in given), state, step([3], [70]))
    mixed = [torch.cat((tensor[70:71], late)) for tensor, late in zip(given, other, strict=True)]
    second = plain_gated_delta_rule(*mixed, state, step([3, 0], [1, 41], num_decodes=1))
    rest = [plain_gated_delta_rule(*(x[t : t + 1] for x in given), state, step([3], [1], 1)) for t in range(71, 90)]
    expected, expected_state = of_transformers(given)
    torch.testing.assert_close(torch.cat((first, second[:1], *rest)), expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state[3], expected_state, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(second[1:], of_transformers(other)[0], rtol=EXACT, atol=EXACT)


@pytest.mark.slow
def test_a_strong_decay_over_a_whole_chunk_does_not_overflow() -> None:
    given, state = inputs(64), torch.zeros(1, HEADS, KEY_DIM, DIM)
    given[3] -= 20
    out = plain_gated_delta_rule(*given, state, step([0], [64]))
    torch.testing.assert_close(out, of_transformers(given)[0], rtol=EXACT, atol=EXACT)


def test_a_short_convolution_in_steps_is_that_of_the_whole_sequence() -> None:
    x, weight = torch.randn(20, 6), torch.randn(6, 4)
    padded = functional.pad(x.T.unsqueeze(0), (3, 0))
    expected = functional.silu(functional.conv1d(padded, weight.unsqueeze(1), groups=6))[0].T
    state, outs, begin = torch.zeros(4, 6, 3), [], 0
    for count in (1, 2, 9, 1, 1, 6):
        outs.append(plain_short_convolution(x[begin : begin + count], weight, state, step([2], [count])))
        begin += count
    torch.testing.assert_close(torch.cat(outs), expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state[2], x[-3:].T)
    assert not state[[0, 1, 3]].any()


def test_decodes_and_chunks_of_one_step_are_convolved_each_with_its_own_past() -> None:
    x, weight, state = torch.randn(9, 6), torch.randn(6, 4), torch.randn(5, 6, 3)
    alone, together = state.clone(), state.clone()
    parts, rows, counts = [], [4, 0, 2, 1], [1, 1, 5, 2]
    for row, part in zip(rows, x.split(counts), strict=True):
        parts.append(plain_short_convolution(part, weight, alone, step([row], [len(part)])))
    out = plain_short_convolution(x, weight, together, step(rows, counts, num_decodes=2))
    torch.testing.assert_close(out, torch.cat(parts), rtol=EXACT, atol=EXACT)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("bias_C", [None, torch.linspace(-1, 1, 5)], ids=["plain", "bias"])
def test_a_short_convolution_needs_no_lengths_on_the_host(bias_C: torch.Tensor | None) -> None:
    """Two decodes, then chunks, one of them empty and one longer than what the state keeps."""
    counts, x_TC, weight_CW = [1, 1, 3, 0, 9, 2], torch.randn(16, 5), torch.randn(5, 4)
    rows = [6, 5, 4, 3, 2, 1]
    state = torch.randn(8, 5, 3)
    before, states = state.clone(), replace(step(rows, counts, 2), query_starts_host=None)
    out_TC = plain_short_convolution(x_TC, weight_CW, state, states, bias_C)
    for row, own_TC, own_out_TC in zip(rows, x_TC.split(counts), out_TC.split(counts), strict=True):
        seen_CL = torch.cat([before[row], own_TC.T], 1)
        torch.testing.assert_close(state[row], seen_CL[:, -3:], rtol=0, atol=0)
        if len(own_TC):
            expected_1CL = functional.conv1d(seen_CL.unsqueeze(0), weight_CW.unsqueeze(1), bias_C, groups=5)
            torch.testing.assert_close(own_out_TC, functional.silu(expected_1CL)[0].T, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state[[0, 7]], before[[0, 7]], rtol=0, atol=0)
