"""Triton's products of a few tokens with their experts against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from hookline.core.layers import every_expert, plain_clamped_expert_mlp, plain_route_experts  # noqa: E402
from hookline.plugins.kernels.experts.triton_few_experts import few_expert_mlp, fits  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
"""As in test_triton_experts.py."""
SHAPES = [(1, 4, 1, 16, 16), (1, 12, 10, 48, 24), (4, 50, 3, 40, 72), (2, 24, 3, 16, 1152)]
"""Tokens, experts, chosen, hidden, intermediate; the last is cut in chunks, since it is no power of two."""
FULL_SIZES = [
    (1, 128, 8, 2048, 768),
    (4, 128, 8, 2048, 768),
    (3, 128, 10, 2048, 512),
    (2, 16, 4, 2880, 2880),
    (1, 66, 8, 2048, 1408),
]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, experts, weights, gate_up, down, and the biases of both products."""
    num_tokens, num_experts, num_chosen, hidden, inner = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(DEVICE, dtype)

    expert_TA, weight_TA = plain_route_experts(random(num_tokens, num_experts).float(), num_chosen, True)
    x_TD = random(num_tokens, 2 * hidden)[:, :hidden]
    gate_up_XFD = random(num_experts, 2 * inner, hidden, scale=2 * hidden**-0.5)
    down_XDF = random(num_experts, hidden, inner, scale=inner**-0.5)
    biases = random(num_experts, 2 * inner), random(num_experts, hidden)
    return x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, *biases


def check_shared(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With the first expert's weights for all tokens, too, behind gates that are columns of a product."""
    *given, _, _ = make(shape, dtype)
    x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF = given
    gate_T1 = x_TD[:, 3:5].flip(1)[:, 1:]
    out_TD = few_expert_mlp(*given, shared=(gate_up_XFD[0], down_XDF[0], gate_T1))
    weights = gate_up_XFD.float(), down_XDF.float()
    shared_TD = every_expert(x_TD.float(), torch.zeros_like(expert_TA[:, :1]), gate_T1.float().sigmoid(), *weights)
    expected_TD = every_expert(x_TD.float(), expert_TA, weight_TA, *weights) + shared_TD
    error = (out_TD.float() - expected_TD).norm() / expected_TD.norm()
    assert out_TD.dtype == dtype and error < RELATIVE_ERROR[dtype]


def check(shape: tuple[int, ...], dtype: torch.dtype, *, is_clamped: bool) -> None:
    *given, gate_up_bias_XF, down_bias_XD = make(shape, dtype)
    x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF = given
    if is_clamped:
        biases = {"gate_up_bias_XF": gate_up_bias_XF, "down_bias_XD": down_bias_XD}
        out_TD = few_expert_mlp(*given, **biases, alpha=1.7, limit=1.5)
        weights = (one.float() for one in (gate_up_XFD, gate_up_bias_XF, down_XDF, down_bias_XD))
        expected_TD = plain_clamped_expert_mlp(x_TD.float(), expert_TA, weight_TA, *weights, 1.7, 1.5)
    else:
        out_TD = few_expert_mlp(*given)
        expected_TD = every_expert(x_TD.float(), expert_TA, weight_TA, gate_up_XFD.float(), down_XDF.float())
    assert out_TD.shape == x_TD.shape and out_TD.dtype == dtype
    error = (out_TD.float() - expected_TD).norm() / expected_TD.norm()
    assert error < RELATIVE_ERROR[dtype]  # a NaN is no less


@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_few_tokens_get_what_plain_torch_gives(shape: tuple[int, ...], is_clamped: bool) -> None:
    check(shape, torch.float32, is_clamped=is_clamped)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_expert_of_all_tokens_is_added_in_the_same_launches(shape: tuple[int, ...]) -> None:
    check_shared(shape, torch.float32)


def test_several_tokens_are_few_only_where_they_hardly_share_an_expert() -> None:
    def takes(num_tokens: int, num_chosen: int, num_experts: int) -> bool:
        return fits(torch.zeros(num_tokens, num_chosen, dtype=torch.int64), num_experts)

    assert takes(1, 4, 4) and takes(4, 8, 128) and takes(2, 4, 32)
    assert not takes(3, 4, 32) and not takes(5, 1, 512) and not takes(0, 4, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize("shape", FULL_SIZES, ids=str)
def test_a_few_tokens_of_full_size_get_what_plain_torch_gives(shape: tuple[int, ...], is_clamped: bool) -> None:
    check(shape, torch.bfloat16, is_clamped=is_clamped)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FULL_SIZES[:3], ids=str)
def test_an_expert_of_all_tokens_of_full_size_is_added_in_the_same_launches(shape: tuple[int, ...]) -> None:
    check_shared(shape, torch.bfloat16)
