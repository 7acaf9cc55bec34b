"""The wide products against float64: every cut, tails, parts that add up; interpreted here, full size on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from hookline.core.contracts import AttentionSpec  # noqa: E402
from hookline.plugins.kernels import triton_backend  # noqa: E402
from hookline.plugins.kernels.products import triton_thin, triton_wide  # noqa: E402
from hookline.plugins.kernels.products.triton_product import Kind  # noqa: E402
from hookline.plugins.kernels.products.triton_wide import (  # noqa: E402
    FULL_CARD,
    MAX_SHARED_TILE,
    SHARED_BYTES,
    WideScratch,
    WideTiling,
    empty_with_room,
    fitting_wide_tiling,
    wide_product,
    wide_tiling,
)
from hookline.plugins.kernels.triton_backend import TritonKernels  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16
LIMIT = 8e-3 if GPU else 1e-3  # one rounding of the output: 2^-8, 2^-11


def check(kind, num_rows, num_out, width, tiling, *, bias=False, scratch=None, room=0):
    """The product of random operands, of which rows and weight lie in larger tensors."""
    rows_O = num_out * (2 if kind is Kind.SILU else 1)
    x_TD = torch.randn(num_rows + room, width + 8, device=DEVICE).to(DTYPE)
    x_TD[num_rows:] = float("nan")  # memory that may be read, but must not matter
    x_TD = x_TD[:num_rows, :width]
    weight_OD = (torch.randn(rows_O, width + 16, device=DEVICE) * width**-0.5).to(DTYPE)[:, :width]
    bias_O = torch.randn(rows_O, device=DEVICE).to(DTYPE) if bias else None
    expected_TO = x_TD.double() @ weight_OD.double().T
    if kind is Kind.SILU:
        gate_TF, up_TF = expected_TO.chunk(2, -1)
        expected_TO = gate_TF * gate_TF.sigmoid() * up_TF
    if bias_O is not None:
        expected_TO += bias_O.double()
    scratch = scratch or WideScratch.make(DEVICE)
    scratch.partials.fill_(float("nan"))
    for _ in range(2):  # the second launch finds the counters as the first one left them
        out_TO = wide_product(kind, x_TD, weight_OD, bias_O, tiling, scratch)
        error = ((out_TO.double() - expected_TO).norm() / expected_TO.norm()).item()
        assert out_TO.shape == (num_rows, num_out) and error < LIMIT
        assert not scratch.counters.any()


@pytest.mark.parametrize("num_rows", [1, 16, 20])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_plain_products_equal_reference(num_rows, parts):
    for num_out, width, bias in [(64, 256, False), (100, 232, True), (192, 416, True)]:
        check(Kind.PLAIN, num_rows, num_out, width, WideTiling(32, 32, 64, 3, parts=parts), bias=bias)


def test_a_few_rows_are_thin_beside_a_small_weight_and_wide_beside_a_large_one():
    """As measured on an H200 (docs/log): 8B's gate and up takes four thin rows 88 µs, and the wide one 48."""
    large, small = (torch.empty(num_out, 4096, dtype=DTYPE, device=DEVICE) for num_out in (24_576, 512))
    for num_rows in (1, 2, 4):
        x_TD = empty_with_room(num_rows, 4096, like=small)
        assert triton_thin.fits(x_TD, large) == (num_rows == 1)
        assert triton_thin.fits(x_TD, small)
        assert fitting_wide_tiling(Kind.SILU, x_TD, large) is not None
    assert triton_thin.fits(torch.empty(4, 4096, device=DEVICE), torch.empty(24_576, 4096, device=DEVICE)), (
        "float32 has no wide product"
    )


@pytest.mark.parametrize("room", [0, 1, 20, 100])
def test_rows_beyond_the_operand_do_not_matter(room):
    for num_rows in (3, 20):
        check(Kind.PLAIN, num_rows, 64, 256, WideTiling(32, 32, 64, 3, parts=2), room=room)
        check(Kind.SILU, num_rows, 64, 256, WideTiling(32, 32, 64, 3), room=room)


def test_outputs_have_room_for_a_tile():
    like = torch.zeros(0, dtype=DTYPE, device=DEVICE)
    for num_rows, rows in [(1, 16), (16, 16), (40, 64), (65, 128), (128, 128), (129, 129)]:
        out = empty_with_room(num_rows, 3, 8, like=like)
        rows = rows if GPU else num_rows  # the interpreter has no use for it
        assert out.shape == (num_rows, 3, 8) and out.untyped_storage().nbytes() == rows * 24 * 2
        assert triton_wide.rows_in_reach(out.view(num_rows, 24)) == rows


@pytest.mark.parametrize("num_rows", [1, 17, 32])
def test_silu_products_equal_reference(num_rows):
    for num_out, width in [(64, 256), (104, 200)]:
        check(Kind.SILU, num_rows, num_out, width, WideTiling(32, 32, 64, 3))


def test_parts_are_added_in_their_order_whoever_comes_last():
    """1e8 - 1e8 + 1 and 1 + 1e8 - 1e8 differ in float32, so equal bits mean equal order."""
    x_TD, weight_OD = torch.ones(16, 192, device=DEVICE).to(DTYPE), torch.zeros(32, 192, device=DEVICE).to(DTYPE)
    weight_OD[:, 0], weight_OD[:, 64], weight_OD[:, 128] = 60000, -60000, 0.001
    x_TD[:, 0] = x_TD[:, 64] = 60000
    scratch = WideScratch.make(DEVICE)
    tiling = WideTiling(16, 32, 64, 3, parts=3)
    out_TO = wide_product(Kind.PLAIN, x_TD, weight_OD, None, tiling, scratch)
    assert torch.equal(out_TO, torch.full_like(out_TO, 0.001))
    swapped_OD = weight_OD.roll(64, 1)  # the small one first
    swapped_TD = x_TD.roll(64, 1)
    assert not wide_product(Kind.PLAIN, swapped_TD, swapped_OD, None, tiling, scratch).any()


@pytest.mark.parametrize(("kind", "sends"), [(Kind.PLAIN, False), (Kind.SILU, False), (Kind.PLAIN, True)])
def test_every_tiling_fits_the_card(kind, sends):
    """Over the shapes of all Qwen3 models and many ranks."""
    found = 0
    for num_out in {width * times // ranks for width in (1024, 2560, 4096, 5120, 9728, 12288, 17408, 25600, 151936)
                    for times in (1, 2, 3) for ranks in (1, 2, 4, 8)}:  # fmt: skip
        for width in (1024, 2048, 5120, 25600):
            for num_rows in range(1, 129):
                tiling = wide_tiling(kind, num_rows, num_out, width, sends=sends)
                if tiling is None:
                    continue
                found += 1
                operands = 2 if kind is Kind.SILU else 1
                step_bytes = (tiling.block_o * operands + tiling.block_t) * tiling.block_d * 2
                assert num_rows <= tiling.block_t and 3 <= tiling.num_stages
                assert step_bytes * tiling.num_stages <= SHARED_BYTES
                if tiling.parts > 1:
                    assert kind is Kind.PLAIN and tiling.block_t * tiling.block_o <= MAX_SHARED_TILE
                    assert -(-num_out // tiling.block_o) * tiling.parts <= FULL_CARD
    assert found > 1000
    assert wide_tiling(Kind.PLAIN, 8, 151936, 1024) is None  # a head takes too many programs


def test_what_does_not_fit_is_left_to_other_products(monkeypatch):
    x_TD = torch.zeros(8, 512, dtype=DTYPE, device=DEVICE)
    weight_OD = torch.zeros(8192, 512, dtype=DTYPE, device=DEVICE)
    assert fitting_wide_tiling(Kind.PLAIN, x_TD, weight_OD) is None  # small enough for the narrow product
    monkeypatch.setattr(triton_wide, "MAX_WEIGHT", 0)
    assert fitting_wide_tiling(Kind.PLAIN, x_TD, weight_OD) is not None
    shifted_OD = torch.zeros(8192 * 512 + 1, dtype=DTYPE, device=DEVICE)[1:].view(8192, 512)
    wider_OD = torch.zeros(8192, 516, dtype=DTYPE, device=DEVICE)[:, :512]
    for rows, matrix in [
        (x_TD.float(), weight_OD.float()),
        (x_TD, weight_OD.to(torch.float32)),
        (x_TD[:0], weight_OD),
        (x_TD[0], weight_OD),
        (x_TD.repeat(17, 1), weight_OD),
        (x_TD, weight_OD[:2048]),
        (x_TD, shifted_OD),
        (x_TD, wider_OD),
        (x_TD[:1].expand(8, 512), weight_OD),
        (x_TD.t().contiguous().t(), weight_OD),
        (x_TD, weight_OD.t().contiguous().t()),
    ]:
        assert fitting_wide_tiling(Kind.PLAIN, rows, matrix) is None
    assert fitting_wide_tiling(Kind.PARTS, x_TD, weight_OD) is None


def test_the_kernels_take_the_wide_products(monkeypatch):
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=16, block_size=16, max_num_seqs=4, max_num_batched_tokens=64,
        max_model_len=64, device=DEVICE, dtype=DTYPE,
    )  # fmt: skip
    kernels, taken = TritonKernels(None, spec), []
    monkeypatch.setattr(triton_wide, "MAX_WEIGHT", 0)
    monkeypatch.setattr(triton_wide, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(triton_backend, "fitting_tiling", lambda *_: None)
    monkeypatch.setattr(
        triton_backend, "wide_product", lambda kind, *rest: (taken.append(kind), wide_product(kind, *rest))[1]
    )
    x_TD, weight_OD = torch.randn(20, 128, device=DEVICE).to(DTYPE), torch.randn(128, 128, device=DEVICE).to(DTYPE)
    out_TO, inner_TF = kernels.linear(x_TD, weight_OD, None), kernels.linear_silu_mul(x_TD, weight_OD)
    expected_TO = x_TD.double() @ weight_OD.double().T
    gate_TF, up_TF = expected_TO.chunk(2, -1)
    expected_TF = gate_TF * gate_TF.sigmoid() * up_TF
    assert ((out_TO - expected_TO).norm() / expected_TO.norm()).item() < LIMIT
    assert ((inner_TF - expected_TF).norm() / expected_TF.norm()).item() < LIMIT
    assert taken == [Kind.PLAIN, Kind.SILU]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [2, 8, 16, 24, 32, 48, 64, 96, 112, 128])
def test_full_size_products_equal_reference(num_rows):
    scratch = WideScratch.make(DEVICE)
    for kind, num_out, width in [
        (Kind.PLAIN, 2560, 5120), (Kind.PLAIN, 5120, 2048), (Kind.PLAIN, 5120, 6400), (Kind.PLAIN, 10240, 5120),
        (Kind.PLAIN, 16384, 4096), (Kind.PLAIN, 4096, 4096), (Kind.PLAIN, 1536, 4096), (Kind.SILU, 6400, 5120),
        (Kind.SILU, 12800, 5120), (Kind.SILU, 25600, 5120), (Kind.SILU, 12288, 4096), (Kind.SILU, 9728, 2560),
    ]:  # fmt: skip
        tiling = wide_tiling(kind, num_rows, num_out, width)
        if tiling is not None:
            check(kind, num_rows, num_out, width, tiling, scratch=scratch, bias=kind is Kind.PLAIN)
