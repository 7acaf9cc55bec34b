"""Experts in e4m3, int8 and int4 with scales against float64 of them; interpreted here, for real on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from hookline import LLM, SamplingParams  # noqa: E402
from hookline.core.contracts import FP4, FP8, INT4, INT8, AttentionSpec, ScaledMatrix, Scheme, is_offered  # noqa: E402
from hookline.core.layers import every_expert, plain_route_experts  # noqa: E402
from hookline.plugins.kernels import torch_reference  # noqa: E402
from hookline.plugins.kernels.experts import (  # noqa: E402
    triton_experts,
    triton_few_experts,
    triton_many_experts,
    triton_routing,
)
from hookline.plugins.kernels.experts.triton_int4_experts import (  # noqa: E402
    Int4Tiling,
    few_int4_experts,
    fits_few,
    int4_expert_outputs,
    int4_tilings,
)
from hookline.plugins.kernels.experts.triton_routing import Tiling  # noqa: E402
from hookline.plugins.kernels.products import triton_scales  # noqa: E402
from hookline.plugins.kernels.products.scaled_products import ScaledProducts  # noqa: E402
from hookline.plugins.kernels.products.triton_tiled import TiledWeight  # noqa: E402
from hookline.plugins.kernels.products.triton_wide import has_room  # noqa: E402
from hookline.plugins.kernels.triton_backend import TritonKernels  # noqa: E402
from tests.hf_models import make_qwen3_moe  # noqa: E402
from tests.interpreted import rounding_to_nearest  # noqa: E402, F401 (a fixture of every test)
from tests.quantised_layouts import LAYOUTS, write_layout  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16
RELATIVE_ERROR = 1.2e-2 if GPU else 2e-3  # hidden features, each expert's output and their sum are rounded
ROUNDED_ERROR = 2e-2 if GPU else 1e-2  # a few of the features that are rounded to e4m3 fall to the other side
SCHEMES = [
    Scheme(FP8, 128, 128, activations="dynamic"),
    Scheme(FP8, 1, 0),
    Scheme(FP8, 0, 0),
    Scheme(FP8, 8, 32),  # what a rank has of blocks that its part cuts through
    Scheme(INT8, 1, 0),
    Scheme(INT8, 1, 64),
    Scheme(INT4, 1, 32),
    Scheme(INT4, 1, 128, has_zeros=True),
    Scheme(INT4, 1, 0),
    Scheme(INT8, 1, 16),
]
SHAPES = [  # tokens, experts, chosen, hidden, intermediate
    (1, 4, 2, 48, 24),
    (2, 16, 2, 136, 72),  # blocks that end before they are full
    (7, 5, 3, 136, 40),
    (21, 3, 2, 72, 136),
]


def matrix(scheme: Scheme, num_experts: int, num_out: int, width: int, generator: torch.Generator) -> ScaledMatrix:
    """Values and scales that differ from block to block, and zero points if the scheme has some."""

    def random(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator)

    rows, columns = scheme.rows or num_out, scheme.columns or width
    blocks = num_experts, -(-num_out // rows), -(-width // columns)
    largest = {FP8: 60.0, INT8: 64.0, INT4: 4.0}[scheme.values]
    scales, zeros = (random(*blocks) + 0.1) / largest * width**-0.5, None
    if scheme.values == FP8:
        normal = torch.randn(num_experts, num_out, width, generator=generator)
        data = (normal * largest).clamp(-448, 448).to(torch.float8_e4m3fn)
        data.view(torch.uint8)[:, 0, :9] = torch.arange(9, dtype=torch.uint8)  # denormal ones, too
    elif scheme.values == INT8:
        data = (random(num_experts, num_out, width) * 256 - 128).to(torch.int8)
    else:
        data = (random(num_experts, num_out, width // 2) * 256).to(torch.uint8)
        zeros = (random(*blocks) * 16).floor() if scheme.has_zeros else None
    on_device = (None if one is None else one.to(DEVICE) for one in (data, scales, zeros))
    return ScaledMatrix(scheme, num_out, width, *on_device)


def kernels(**options: Any) -> Any:
    return TritonKernels(None, AttentionSpec(2, 2, 64, 16, 4, 64, 64, DEVICE, DTYPE, **options))


def made(scheme: Scheme, shape: tuple[int, ...], favourite: bool = False) -> tuple[tuple[Tensor, ...], Any, Any]:
    """x, experts and weights; gate_up; down. With a favourite all tokens choose expert 0 and half of all go unused."""
    num_tokens, num_experts, num_chosen, hidden, inner = shape
    generator = torch.Generator().manual_seed(num_tokens + hidden)
    logits_TX = torch.randn(num_tokens, num_experts, generator=generator)
    if favourite:
        logits_TX[:, 0] += 50
        logits_TX[:, max(num_chosen, num_experts // 2) :] -= 50
    expert_TA, weight_TA = plain_route_experts(logits_TX.to(DEVICE), num_chosen, True)
    x_TD = torch.randn(num_tokens, 2 * hidden, generator=generator).to(DEVICE, DTYPE)[:, :hidden]
    first, second = (matrix(scheme, num_experts, *sizes, generator) for sizes in ((2 * inner, hidden), (hidden, inner)))
    return (x_TD, expert_TA, weight_TA), first, second


def expected(given: tuple[Tensor, ...], first: ScaledMatrix, second: ScaledMatrix) -> Tensor:
    x_TD, expert_TA, weight_TA = given
    weights = (one.dequantised(torch.float64) for one in (first, second))
    return every_expert(x_TD.double(), expert_TA, weight_TA.double(), *weights)


def in_e4m3(x_TD: Tensor, columns: int) -> Tensor:
    """Rows that are rounded to e4m3, each group of columns with a scale of its own, in float64.

    On the CPU: a GPU divides by a constant through its reciprocal, so that scales that are powers of two are not, and
    values half way between two of e4m3 fall to the other side.
    """
    width = x_TD.shape[1]
    groups_TGC = torch.nn.functional.pad(x_TD.cpu().float(), (0, -width % columns)).unflatten(1, (-1, columns))
    scale_TG1 = groups_TGC.abs().amax(2, keepdim=True).clamp(min=1e-20) / 448
    values_TGC = (groups_TGC / scale_TG1).to(torch.float8_e4m3fn).double()
    return (values_TGC * scale_TG1.double()).flatten(1)[:, :width].to(x_TD.device)


def expected_of_rounded(
    given: tuple[Tensor, ...], first: ScaledMatrix, second: ScaledMatrix, columns: int = 128
) -> Tensor:
    """The same with x, and what gate and up make of it, in e4m3."""
    x_TD, expert_TA, weight_TA = given
    gate_up_XFD, down_XDF = (one.dequantised(torch.float64) for one in (first, second))
    x_TD, out_TD = in_e4m3(x_TD, columns), torch.zeros(x_TD.shape, dtype=torch.float64, device=DEVICE)
    for place in range(expert_TA.shape[1]):
        expert_T = expert_TA[:, place]
        gate_TF, up_TF = torch.einsum("td,tfd->tf", x_TD, gate_up_XFD[expert_T]).chunk(2, 1)
        hidden_TF = in_e4m3((torch.nn.functional.silu(gate_TF) * up_TF).to(DTYPE), columns)
        out_TD += weight_TA[:, place, None] * torch.einsum("tf,tdf->td", hidden_TF, down_XDF[expert_T])
    return out_TD


def error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; NaN counts as infinite."""
    relative = ((found.double() - wanted).norm() / wanted.norm()).item()
    return relative if relative == relative else float("inf")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_experts_with_scales_equal_the_reference(scheme: Scheme) -> None:
    """One token and a few, which are not grouped, and more, in tiles that are not full; some experts have no tokens."""
    usual, invariant = kernels(), kernels(batch_invariant=True)
    for index, shape in enumerate(SHAPES):
        given, first, second = made(scheme, shape, favourite=index % 2 == 0)
        wanted_TD = expected(given, first, second)
        for one in (usual, invariant) if GPU or index == 2 else (usual,):
            assert all(one.computes(scheme, each.num_rows, each.num_columns) for each in (first, second))
            weights = [one.prepare_weight(each) for each in (first, second)]
            assert [each.num_rows for each in weights] == [2 * shape[4], shape[3]]
            assert [each.num_columns for each in weights] == [shape[3], shape[4]]
            before = [tensor.clone() for tensor in given]
            out_TD = one.quantized_expert_mlp(*given, *weights)
            assert out_TD.shape == given[0].shape and out_TD.dtype == DTYPE
            if scheme.activations and one is usual and shape[0] > 1:
                assert error(out_TD, wanted_TD) > ROUNDED_ERROR, "rows are not rounded"
                assert error(out_TD, expected_of_rounded(given, first, second)) < ROUNDED_ERROR
            else:
                assert error(out_TD, wanted_TD) < RELATIVE_ERROR, (shape, type(one))
            assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[7]], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_norm_of_their_sum_equals_the_reference(scheme: Scheme, batch_invariant: bool) -> None:
    one = kernels(batch_invariant=batch_invariant)
    for shape in (SHAPES[0], SHAPES[2]):
        given, first, second = made(scheme, shape)
        weights = [one.prepare_weight(each) for each in (first, second)]
        residual_TD = torch.randn(given[0].shape).to(DEVICE, DTYPE)
        norm_weight_D = (torch.rand(shape[3]) + 0.5).to(DEVICE, DTYPE)
        rounds = not batch_invariant and scheme.activations and shape[0] > 1
        wanted_TD = (expected_of_rounded if rounds else expected)(given, first, second) + residual_TD.double()
        normed_TD, sum_TD = one.quantized_expert_mlp_add_rms_norm(*given, *weights, residual_TD, norm_weight_D, 1e-6)
        assert error(sum_TD, wanted_TD) < (ROUNDED_ERROR if rounds else RELATIVE_ERROR)
        wanted_TD *= norm_weight_D.double() / (wanted_TD.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert error(normed_TD, wanted_TD) < (ROUNDED_ERROR if rounds else RELATIVE_ERROR)


@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[7]], ids=str)
def test_every_tiling_gives_the_same(monkeypatch: pytest.MonkeyPatch, scheme: Scheme) -> None:
    monkeypatch.setattr(ScaledProducts, "tiles_integers", False)
    given, first, second = made(scheme, SHAPES[2])
    one = kernels()
    gate_up, down = (one.prepare_weight(each) for each in (first, second))
    for step in ((16, 32, 4, 2), (64, 128, 8, 3)):
        for may_round in (False, True) if scheme.activations else (False,):
            out_TAD = triton_experts.expert_outputs(
                *given, gate_up.data_OD, down.data_OD, Tiling(32, step, step), scales=(gate_up.scales, down.scales),
                may_round=may_round,
            )  # fmt: skip
            weights = first, second
            wanted_TD = expected_of_rounded(given, *weights, step[1]) if may_round else expected(given, *weights)
            assert error(triton_experts.summed(out_TAD), wanted_TD) < (ROUNDED_ERROR if may_round else RELATIVE_ERROR)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.values == INT4], ids=str)
def test_int4_in_a_layout_of_its_own_equals_the_reference(monkeypatch: pytest.MonkeyPatch, scheme: Scheme) -> None:
    """In every tiling that is chosen, if not interpreted; experts' outputs and inputs fill neither tiles nor steps."""
    monkeypatch.setattr(ScaledProducts, "tiles_integers", True)
    one = kernels()
    chosen = {int4_tilings(num_pairs, 4) for num_pairs in (1, 32, 64, 256, 1000)}
    assert len(chosen) == 5
    for shape, favourite in ((SHAPES[0], True), (SHAPES[3], False)):
        given, first, second = made(scheme, shape, favourite)
        weights = [one.prepare_weight(each) for each in (first, second)]
        assert [each.num_rows for each in weights] == [2 * shape[4], shape[3]]
        assert {each.num_experts for each in weights} == {shape[1]}
        assert error(weights[0].dequantised(torch.float32), first.dequantised(torch.float64)) < 1.6e-5
        wanted_TD = expected(given, first, second)
        assert error(one.quantized_expert_mlp(*given, *weights), wanted_TD) < RELATIVE_ERROR
        scaled = Int4Tiling(16, 64, 4, 2, is_scaled=True)
        for tilings in () if shape[0] == 1 else chosen if GPU else {(scaled, scaled)}:
            out_TAD = int4_expert_outputs(*given, *weights, tilings)
            assert error(triton_experts.summed(out_TAD), wanted_TD) < RELATIVE_ERROR, tilings
        x_TD, *choice = given
        x_TD = x_TD[:2].to(torch.bfloat16)  # one token, and two whose sums are apart, which are not grouped
        assert fits_few(x_TD[:1], choice[0][:1], *weights) and not fits_few(x_TD[:1].half(), choice[0][:1], *weights)
        out_TD = few_int4_experts(x_TD, *(each[:2] for each in choice), *weights)
        assert error(out_TD, wanted_TD[:2]) < 1.2e-2
        apart_TD = torch.cat((x_TD, x_TD[:, :1]), 1)[:1, : shape[3]]  # the next row would begin within a word
        alone_TD = one.quantized_expert_mlp(apart_TD, *(each[:1] for each in choice), *weights)
        assert torch.equal(alone_TD, out_TD[:1])
    invariant = kernels(batch_invariant=True)
    assert not any(isinstance(invariant.prepare_weight(each), TiledWeight) for each in (first, second))


@pytest.mark.parametrize("scheme", [SCHEMES[0], Scheme(FP8, 1, 0, activations="dynamic")], ids=str)
def test_many_rows_are_rounded_before_they_are_multiplied(monkeypatch: pytest.MonkeyPatch, scheme: Scheme) -> None:
    one, (given, first, second) = kernels(), made(scheme, (100, 2, 1, 136, 136))
    gate_up, down = (one.prepare_weight(each) for each in (first, second))
    assert triton_routing.rounds_ahead(100, 2)
    wanted_TD = expected_of_rounded(given, first, second)
    assert error(one.quantized_expert_mlp(*given, gate_up, down), wanted_TD) < ROUNDED_ERROR
    monkeypatch.setattr(triton_experts, "rounds_ahead", lambda num_pairs, num_experts: False)  # by the programs instead
    assert error(one.quantized_expert_mlp(*given, gate_up, down), wanted_TD) < ROUNDED_ERROR


@pytest.mark.parametrize("inner", [64, 192])
def test_many_rows_in_the_order_of_pairs_equal_the_reference(monkeypatch: pytest.MonkeyPatch, inner: int) -> None:
    """Outputs that fill no tile of down, inputs that fill no step, and scales of the second half in another block."""
    calls, compute = [], triton_experts.many_expert_outputs

    def counted(*given: Any) -> Tensor:
        calls.append(len(given[0]))
        return compute(*given)

    monkeypatch.setattr(triton_experts, "many_expert_outputs", counted)
    one, (given, first, second) = kernels(), made(SCHEMES[0], (150, 3, 1, 336, inner))
    gate_up, down = (one.prepare_weight(each) for each in (first, second))
    wanted_TD = expected_of_rounded(given, first, second)
    assert error(one.quantized_expert_mlp(*given, gate_up, down), wanted_TD) < ROUNDED_ERROR
    assert calls == ([150] if has_room(DEVICE) else [])


def test_few_pairs_and_scales_that_cut_through_a_half_are_left_to_the_other_kernels() -> None:
    def takes(num_pairs: int, scheme: Scheme, inner: int) -> bool:
        _, *both = made(scheme, (1, 2, 1, 144, inner))
        first, second = (kernels().prepare_weight(each) for each in both)
        scales = first.scales, second.scales
        return triton_many_experts.takes_blocks(num_pairs, first.data_OD, second.data_OD, scales)

    assert takes(64, SCHEMES[0], 128) == has_room(DEVICE)
    assert not takes(63, SCHEMES[0], 128) and not takes(64, SCHEMES[0], 96)
    assert not takes(64, SCHEMES[1], 128) and not takes(64, Scheme(FP8, 32, 128), 128)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_bits_taken_apart_give_the_same_where_cards_convert_no_e4m3(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    one, (given, first, second) = kernels(), made(Scheme(FP8, 128, 128), shape)
    weights = [one.prepare_weight(each) for each in (first, second)]
    converted_TD = one.quantized_expert_mlp(*given, *weights)
    monkeypatch.setattr(triton_scales, "converts", lambda device: False)
    assert torch.equal(one.quantized_expert_mlp(*given, *weights), converted_TD)


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    one, (given, first, second) = kernels(batch_invariant=True), made(SCHEMES[0], SHAPES[3])
    weights = [one.prepare_weight(each) for each in (first, second)]
    crowd_TD = one.quantized_expert_mlp(*given, *weights)
    for mine in (slice(0, 1), slice(17, 19)):
        assert torch.equal(one.quantized_expert_mlp(*(tensor[mine] for tensor in given), *weights), crowd_TD[mine])


def test_ranks_have_parts_of_the_experts_that_add_up_to_the_whole() -> None:
    """Blocks of 128 inputs, of which a rank has 96: of two blocks, 32 inputs to a scale."""
    (x_TD, *routed), first, second = made(Scheme(FP8, 128, 128), (6, 4, 2, 64, 192))
    wanted_TD, total_TD, one = expected((x_TD, *routed), first, second), 0.0, kernels()
    for start in (0, 96):
        part = slice(start, start + 96)
        both = [torch.arange(192)[part], torch.arange(192, 384)[part]]
        rows = torch.cat(both).to(DEVICE)
        scale_rows = (rows // 128).to(DEVICE)
        gate_up = ScaledMatrix(
            Scheme(FP8, 1, 128), 192, 64, first.data.view(torch.uint8)[:, rows].view(torch.float8_e4m3fn),
            first.scales_RC[:, scale_rows].contiguous(),
        )  # fmt: skip
        columns = torch.arange(start, start + 96, 32, device=DEVICE) // 128
        down = ScaledMatrix(
            Scheme(FP8, 128, 32), 64, 96, second.data.view(torch.uint8)[..., part].contiguous().view(second.data.dtype),
            second.scales_RC[..., columns].contiguous(),
        )  # fmt: skip
        weights = [one.prepare_weight(each) for each in (gate_up, down)]
        total_TD += one.quantized_expert_mlp(x_TD, *routed, *weights).double()
    assert error(total_TD, wanted_TD) < RELATIVE_ERROR


@pytest.mark.skipif(GPU, reason="tests/test_gpu_quantization.py has engines on a GPU")
def test_a_checkpoint_with_quantised_experts_has_the_tokens_of_the_dequantised_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of the Triton kernels in an engine, interpreted: under the name of the kernels that a CPU may have."""
    make_qwen3_moe(tmp_path / "plain", hidden_size=64, head_dim=64)
    quantised, dequantised = write_layout(tmp_path / "plain", tmp_path / "layout", LAYOUTS["fp8_blocks"])

    def tokens(folder: Path) -> list[list[int]]:
        sizes = {"max_num_seqs": 2, "num_blocks": 8, "max_num_batched_tokens": 16, "max_model_len": 32}
        with LLM(str(folder), device="cpu", dtype="float32", engine=sizes) as llm:
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            return [list(output.token_ids) for output in llm.generate([[5, 6, 7, 8, 9, 10, 11], [20, 21]], params)]

    expected, calls = tokens(dequantised), []
    compute = TritonKernels.quantized_expert_mlp_add_rms_norm

    def counted(self: Any, *given: Any) -> Any:
        calls.append(len(given[0]))
        return compute(self, *given)

    monkeypatch.setattr(TritonKernels, "quantized_expert_mlp_add_rms_norm", counted)
    monkeypatch.setattr(torch_reference, "TorchKernels", TritonKernels)
    assert tokens(quantised) == expected
    assert calls


def test_what_the_experts_do_not_compute_is_refused_by_the_scheme() -> None:
    one = kernels()
    assert is_offered(one.quantized_expert_mlp)
    reordered = Scheme(INT4, 1, 128, is_reordered=True)
    for scheme in (Scheme(FP4, 1, 16), reordered, Scheme(FP8, 128, 16), Scheme(INT8, 1, 96)):
        assert not one.computes(scheme, 256, 256)
    assert triton_few_experts.fits(torch.zeros(1, 8), 16) and not triton_few_experts.fits(torch.zeros(5, 1), 160)
