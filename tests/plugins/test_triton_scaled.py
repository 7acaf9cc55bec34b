"""Products with weights in e4m3, int8 and int4 against float64 of them; interpreted here, full size on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.slow  # under the interpreter
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from hookline.core.contracts import FP8, OFFSETS, AttentionSpec, OffsetMatrix, ScaledMatrix, Scheme  # noqa: E402
from hookline.plugins.kernels.invariant.triton_kernels import InvariantTritonKernels as InvariantKernels  # noqa: E402
from hookline.plugins.kernels.products import scaled_products, triton_scales, triton_thin, triton_tiled_row, triton_wide  # noqa: E402
from hookline.plugins.kernels.products.scaled_products import ScaledProducts, ScaledWeight  # noqa: E402
from hookline.plugins.kernels.products.triton_product import Kind  # noqa: E402
from hookline.plugins.kernels.products.triton_rounding import round_rows  # noqa: E402
from hookline.plugins.kernels.products.triton_row_chunks import fits_chunks, row_cut  # noqa: E402
from hookline.plugins.kernels.products.triton_row_product import row_product  # noqa: E402
from hookline.plugins.kernels.products.triton_scales import Scales, dequantised  # noqa: E402
from hookline.plugins.kernels.products.triton_thin import fits_scaled, thin_linear  # noqa: E402
from hookline.plugins.kernels.products.triton_tiled import TiledWeight, tiled_weight  # noqa: E402
from hookline.plugins.kernels.products.triton_tiled_row import COLUMNS, RowCut, fits_row, one_row  # noqa: E402
from hookline.plugins.kernels.products.triton_tiled_rows import (  # noqa: E402
    FULL_CARD,
    MOST_ROWS,
    RowsTiling,
    TiledScratch,
    fits_rows,
    rows_tiling,
    tiled_product,
)
from hookline.plugins.kernels.triton_backend import TritonKernels  # noqa: E402
from tests.interpreted import rounding_to_nearest  # noqa: E402, F401 (a fixture of every test)

DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16
EXACT = 8e-3 if GPU else 1e-3  # one rounding of the output: 2^-8, 2^-11
ROUNDED = 4e-2  # rows in e4m3: steps of 2^-3, so 2^-5 of a value on average
SMALL_SIZES = [(128, 256, 1), (112, 416, 1), (128, 192, 64)]
"""Outputs, inputs and rows of a scale: whole blocks, cut ones, and scales of several rows."""
SCALES = pytest.mark.parametrize(("rows", "columns"), [(1, 0), (128, 128), (1, 128)])


def weight_of(num_out: int, width: int, rows: int = 1, columns: int = 0, *, may_round: bool = False) -> ScaledWeight:
    data_OD = (torch.randn(num_out, width, device=DEVICE) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    data_OD.view(torch.uint8)[0, : min(width, 9)] = torch.arange(min(width, 9), dtype=torch.uint8)  # denormal ones, too
    shape = -(-num_out // rows), -(-width // (columns or width))
    factors_RC = (torch.rand(shape, device=DEVICE) + 0.1) / 60 * width**-0.5
    return ScaledWeight(data_OD, Scales(factors_RC, rows, columns), may_round)


def whole_weight(
    num_out: int, width: int, bits: int, columns: int = 0, *, rows: int = 1, has_zeros: bool = False
) -> ScaledWeight:
    """In int4 or int8."""
    shape = -(-num_out // rows), -(-width // (columns or width))
    factors_RC = (torch.rand(shape, device=DEVICE) + 0.1) / 2 ** (bits - 2) * width**-0.5
    if bits == 8:
        data_OD = torch.randint(-128, 128, (num_out, width), device=DEVICE).to(torch.int8)
        return ScaledWeight(data_OD, Scales(factors_RC, rows, columns), may_round=False)
    data_OW = torch.randint(0, 256, (num_out, width // 2), device=DEVICE).to(torch.uint8)
    zeros_RC = torch.randint(0, 16, shape, device=DEVICE).float() if has_zeros else None
    return ScaledWeight(data_OW, Scales(factors_RC, rows, columns, 2, zeros_RC), may_round=False)


def spread(weight: ScaledWeight) -> torch.Tensor:
    """The weight in float64, by torch."""
    scales, num_out, width = weight.scales, weight.num_rows, weight.num_columns

    def over(of_blocks: torch.Tensor) -> torch.Tensor:
        of_rows = of_blocks.double().repeat_interleave(scales.rows, 0)[:num_out]
        return of_rows.repeat_interleave(scales.columns or width, 1)[:, :width]

    values = weight.data_OD.double()
    if scales.packed == 2:
        values = torch.stack((weight.data_OD & 15, weight.data_OD >> 4), 2).flatten(1).double()
        values -= 8 if scales.zeros_RC is None else over(scales.zeros_RC)
    return values * over(scales.factors_RC)


def expected(kind: Kind, x_TD: torch.Tensor, weight: ScaledWeight, bias_O: torch.Tensor | None) -> torch.Tensor:
    out_TO = x_TD.double() @ spread(weight).T
    if kind is Kind.SILU:
        gate_TF, up_TF = out_TO.chunk(2, -1)
        return gate_TF * gate_TF.sigmoid() * up_TF
    return out_TO if bias_O is None else out_TO + bias_O.double()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def rows_of(num_rows: int, width: int) -> torch.Tensor:
    """Rows of different sizes that are not adjacent in memory."""
    x_TD = torch.randn(num_rows, width + 16, device=DEVICE) * torch.logspace(0, 1, num_rows, device=DEVICE)[:, None]
    return x_TD.to(DTYPE)[:, :width]


@SCALES
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
def test_one_row_equals_reference(kind, rows, columns):
    for num_out, width in [(256, 256), (256, 400)]:
        weight, bias_O = weight_of(num_out, width, rows, columns), torch.randn(num_out, device=DEVICE).to(DTYPE)
        x_TD, bias_O = rows_of(1, width), bias_O if kind is Kind.PLAIN else None
        assert fits_scaled(x_TD, weight.data_OD)
        found_TO = thin_linear(x_TD, weight.data_OD, bias_O, kind is Kind.SILU, weight.scales)
        assert error(found_TO, expected(kind, x_TD, weight, bias_O)) < EXACT


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
def test_one_row_of_a_width_between_powers_of_two_is_read_in_chunks(monkeypatch, kind):
    """Widths of each tiling; the last chunk is full or not; the outputs of a program share scales, or do not."""
    monkeypatch.setattr(triton_thin, "thin_linear", None)
    assert len({row_cut(width) for width in (5120, 12288, 25600)}) == 3
    for width, columns in [(4096, 0), (12288, 128)]:
        other = weight_of(8, width, 1, columns)
        assert not fits_chunks(rows_of(1, width), other.data_OD, other.scales)
    for num_out, width, rows, columns in [
        (12, 4616, 1, 0), (8, 5120, 128, 128), (12, 5128, 5, 64), (8, 12288, 5, 0), (8, 16400, 4, 32)
    ]:  # fmt: skip
        weight, bias_O = weight_of(num_out, width, rows, columns), torch.randn(num_out, device=DEVICE).to(DTYPE)
        x_TD, bias_O = rows_of(1, width), bias_O if kind is Kind.PLAIN else None
        assert fits_chunks(x_TD, weight.data_OD, weight.scales)
        found_TO = ScaledProducts(DEVICE, DTYPE).product(kind, x_TD, weight, bias_O)
        wanted_TO = expected(kind, x_TD, weight, bias_O)
        assert found_TO.shape == wanted_TO.shape and error(found_TO, wanted_TO) < EXACT, (width, rows, columns)


@SCALES
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
@pytest.mark.parametrize("may_round", [False, True])
@pytest.mark.parametrize("num_rows", [2, 20, 33])
def test_few_rows_equal_reference(num_rows, may_round, kind, rows, columns):
    for num_out, width in [(256, 512), (208, 400)]:
        if kind is Kind.SILU and (num_out // 2) % 128 and rows > 1:
            continue  # gate and up lie in blocks of their own
        weight = weight_of(num_out, width, rows, columns, may_round=may_round)
        bias_O = torch.randn(num_out, device=DEVICE).to(DTYPE) if kind is Kind.PLAIN else None
        x_TD, products = rows_of(num_rows, width), ScaledProducts(DEVICE, DTYPE)
        wanted = expected(kind, x_TD, weight, bias_O)
        for _ in range(2):  # the second launch finds the counters as the first one left them
            found_TO = products.product(kind, x_TD, weight, bias_O)
            assert found_TO.shape == wanted.shape and found_TO.dtype == DTYPE
            for found, one in zip(found_TO, wanted, strict=True):  # each row has a scale of its own
                assert error(found, one) < (3 if kind is Kind.SILU else 1) * (ROUNDED if may_round else EXACT)


@pytest.mark.skipif(not GPU, reason="torch's product of two operands in e4m3 needs a Hopper card")
@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (128, 128)])
@pytest.mark.parametrize("num_rows", [129, 130, 300, 1000])
def test_many_rows_equal_reference(num_rows, rows, columns):
    products = ScaledProducts(DEVICE, DTYPE)
    for num_out, width in [(512, 1024), (1024, 4096), (6144, 4096)]:
        weight = weight_of(num_out, width, rows, columns, may_round=True)
        assert products.rounds_many(num_rows, weight) == (torch.cuda.get_device_capability() == (9, 0))
        bias_O = torch.randn(num_out, device=DEVICE).to(DTYPE)
        x_TD = rows_of(num_rows, width)
        found_TO = products.product(Kind.PLAIN, x_TD, weight, bias_O)
        assert found_TO.shape == (num_rows, num_out)
        for found, one in zip(found_TO, expected(Kind.PLAIN, x_TD, weight, bias_O), strict=True):
            assert error(found, one) < ROUNDED


@SCALES
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
def test_any_rows_are_widened_where_no_faster_kernel_is(monkeypatch, kind, rows, columns):
    monkeypatch.setattr(scaled_products, "has_room", lambda device: False)
    products = ScaledProducts(DEVICE, DTYPE)
    for num_rows, num_out, width in [(2, 256, 256), (20, 256, 328)]:
        weight, x_TD = weight_of(num_out, width, rows, columns), rows_of(num_rows, width)
        found_TO = products.product(kind, x_TD, weight, None)
        assert error(found_TO, expected(kind, x_TD, weight, None)) < EXACT
    weight = weight_of(256, 256, may_round=False)
    assert products.product(kind, rows_of(scaled_products.MOST_WIDENED + 1, 256), weight, None) is None


@pytest.mark.parametrize("converts", [False, True])
@SCALES
def test_bits_taken_apart_are_the_values_that_cards_convert(monkeypatch, converts, rows, columns):
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(2, 1)
    every[every & 127 == 127] = 0  # NaN
    scales = Scales(torch.ones(-(-2 // rows), 256 // (columns or 256), device=DEVICE), rows, columns)
    monkeypatch.setattr(triton_scales, "converts", lambda device: converts)
    found = dequantised(every.view(torch.float8_e4m3fn), scales, torch.float32)
    assert torch.equal(found, every.view(torch.float8_e4m3fn).float())
    weight, x_TD = weight_of(256, 256, rows, columns), rows_of(3, 256)
    assert error(dequantised(weight.data_OD, weight.scales, torch.float32), spread(weight)) < 1e-6
    found_TO = row_product(x_TD, weight.data_OD, None, scales=weight.scales)
    assert error(found_TO, expected(Kind.PLAIN, x_TD, weight, None)) < EXACT


@pytest.mark.parametrize("columns", [0, 128])
@pytest.mark.parametrize("silu", [False, True])
def test_rounded_rows_are_within_half_a_step_of_e4m3(silu, columns):
    x_TD = rows_of(6, 800)
    x_TD[2] = 0
    rounded = round_rows(x_TD, columns, silu=silu)
    wanted = x_TD.float()
    if silu:
        gate_TF, up_TF = wanted.chunk(2, -1)
        wanted = gate_TF * gate_TF.sigmoid() * up_TF
    width = wanted.shape[1]
    assert rounded.scales_TG.shape == (8 if columns else 6, -(-width // columns) if columns else 1)
    assert rounded.num_rows == 6 and len(rounded.values_TD) == len(rounded.scales_TG)
    scales = rounded.scales_TG[:6].repeat_interleave(columns or width, 1)[:, :width]
    values = rounded.values_TD[:6].float()
    found = values * scales
    assert ((found - wanted).abs() <= wanted.abs() / 16 + scales * 2**-9).all()
    assert not found[2].any() and values.abs().max() == 448


@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
@SCALES
def test_every_tiling_has_room_for_its_parts(kind, rows, columns):
    scratch = triton_wide.ScaledScratch.make(torch.device("cpu"))
    scales = Scales(torch.ones(1, 1), rows, columns)
    for num_out in (64, 1024, 4096, 5120, 6144, 12288, 25600, 151936):
        for width in (128, 1024, 4096, 12288, 25600):
            for num_rows in (1, 16, 17, 33, 64, 65, 128):
                for x_groups, may_round in ((0, False), (0, True), (1, True), (width // 128, True)):
                    tiling = triton_wide.scaled_wide_tiling(
                        kind, num_rows, num_out, width, scales, x_groups=x_groups, may_round=may_round
                    )
                    tiles, tile = -(-num_out // tiling.block_o), tiling.block_o * tiling.block_t
                    assert tiling.block_t >= num_rows and tiling.num_stages >= 3
                    assert tiling.parts == 1 or tiles * tiling.parts * tile <= scratch.partials.numel()
                    assert tiling.parts == 1 or tiles <= scratch.counters.numel()
                    step = tiling.block_o * (2 if kind is Kind.SILU else 1) + tiling.block_t * (1 if x_groups else 2)
                    assert step * tiling.block_d * tiling.num_stages <= triton_wide.SHARED_BYTES


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("bits", "columns"), [(8, 0), (8, 16), (8, 32), (4, 0), (4, 32), (4, 64), (4, 128)])
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
def test_weights_in_int8_and_int4_equal_reference(monkeypatch, kind, bits, columns, has_zeros):
    if has_zeros and bits == 8:
        return
    for num_out, width, rows in [(256, 256, 1), (208, 416, 1), (256, 192, 64)] if GPU else SMALL_SIZES:
        weight = whole_weight(num_out, width, bits, columns, rows=rows, has_zeros=has_zeros)
        bias_O = torch.randn(num_out, device=DEVICE).to(DTYPE) if kind is Kind.PLAIN else None
        assert error(dequantised(weight.data_OD, weight.scales, torch.float32), spread(weight)) < 1e-6
        for has_room in (True, False) if GPU or num_out == SMALL_SIZES[1][0] else (False,):
            monkeypatch.setattr(scaled_products, "has_room", lambda device, has_room=has_room: has_room)
            products = ScaledProducts(DEVICE, DTYPE)
            for num_rows in (1, 20):
                x_TD = rows_of(num_rows, width)
                found_TO = products.product(kind, x_TD, weight, bias_O)
                if columns == 16 and num_rows > 1:
                    assert found_TO is None  # dequantised before it is multiplied
                    continue
                assert error(found_TO, expected(kind, x_TD, weight, bias_O)) < 2 * EXACT, (num_out, width, num_rows)


def tiled_of(
    num_out: int, width: int, bits: int, columns: int, has_zeros: bool, has_offsets: bool = False, *, rows: int = 1
) -> tuple[TiledWeight, torch.Tensor]:
    """A weight in tiles, and what it stands for, in float64."""
    weight = whole_weight(num_out, width, bits, columns, rows=rows, has_zeros=has_zeros)
    tiled, meant_OD = tiled_weight(weight.data_OD, weight.scales), spread(weight)
    assert tiled.bits == bits
    if has_offsets:
        offsets_OC = (torch.randn(num_out, -(-width // columns), device=DEVICE) * width**-0.5).bfloat16()
        tiled = tiled.with_offsets(offsets_OC)
        meant_OD += offsets_OC.double().repeat_interleave(columns, 1)[:, :width]
    assert error(tiled.dequantised(torch.float32), meant_OD) < 1.6e-5  # a scale keeps 16 bits
    return tiled, meant_OD


def product_of(kind: Kind, x_TD: torch.Tensor, meant_OD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    out_TO = x_TD.double() @ meant_OD.T
    if kind is Kind.SILU:
        gate_TF, up_TF = out_TO.chunk(2, -1)
        return gate_TF * gate_TF.sigmoid() * up_TF
    return out_TO if bias_O is None else out_TO + bias_O.double()


TILED = [
    (4, 0, False, False), (4, 32, True, False), (4, 64, False, False), (4, 128, True, False), (4, 256, True, False),
    (4, 32, False, True), (8, 32, False, False), (8, 32, False, True),
]  # fmt: skip
"""Bits, inputs of a group, whether there are zero points, and offsets."""


@pytest.mark.parametrize(("bits", "columns", "has_zeros", "has_offsets"), TILED)
@pytest.mark.parametrize("kind", [Kind.PLAIN, Kind.SILU])
def test_tiled_weights_equal_reference(kind, bits, columns, has_zeros, has_offsets):
    """Tiles and parts that end before they are full; a second launch finds the counters as the first one left them."""
    scratch, is_silu = TiledScratch.make(DEVICE), kind is Kind.SILU
    few = [(17, None)]
    many = [(65, None), (130, RowsTiling(128, 64, 2, 4, 1)), (200, RowsTiling(128, 256, 2, 8, 1))]
    for num_out, width, rows in [(128, 256, 64), (136, 424, 1)] if GPU else [(136, 424, 1)]:
        tiled, meant_OD = tiled_of(
            num_out, width, bits, columns, rows=rows, has_zeros=has_zeros, has_offsets=has_offsets
        )
        bias_O = None if is_silu else torch.randn(num_out, device=DEVICE).to(DTYPE)
        for num_rows, tiling in few if is_silu else few + many:
            x_TD = rows_of(num_rows, width)
            assert fits_rows(x_TD)
            wanted = product_of(kind, x_TD, meant_OD, bias_O)
            for _ in range(2 if num_rows < 100 else 1):
                found_TO = tiled_product(x_TD, tiled, bias_O, scratch, tiling, silu=is_silu)
                assert found_TO.shape == wanted.shape and found_TO.dtype == DTYPE
                assert error(found_TO, wanted) < 4 * EXACT, num_rows  # values times scales are rounded


def test_every_tiling_of_tiled_weights_has_room_for_its_parts():
    scratch = TiledScratch.make(torch.device("cpu"))
    for num_out, width in [(6144, 4096), (24576, 4096), (4096, 12288)]:
        for num_rows in (2, 17, 33, 65, 128, 129, MOST_ROWS):
            for bits, silu in ((4, False), (8, False), (8, True)):
                cut = rows_tiling(num_rows, num_out, width, bits, silu=silu)
                assert cut.at_once * FULL_CARD * cut.block_o * cut.block_t <= scratch.partials.numel()
    assert not fits_rows(rows_of(MOST_ROWS + 1, 424))


@pytest.mark.parametrize(
    ("kind", "bits", "columns", "has_zeros", "has_offsets"),
    [
        (Kind.PLAIN, 4, 0, False, False), (Kind.PLAIN, 4, 32, True, False), (Kind.PLAIN, 4, 64, False, False),
        (Kind.PLAIN, 4, 256, True, False), (Kind.SILU, 4, 0, True, False), (Kind.SILU, 4, 32, False, False),
        (Kind.SILU, 4, 64, True, False), (Kind.SILU, 4, 128, True, False), (Kind.PLAIN, 4, 32, False, True),
        (Kind.PLAIN, 8, 32, False, False), (Kind.SILU, 8, 32, False, True),
    ],
)  # fmt: skip
def test_one_row_of_a_tiled_weight_equals_reference(kind, bits, columns, has_zeros, has_offsets):
    """Also with outputs and inputs that end within a program's, and inputs of which one is far larger than others."""
    for num_out, width, rows in [(128, 256, 64), (136, 424, 1)] if GPU else [(136, 424, 1)]:
        tiled, meant_OD = tiled_of(
            num_out, width, bits, columns, rows=rows, has_zeros=has_zeros, has_offsets=has_offsets
        )
        bias_O = None if kind is Kind.SILU else torch.randn(num_out, device=DEVICE).to(DTYPE)
        x_TD = rows_of(1, width).to(torch.bfloat16)
        x_TD[0, width // 3] = 300.0
        assert fits_row(x_TD) and not fits_row(x_TD.half()) and not fits_row(rows_of(2, width).to(torch.bfloat16))
        found_TO, wanted = (
            one_row(x_TD, tiled, bias_O, silu=kind is Kind.SILU),
            product_of(kind, x_TD, meant_OD, bias_O),
        )
        assert found_TO.shape == wanted.shape and found_TO.dtype == torch.bfloat16
        assert error(found_TO, wanted) < 8e-3, (num_out, width)


def test_rows_that_do_not_begin_and_end_with_whole_words_are_left_to_the_other_kernels():
    """One row, too, has a distance to the next one, which here is odd."""
    wide_TD = torch.zeros(3, 9, dtype=torch.bfloat16, device=DEVICE)
    assert not any(fits_row(wide_TD[row : row + 1, :8]) for row in range(3))
    wide_TD = torch.zeros(3, 10, dtype=torch.bfloat16, device=DEVICE)
    assert fits_row(wide_TD[1:2, :8]) and not fits_row(wide_TD[1:2, 1:9])


@pytest.mark.parametrize(("bits", "columns"), [(4, 128), (8, 32)])
def test_every_cut_of_one_row_gives_the_same(monkeypatch, bits, columns):
    """Those that are chosen, for the widths they are chosen for; one that ends with a chunk, and one within a chunk."""
    for width in (2048, 4096, 5120, 8192, 12288, 25600) if bits == 4 or GPU else (2048, 14336):
        tiled, meant_OD = tiled_of(16, width, bits, columns, bits == 4)
        x_TD = rows_of(1, width).to(torch.bfloat16)
        wanted = product_of(Kind.PLAIN, x_TD, meant_OD, None)
        cut = triton_tiled_row.row_cut(width // 128, tiled.groups)
        assert cut.chunk <= COLUMNS and cut.num_warps * cut.chunk * cut.chunks * 128 >= width
        assert error(one_row(x_TD, tiled, None), wanted) < 8e-3
        if width == 2048:
            for cut in (RowCut(1, 8, 2), RowCut(2, 3, 3)):
                monkeypatch.setattr(triton_tiled_row, "row_cut", lambda steps, groups, cut=cut: cut)
                assert error(one_row(x_TD, tiled, None), wanted) < 8e-3, cut
            monkeypatch.undo()


@pytest.mark.parametrize("is_invariant", [False, True])
def test_integers_are_stored_tiled_where_their_products_are(monkeypatch, is_invariant):
    """With any rows, gate and up of half a tile too; int8 in groups of 32 alone; batch-invariant products read weights
    as they came."""
    spec = AttentionSpec(2, 1, 64, 16, 64, 512, 512, DEVICE, DTYPE)
    monkeypatch.setattr(ScaledProducts, "tiles_integers", True)
    kernels = (InvariantKernels if is_invariant else TritonKernels)(None, spec)
    for num_out, bits, columns in [(256, 4, 128), (192, 4, 128), (192, 8, 32), (256, 8, 128)]:
        weight = whole_weight(num_out, 256, bits, columns, has_zeros=bits == 4)
        scheme, scales = Scheme(f"i{bits}", 1, columns, has_zeros=bits == 4), weight.scales
        matrix = ScaledMatrix(scheme, num_out, 256, weight.data_OD, scales.factors_RC, scales.zeros_RC)
        prepared = kernels.prepare_weight(matrix)
        assert isinstance(prepared, ScaledWeight if is_invariant or (bits, columns) == (8, 128) else TiledWeight)
        for num_rows in (2, 70):
            x_TD = rows_of(num_rows, 256)
            found_TO = kernels.quantized_linear(x_TD, prepared, None)
            assert error(found_TO, expected(Kind.PLAIN, x_TD, weight, None)) < 2 * EXACT
            gates_TF = kernels.quantized_linear_silu_mul(x_TD, prepared, prepared)
            assert error(gates_TF, expected(Kind.SILU, x_TD, weight, None)) < 6 * EXACT


@pytest.mark.parametrize(
    ("bits", "columns", "is_tiled"),
    [(4, 32, True), (4, 32, False), (8, 32, True), (8, 32, False), (4, 64, True), (4, 128, True), (8, 64, True)],
)
def test_weights_with_an_offset_for_each_group_equal_reference(monkeypatch, bits, columns, is_tiled):
    """Of any rows, alone and with what follows a product; batch-invariant mode and uneven groups are refused."""
    spec = AttentionSpec(2, 1, 64, 16, 64, 512, 512, DEVICE, DTYPE)
    monkeypatch.setattr(ScaledProducts, "tiles_integers", is_tiled)
    kernels = TritonKernels(None, spec)
    scheme = Scheme(f"i{bits} + offset", 1, columns)
    assert kernels.computes(scheme, 256, 256) and not kernels.computes(scheme, 256, 272)
    assert not InvariantKernels(None, replace(spec, batch_invariant=True)).computes(scheme, 256, 256)
    weight = whole_weight(256, 256, bits, columns)
    scaled = ScaledMatrix(
        replace(scheme, values=OFFSETS[scheme.values]), 256, 256, weight.data_OD, weight.scales.factors_RC
    )
    offsets_OC = torch.randn(256, 256 // columns, device=DEVICE) * 256**-0.5
    matrix = OffsetMatrix(scheme, scaled, offsets_OC)
    prepared = kernels.prepare_weight(matrix)
    wanted_OD = spread(weight) + offsets_OC.double().repeat_interleave(columns, 1)
    assert isinstance(prepared, TiledWeight) == (is_tiled and columns == 32)
    assert error(matrix.dequantised(torch.float32), wanted_OD) < 1e-6
    bias_O, norm_weight_O = torch.randn(256, device=DEVICE).to(DTYPE), torch.ones(256, device=DEVICE, dtype=DTYPE)
    for num_rows in (1, 17, 300):
        x_TD, residual_TO = rows_of(num_rows, 256), torch.randn(num_rows, 256, device=DEVICE).to(DTYPE)
        wanted_TO = x_TD.double() @ wanted_OD.T
        assert error(kernels.quantized_linear(x_TD, prepared, bias_O), wanted_TO + bias_O.double()) < 3 * EXACT
        gate_TF, up_TF = wanted_TO.chunk(2, 1)
        gates_TF = kernels.quantized_linear_silu_mul(x_TD, prepared, prepared)
        assert error(gates_TF, gate_TF * gate_TF.sigmoid() * up_TF) < 6 * EXACT
        given = x_TD, prepared, None, residual_TO.clone(), norm_weight_O, 1e-6, prepared
        _, sum_TO = kernels.quantized_linear_add_rms_norm(*given)
        assert error(sum_TO, wanted_TO + residual_TO.double()) < 3 * EXACT


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (128, 128)])
def test_norms_are_rounded_for_the_product_that_alone_reads_them(rows, columns):
    """As for their own products; a row alone, and rows for no product in e4m3, stay as they are."""
    spec = AttentionSpec(2, 1, 64, 16, 64, 512, 512, DEVICE, DTYPE)
    kernels = TritonKernels(None, spec)
    scheme = Scheme(FP8, rows, columns, activations="dynamic")
    first, second = (weight_of(num_out, 512, rows, columns, may_round=True) for num_out in (512, 256))
    first, second = (
        kernels.prepare_weight(ScaledMatrix(scheme, one.num_rows, one.num_columns, one.data_OD, one.scales.factors_RC))
        for one in (first, second)
    )
    norm_weight_O = (torch.rand(512, device=DEVICE) + 0.5).to(DTYPE)
    for num_rows in (1, 2, 20, 40, 300) if GPU else (1, 2, 40):
        x_TD, residual_TO = rows_of(num_rows, 512), torch.randn(num_rows, 512, device=DEVICE).to(DTYPE)
        given = x_TD, first, None
        plain_TO, sum_TO = kernels.quantized_linear_add_rms_norm(*given, residual_TO.clone(), norm_weight_O, 1e-6)
        norm, handed_TO = kernels.quantized_linear_add_rms_norm(
            *given, residual_TO.clone(), norm_weight_O, 1e-6, second
        )
        assert torch.equal(handed_TO, sum_TO) and isinstance(plain_TO, torch.Tensor)
        assert isinstance(norm, torch.Tensor) == (num_rows == 1)
        if num_rows > 1:
            assert norm.shape == plain_TO.shape and len(norm) == num_rows
        wanted = expected(Kind.PLAIN, plain_TO, second, None)
        found_TO = kernels.quantized_linear(norm, second, None)
        gates_TF = kernels.quantized_linear_silu_mul(norm, second)
        assert found_TO.shape == (num_rows, 256) and gates_TF.shape == (num_rows, 128)
        assert error(found_TO, wanted) < ROUNDED
        assert error(gates_TF, expected(Kind.SILU, plain_TO, second, None)) < 3 * ROUNDED


def test_silu_of_rounded_rows_is_rounded_for_the_product_that_alone_reads_it(monkeypatch):
    """A scale has the outputs of a program; other rows, and a scale for each output, are left to the next product."""
    monkeypatch.setattr(triton_wide, "MIN_PROGRAMS", 2)
    products = ScaledProducts(DEVICE, DTYPE)
    gate_up, down = (weight_of(*sizes, 128, 128, may_round=True) for sizes in ((512, 384), (136, 256)))
    for num_rows in (17, 20, 32) if GPU else (20,):
        x_TD = rows_of(num_rows, 384)
        rounded = products.round(x_TD, gate_up)
        silu = products.rounded_silu(rounded, gate_up, down)
        assert silu is not None and silu.shape == (num_rows, 256) and silu.scales_TG.shape[1] == 2
        plain_TF = products.product(Kind.SILU, rounded, gate_up, None)
        found_TF = silu.values_TD[:num_rows].float() * silu.scales_TG[:num_rows].repeat_interleave(128, 1)
        assert error(found_TF, plain_TF.double()) < ROUNDED
        found_TO = products.product(Kind.PLAIN, silu, down, None)
        assert found_TO.shape == (num_rows, 136) and found_TO.dtype == DTYPE
        assert error(found_TO, expected(Kind.PLAIN, found_TF, down, None)) < EXACT
        assert products.rounded_silu(x_TD, gate_up, down) is None
    for num_rows in (2, 16, 33):
        assert products.rounded_silu(products.round(rows_of(num_rows, 384), gate_up), gate_up, down) is None
    of_outputs = weight_of(512, 384, may_round=True)
    assert products.rounded_silu(products.round(rows_of(20, 384), of_outputs), of_outputs, down) is None
