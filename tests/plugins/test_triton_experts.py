"""Triton's routing and experts against plain torch over a grid: under the interpreter, and for real on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from hookline.core.contracts import AttentionSpec  # noqa: E402
from hookline.core.layers import every_expert, plain_route_experts  # noqa: E402
from hookline.plugins.kernels.experts import triton_routing  # noqa: E402
from hookline.plugins.kernels.experts.triton_experts import expert_mlp  # noqa: E402
from hookline.plugins.kernels.experts.triton_routing import Tiling, group_by_expert, route_experts  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
RELATIVE_ERROR = {
    torch.float32: 2e-6,  # a few roundings of 6e-8 that grow with the root of the number of terms
    torch.float16: 2e-3,  # hidden features, each expert's output and their sum are rounded, 2^-11 each
    torch.bfloat16: 1.2e-2,  # the same at 2^-8
}
SHAPES = [  # tokens, experts, chosen, hidden, intermediate
    (1, 4, 1, 16, 16),
    (1, 8, 3, 48, 24),
    (7, 5, 5, 32, 17),
    (33, 8, 2, 80, 40),
    (24, 17, 3, 64, 48),
]


def make(shape: tuple[int, ...], dtype: torch.dtype, favourite: bool = False) -> tuple[Tensor, ...]:
    """x, experts, weights, gate_up, down; with a favourite all tokens choose expert 0 and half of all go unused."""
    num_tokens, num_experts, num_chosen, hidden, inner = shape
    generator = torch.Generator().manual_seed(num_tokens + hidden)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(DEVICE)

    logits_TX = random(num_tokens, num_experts)
    if favourite:
        logits_TX[:, 0] += 50
        logits_TX[:, max(num_chosen, num_experts // 2) :] -= 50
    expert_TA, weight_TA = plain_route_experts(logits_TX, num_chosen, True)
    x_TD = random(num_tokens, 2 * hidden)[:, :hidden].to(dtype)
    gate_up_XFD = random(num_experts, 2 * inner, hidden, scale=hidden**-0.5).to(dtype)
    return x_TD, expert_TA, weight_TA, gate_up_XFD, random(num_experts, hidden, inner, scale=inner**-0.5).to(dtype)


def triton_kernels() -> Any:
    from hookline.plugins.kernels.triton_backend import TritonKernels

    return TritonKernels(None, AttentionSpec(2, 2, 64, 16, 4, 64, 64, DEVICE, torch.float32))


def relative_error(out: Tensor, expected: Tensor) -> float:
    """|out - expected| / |expected|; NaN counts as infinite."""
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    return error if error == error else float("inf")


def check(given: tuple[Tensor, ...], cut: Tiling | None = None) -> None:
    before = [tensor.clone() for tensor in given]
    out_TD = expert_mlp(*given, cut)
    x_TD, expert_TA, weight_TA, *weights = given
    expected_TD = every_expert(x_TD.double(), expert_TA, weight_TA.double(), *(one.double() for one in weights))
    assert out_TD.shape == x_TD.shape and out_TD.dtype == x_TD.dtype
    assert relative_error(out_TD, expected_TD) < RELATIVE_ERROR[x_TD.dtype]
    assert all(torch.equal(one, old) for one, old in zip(given, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("favourite", [False, True])
def test_experts_equal_plain_torch(shape: tuple[int, ...], dtype: torch.dtype, favourite: bool) -> None:
    check(make(shape, dtype, favourite))


@pytest.mark.parametrize("shape", [*SHAPES, (9, 12, 4, 40, 24), (5, 12, 10, 48, 24)], ids=str)
def test_the_norm_adds_up_any_number_of_experts(shape: tuple[int, ...]) -> None:
    given = make(shape, torch.float32)
    x_TD, expert_TA, weight_TA, *weights = given
    generator = torch.Generator().manual_seed(1)
    residual_TD, norm_weight_D = torch.randn(x_TD.shape, generator=generator), torch.rand(shape[3], generator=generator)
    residual_TD, norm_weight_D = residual_TD.to(DEVICE), norm_weight_D.to(DEVICE)
    expected_TD = every_expert(x_TD.double(), expert_TA, weight_TA.double(), *(one.double() for one in weights))
    expected_TD += residual_TD
    normed_TD, sum_TD = triton_kernels().expert_mlp_add_rms_norm(*given, residual_TD, norm_weight_D, 1e-6)
    assert sum_TD.data_ptr() == residual_TD.data_ptr()
    assert relative_error(sum_TD, expected_TD) < RELATIVE_ERROR[torch.float32]
    expected_TD *= norm_weight_D / (expected_TD.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert relative_error(normed_TD, expected_TD) < RELATIVE_ERROR[torch.float32]


@pytest.mark.parametrize(
    "cut", [Tiling(32, (16, 32, 4, 2), (32, 16, 4, 2)), Tiling(64, (32, 16, 4, 2), (64, 32, 4, 2))], ids=str
)
def test_every_tiling_gives_the_same(cut: Tiling) -> None:
    check(make((70, 6, 2, 40, 24), torch.float32), cut)


def test_the_tiling_follows_the_pairs_of_an_expert() -> None:
    assert [triton_routing.tiling(pairs, 128, 2).block_m for pairs in (8, 256, 2048, 131072)] == [16, 16, 32, 128]


def test_many_pairs_are_grouped_by_a_sort_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    given = make((33, 8, 2, 80, 40), torch.float32, favourite=True)
    scanned, out_TD = group_by_expert(given[1], 8, 16), expert_mlp(*given)
    monkeypatch.setattr(triton_routing, "MOST_PAIRS_SCANNED", 10)
    sorted_, num_tiles = group_by_expert(given[1], 8, 16), int(scanned.num_tiles_1)
    assert torch.equal(expert_mlp(*given), out_TD)
    assert int(sorted_.num_tiles_1) == num_tiles
    for name in ("order_P", "ends_X"):
        assert torch.equal(getattr(scanned, name), getattr(sorted_, name)), name
    for name in ("tile_expert_W", "tile_row_W"):
        assert torch.equal(getattr(scanned, name)[:num_tiles], getattr(sorted_, name)[:num_tiles]), name


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("block_m", [16, 32])
def test_groups_hold_every_pair_once_and_tiles_cover_them(num_tokens: int, block_m: int) -> None:
    expert_TA = make((num_tokens, 8, 3, 16, 16), torch.float32, favourite=True)[1]
    groups = group_by_expert(expert_TA, 8, block_m)
    order, ends, num_tiles = groups.order_P.tolist(), groups.ends_X.tolist(), int(groups.num_tiles_1)
    assert sorted(order) == list(range(3 * num_tokens))
    expert_P = expert_TA.flatten().tolist()
    covered = []
    for expert, row in zip(groups.tile_expert_W.tolist()[:num_tiles], groups.tile_row_W.tolist(), strict=False):
        mine = order[row : min(row + block_m, ends[expert])]
        assert {expert_P[pair] for pair in mine} == {expert}
        covered += mine
    assert covered == order


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (8, 3), (33, 5), (128, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_routing_equals_plain_torch(num_experts: int, top_k: int, normalise: bool, dtype: torch.dtype) -> None:
    order_TX = torch.rand(5, num_experts, generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits_TX = (order_TX * 0.25 - 7).to(DEVICE, dtype)  # steps that no dtype rounds away: no two experts are equal
    expert_TA, weight_TA = route_experts(logits_TX, top_k, normalise)
    expected_expert_TA, expected_weight_TA = plain_route_experts(logits_TX, top_k, normalise)
    assert torch.equal(expert_TA, expected_expert_TA)
    torch.testing.assert_close(weight_TA, expected_weight_TA, rtol=1e-5, atol=1e-7)


def test_equal_experts_are_all_taken_once() -> None:
    expert_TA, weight_TA = route_experts(torch.zeros(2, 6, device=DEVICE), 4, True)
    assert expert_TA.tolist() == [[0, 1, 2, 3]] * 2
    assert weight_TA.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_of_equal_experts_the_first_is_taken_and_those_that_logits_rule_out_are_last(dtype: torch.dtype) -> None:
    logits_X = [-0.0, 0.0, float("-inf"), -1.5, 3.0, 3.0, -1.5, 0.0]
    expert_TA, weight_TA = route_experts(torch.tensor([logits_X], dtype=dtype, device=DEVICE), 8, False)
    assert expert_TA.tolist() == [[4, 5, 0, 1, 7, 3, 6, 2]]
    expected_TA = torch.tensor([logits_X]).softmax(-1)[:, expert_TA[0].cpu()]
    torch.testing.assert_close(weight_TA.cpu(), expected_TA, rtol=1e-5, atol=0.0)


def test_a_token_alone_gets_what_it_gets_in_a_crowd() -> None:
    x_TD, expert_TA, weight_TA, *weights = make((40, 8, 2, 64, 32), torch.float32)
    crowd_TD = expert_mlp(x_TD, expert_TA, weight_TA, *weights)
    for token in (0, 17, 39):
        mine = slice(token, token + 1)
        alone_TD = expert_mlp(x_TD[mine], expert_TA[mine], weight_TA[mine], *weights)
        torch.testing.assert_close(alone_TD, crowd_TD[mine], rtol=0, atol=1e-6)


def test_no_token_is_no_work() -> None:
    given, none_TD = make((0, 4, 2, 16, 16), torch.float32), torch.empty(0, 16, device=DEVICE)
    assert expert_mlp(*given).shape == (0, 16)
    normed_TD, _ = triton_kernels().expert_mlp_add_rms_norm(*given, none_TD, torch.ones(16, device=DEVICE), 1e-6)
    assert normed_TD.shape == (0, 16)


def test_the_triton_kernels_offer_both_operations() -> None:
    kernels = triton_kernels()
    given = make((7, 5, 5, 32, 17), torch.float32)
    assert torch.equal(kernels.expert_mlp(*given), expert_mlp(*given))
    logits_TX = torch.randn(3, 5, device=DEVICE)
    assert torch.equal(kernels.route_experts(logits_TX, 2, True)[0], route_experts(logits_TX, 2, True)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 256, 3000])
def test_a_captured_graph_holds_for_any_routing(num_tokens: int) -> None:
    x_TD, _, _, *weights = make((num_tokens, 128, 8, 256, 64), torch.bfloat16)
    logits_TX = torch.zeros(num_tokens, 128, device=DEVICE)

    def layer() -> Tensor:
        return expert_mlp(x_TD, *route_experts(logits_TX, 8, True), *weights)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = layer()
    for scale in (0.0, 1.0, 30.0):
        logits_TX.copy_(torch.randn(num_tokens, 128, device=DEVICE) * scale)
        graph.replay()
        assert torch.equal(out_TD, layer())
        if scale:
            chosen = plain_route_experts(logits_TX, 8, True)
            expected_TD = every_expert(x_TD.float(), *chosen, *(weight.float() for weight in weights))
            assert relative_error(out_TD, expected_TD) < RELATIVE_ERROR[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 31, 256, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_of_full_size_equal_plain_torch(num_tokens: int, dtype: torch.dtype) -> None:
    check(make((num_tokens, 32, 8, 2048, 768), dtype))
