"""Experts in plain torch: each way of computing them against the definition, and the kernels that may stand in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.checkpoint.load import random_weights
from hookline.core.contracts import Kernels, Runtime
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError
from hookline.core.layers import (
    ParallelExperts,
    SoftmaxRouter,
    every_expert,
    expert_products,
    plain_clamped_expert_mlp,
    plain_expert_mlp,
    plain_route_experts,
)
from hookline.core.testing.plain_kernels import PlainKernels

HIDDEN, INNER, NUM_EXPERTS = 12, 10, 7


def inputs(num_tokens: int, num_chosen: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    x_TD, logits_TX, gate_up_XFD, down_XDF = (
        torch.randn(shape, generator=generator)
        for shape in (
            (num_tokens, HIDDEN),
            (num_tokens, NUM_EXPERTS),
            (NUM_EXPERTS, 2 * INNER, HIDDEN),
            (NUM_EXPERTS, HIDDEN, INNER),
        )
    )
    weight_TA, expert_TA = logits_TX.softmax(-1).topk(num_chosen)
    return x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF


def defined(x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """Token by token, in float64."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, experts_A in enumerate(expert_TA.tolist()):
        for place, index in enumerate(experts_A):
            gate_F, up_F = (gate_up_XFD[index].double() @ x_TD[token].double()).chunk(2)
            out_D = down_XDF[index].double() @ (functional.silu(gate_F) * up_F)
            out_TD[token] += weight_TA[token, place].double() * out_D
    return out_TD


@pytest.mark.parametrize("compute", [plain_expert_mlp, every_expert])
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(1, 1), (1, 3), (5, 7), (40, 2), (0, 2)])
def test_experts_equal_their_definition(compute: Any, num_tokens: int, num_chosen: int) -> None:
    given = inputs(num_tokens, num_chosen)
    torch.testing.assert_close(compute(*given).double(), defined(*given), rtol=0, atol=2e-5)


def test_experts_with_a_gate_of_gelu_equal_their_definition() -> None:
    given = inputs(5, 3)
    expected_TD = PlainKernels(None, None).gelu_expert_mlp(*given)
    torch.testing.assert_close(plain_expert_mlp(*given, "gelu_tanh"), expected_TD, rtol=0, atol=2e-5)


def test_in_bfloat16_the_error_stays_that_of_rounding() -> None:
    x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF = inputs(6, 3)
    given = (x_TD.bfloat16(), expert_TA, weight_TA, gate_up_XFD.bfloat16(), down_XDF.bfloat16())
    for compute in (plain_expert_mlp, every_expert):
        out_TD = compute(*given)
        assert out_TD.dtype == torch.bfloat16
        error_TD, expected_TD = out_TD.double() - defined(*given), defined(*given)
        assert error_TD.norm() < 1e-2 * expected_TD.norm()  # some roundings of 2^-9 each


@pytest.mark.parametrize("normalise", [False, True])
def test_a_router_takes_the_most_probable_experts_best_first(normalise: bool) -> None:
    logits_TX = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, -5.0, 0.5, 9.0]])
    expert_TA, weight_TA = plain_route_experts(logits_TX, 2, normalise)
    assert expert_TA.tolist() == [[1, 2], [3, 2]]
    chosen_TA = logits_TX.softmax(-1).gather(1, expert_TA)
    expected = chosen_TA / chosen_TA.sum(-1, keepdim=True) if normalise else chosen_TA
    torch.testing.assert_close(weight_TA, expected)
    assert weight_TA.dtype == torch.float32


PLAIN: Any = SimpleNamespace(route_experts=Kernels.route_experts, expert_mlp=Kernels.expert_mlp)
"""Kernels that leave both operations out."""


def runtime_of(kernels: Any, ranks: LocalRanks | None = None) -> Runtime:
    return Runtime(torch.device("cpu"), torch.float32, ranks or LocalRanks(), kernels)


def test_the_parts_of_all_ranks_add_up_to_the_whole() -> None:
    given = inputs(9, 2)[:3]
    whole = ParallelExperts(NUM_EXPERTS, HIDDEN, INNER, runtime_of(PLAIN), what="inner")
    random_weights(whole.targets("experts", "gate", "up", "down"), 1)
    parts = [
        ParallelExperts(NUM_EXPERTS, HIDDEN, INNER, runtime_of(PLAIN, LocalRanks(r, 5)), what="inner") for r in range(5)
    ]
    for part in parts:
        random_weights(part.targets("experts", "gate", "up", "down"), 1)
    total = torch.stack([part.local(*given) for part in parts]).sum(0)
    torch.testing.assert_close(total, whole(*given), rtol=0, atol=1e-6)


def test_ranks_that_do_not_divide_the_features_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp=3 does not divide inner 10\. Valid tp values: 1, 2, 5, 10"):
        ParallelExperts(NUM_EXPERTS, HIDDEN, INNER, runtime_of(PLAIN, LocalRanks(0, 3)), what="inner")


def test_kernels_that_offer_the_operations_are_used_and_others_need_not() -> None:
    x_TD, expert_TA, weight_TA, *_ = inputs(2, 2)
    kernels = SimpleNamespace(
        linear=lambda x, weight, bias: functional.linear(x, weight, bias),
        route_experts=lambda logits, top_k, normalise: (expert_TA + top_k, weight_TA * normalise),
        expert_mlp=lambda x, *_: x + 1,
    )
    experts = ParallelExperts(NUM_EXPERTS, HIDDEN, INNER, runtime_of(kernels), what="inner")
    router = SoftmaxRouter(NUM_EXPERTS, HIDDEN, 2, runtime_of(kernels), normalise=True)
    assert torch.equal(experts(x_TD, expert_TA, weight_TA), x_TD + 1)
    assert torch.equal(router(x_TD)[0], expert_TA + 2)
    kernels.route_experts = Kernels.route_experts
    assert SoftmaxRouter(NUM_EXPERTS, HIDDEN, 2, runtime_of(kernels), normalise=True)(x_TD)[0].shape == (2, 2)


def test_the_sum_over_ranks_and_the_norm_that_follows_are_one_operation_of_the_ranks() -> None:
    class FusingRanks(LocalRanks):
        def all_reduce(self, x: Tensor) -> Tensor:
            pytest.fail("the sum was taken by itself")

        def add_rms_norm(self, kernels: Any, *given: Any) -> tuple[Tensor, Tensor]:
            return (kernels, *given)  # type: ignore[return-value]

    x_TD, expert_TA, weight_TA, *_ = inputs(3, 2)
    kernels, residual_TD, norm_weight_D = PLAIN, torch.randn(3, HIDDEN), torch.randn(HIDDEN)
    experts = ParallelExperts(NUM_EXPERTS, HIDDEN, INNER, runtime_of(kernels, FusingRanks()), what="inner")
    random_weights(experts.targets("experts", "gate", "up", "down"), 1)
    handed: Any = experts.add_rms_norm(x_TD, expert_TA, weight_TA, residual_TD, norm_weight_D, 1e-5)
    assert handed[0] is kernels and handed[2] is residual_TD and handed[3] is norm_weight_D and handed[4] == 1e-5
    torch.testing.assert_close(handed[1], experts.local(x_TD, expert_TA, weight_TA))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_kernels_join_the_sum_over_experts_to_the_norm_where_there_is_no_sum_over_ranks(num_ranks: int) -> None:
    class Joins(PlainKernels):
        calls = 0

        def expert_mlp_add_rms_norm(self, *given: Any) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return super().expert_mlp_add_rms_norm(*given)

    class TwiceTheSame(LocalRanks):
        def all_reduce(self, x: Tensor) -> Tensor:
            return x * self.size

    kernels = Joins(None, None)  # type: ignore[arg-type]
    runtime = runtime_of(kernels, TwiceTheSame(0, num_ranks))
    experts = ParallelExperts(NUM_EXPERTS, HIDDEN, INNER, runtime, what="inner")
    random_weights(experts.targets("experts", "gate", "up", "down"), 1)
    x_TD, expert_TA, weight_TA, *_ = inputs(3, 2)
    residual_TD, norm_weight_D = torch.randn(3, HIDDEN), torch.randn(HIDDEN)
    found = experts.add_rms_norm(x_TD, expert_TA, weight_TA, residual_TD.clone(), norm_weight_D, 1e-5)
    expected = kernels.add_rms_norm(experts(x_TD, expert_TA, weight_TA), residual_TD, norm_weight_D, 1e-5)
    torch.testing.assert_close(found, expected)
    assert kernels.calls == (num_ranks == 1)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_clamped_experts_equal_their_definition(monkeypatch: pytest.MonkeyPatch, has_bias: bool, is_cpu: bool) -> None:
    if not is_cpu:  # every expert computes all tokens
        monkeypatch.setattr(expert_products, "wanted_experts_of", expert_products.every_expert_of)
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (7, 6), "gate_up": (4, 10, 6), "gate_up_bias": (4, 10), "down": (4, 6, 5), "down_bias": (4, 6)}
    drawn = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in sizes.items()}
    weight_TA, expert_TA = torch.rand(7, 4, generator=generator).topk(2)
    weights = drawn["gate_up"], drawn["gate_up_bias"], drawn["down"], drawn["down_bias"] if has_bias else None
    given = drawn["x"], expert_TA, weight_TA, *weights, 1.7, 1.0
    expected_TD = PlainKernels(None, None).clamped_expert_mlp(*given)
    torch.testing.assert_close(plain_clamped_expert_mlp(*given), expected_TD, rtol=1e-6, atol=1e-6)


def test_the_weights_of_a_normalised_router_are_the_softmax_of_the_best_few() -> None:
    logits_TX = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    expert_TA, weight_TA = plain_route_experts(logits_TX, 3, True)
    values_TA, chosen_TA = logits_TX.topk(3)
    assert torch.equal(expert_TA, chosen_TA)
    torch.testing.assert_close(weight_TA, values_TA.softmax(-1))
