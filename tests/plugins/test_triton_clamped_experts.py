"""Triton's clamped experts against plain torch: every tiling, ragged sizes, and full size on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from hookline.core.layers import plain_clamped_expert_mlp, plain_route_experts  # noqa: E402
from hookline.plugins.kernels.experts.triton_experts import clamped_expert_mlp  # noqa: E402
from hookline.plugins.kernels.experts.triton_routing import Tiling, clamped_tiling  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
ALPHA, LIMIT = 1.702, 1.5
RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
"""As in test_triton_experts.py."""


def make(num_tokens: int, num_experts: int, num_chosen: int, hidden: int, inner: int, dtype: torch.dtype):
    """x, experts, weights, gate_up and its bias, down and its bias; half of the tokens choose expert 0."""
    generator = torch.Generator().manual_seed(num_tokens + hidden)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(DEVICE)

    logits_TX = random(num_tokens, num_experts)
    logits_TX[::2, 0] += 50
    expert_TA, weight_TA = plain_route_experts(logits_TX, num_chosen, True)
    weights = (
        random(num_experts, 2 * inner, hidden, scale=2 * hidden**-0.5),
        random(num_experts, 2 * inner),
        random(num_experts, hidden, inner, scale=inner**-0.5),
        random(num_experts, hidden),
    )
    x_TD = random(num_tokens, 2 * hidden)[:, :hidden].to(dtype)
    return x_TD, expert_TA, weight_TA, *(one.to(dtype) for one in weights)


def check(given: tuple[Tensor, ...], cut: Tiling | None = None) -> None:
    out_TD = clamped_expert_mlp(*given, ALPHA, LIMIT, cut)
    exact = [one if one.dtype == torch.int64 else one.float() for one in given]
    expected_TD = plain_clamped_expert_mlp(*exact, ALPHA, LIMIT)
    assert out_TD.shape == given[0].shape and out_TD.dtype == given[0].dtype
    error = (out_TD.float() - expected_TD).norm() / expected_TD.norm()
    assert error < RELATIVE_ERROR[given[0].dtype]  # a NaN is no less


@pytest.mark.parametrize(
    "cut",
    [None, Tiling(16, (32, 64, 4, 2), (16, 32, 4, 2)), Tiling(64, (32, 16, 4, 2), (64, 32, 4, 2))],
    ids=["as it comes", "small", "large"],
)
def test_every_tiling_gives_what_plain_torch_gives(cut: Tiling | None) -> None:
    check(make(70, 6, 2, 40, 24, torch.float32), cut)


def test_a_tile_of_some_pairs_holds_all_of_an_expert() -> None:
    assert [clamped_tiling(4 * rows, 32, 2).block_m for rows in (1, 64, 128, 129, 256, 384, 4096)] == [
        16, 16, 32, 64, 64, 64, 128,
    ]  # fmt: skip


def test_no_token_is_no_work() -> None:
    assert clamped_expert_mlp(*make(0, 4, 2, 16, 16, torch.float32), ALPHA, LIMIT).shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 128, 256, 2048])
def test_experts_of_full_size_give_what_plain_torch_gives(num_tokens: int) -> None:
    check(make(num_tokens, 8, 4, 2880, 2880, torch.bfloat16))
