"""Products by cuBLASLt's kernels of chosen tiles: the choice, what is asked of the library, results on a GPU."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.plugins.kernels.products import cublaslt
from hookline.plugins.kernels.products.cublaslt import (
    ALONE,
    MAX_ROWS,
    MIN_ROWS,
    MOST_TILE,
    TWO_ROWS,
    Algorithm,
    CublasLt,
    filling_algorithms,
    filling_tiles,
    fits,
    tile_numbers,
)

H200_SMS = 132
LIMIT = 8e-3
"""One rounding of the output to bfloat16: 2^-8."""


@pytest.mark.parametrize(
    ("tile", "number"),
    [
        ((8, 8), 1), ((128, 128), 20), ((256, 32), 35), ((8, 128), 36), ((16, 64), 47), ((80, 128), 135),
        ((120, 128), 171), ((200, 128), 212), ((256, 192), 232), ((296, 128), 242), ((768, 64), 311), ((64, 16), 312),
        ((128, 72), 399), ((128, 208), 412), ((256, 160), 502), ((320, 112), 526), ((768, 80), 630),
    ],
)  # fmt: skip
def test_tiles_have_the_numbers_of_the_header(tile, number):
    assert tile_numbers()[tile] == number and len(tile_numbers()) == 630


@pytest.mark.parametrize(
    ("num_rows", "num_out", "fastest"),
    [
        (256, 25600, (200, 128)), (192, 25600, (208, 192)), (160, 25600, (256, 160)), (208, 25600, (128, 208)),
        (384, 5120, (120, 128)), (256, 5120, (80, 128)), (208, 5120, (128, 72)), (192, 5120, (120, 64)),
        (160, 5120, (128, 56)), (256, 12800, (200, 128)), (208, 12800, (128, 208)), (256, 2560, (80, 64)),
        (208, 2560, (64, 72)), (384, 25600, (296, 128)), (384, 12800, (296, 128)), (320, 25600, (112, 320)),
    ],
)  # fmt: skip
def test_the_tile_that_was_fastest_is_among_the_first_two(num_rows, num_out, fastest):
    """As an exhaustive search found on an H200 (docs/log); cuBLASLt has no kernel of some tiles that come before."""
    assert fastest in filling_tiles(num_rows, num_out, H200_SMS)[:2]


@given(st.integers(MIN_ROWS, MAX_ROWS), st.integers(128, 20_000).map(lambda eights: eights * 8), st.integers(16, 160))
def test_tiles_are_such_as_the_matrix_units_take_and_none_is_far_better(num_rows, num_out, num_sms):
    tiles = filling_tiles(num_rows, num_out, num_sms)

    def computed(features, rows):
        programs = math.ceil(num_out / features) * math.ceil(num_rows / rows)
        return math.ceil(programs / num_sms) * features * rows

    assert len(set(tiles)) == len(tiles) > 1
    for features, rows in tiles:
        assert features % 8 == rows % 8 == 0 and (features % 64 == 0 or rows % 64 == 0)
        assert features * rows <= MOST_TILE
        assert computed(features, rows) * num_sms >= num_rows * num_out
    assert computed(*tiles[0]) <= 2 * min(computed(features, rows) for features, rows in [(128, 128), (256, 128)])


def test_variants_follow_the_side_that_is_a_multiple_of_64_and_two_tiles_of_rows_share_a_weight_in_one_wave():
    def first_two(num_rows, num_out):
        return list(filling_algorithms(num_rows, num_out, H200_SMS))[:2]

    assert (ALONE, TWO_ROWS) == (2, 5), "cublasLtClusterShape_t: 1x1x1, 1x2x1"
    assert first_two(256, 5120) == [Algorithm(80, 128, TWO_ROWS, 0), Algorithm(80, 128, TWO_ROWS, 4)]
    assert first_two(256, 25600) == [Algorithm(200, 128, ALONE, 0), Algorithm(200, 128, ALONE, 4)], "several waves"
    assert first_two(208, 5120) == [Algorithm(128, 72, ALONE, 1), Algorithm(128, 72, ALONE, 5)], "three tiles of rows"


class FakeLibrary:
    """Stands in for cuBLASLt: has kernels of some tiles, multiplies on the CPU, and notes what it was asked."""

    def __init__(self, has, *, wants_memory=(), fails=()):
        self.numbers = {tile_numbers()[tile] for tile in has}
        self.wanting = {tile_numbers()[tile] for tile in wants_memory}
        self.fails, self.layouts, self.calls, self.checked = set(fails), {}, [], []

    def cublasLtCreate(self, handle):
        return self._made("cublasLtCreate", handle, "handle")

    def cublasLtMatmulDescCreate(self, desc, compute, scale):
        assert (compute, scale) == (68, 0)
        return self._made("cublasLtMatmulDescCreate", desc, "desc")

    def cublasLtMatmulDescSetAttribute(self, desc, attribute, value, size):
        assert attribute == 3 and ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] == 1 and size.value == 4
        return 0

    def cublasLtMatrixLayoutCreate(self, layout, kind, num_rows, num_columns, stride):
        return self._made("layout", layout, (kind, num_rows.value, num_columns.value, stride.value))

    def cublasLtMatmulAlgoInit(self, handle, *arguments):
        assert arguments[-2] == 66
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, algo, attribute, value, size):
        words = ctypes.cast(algo, ctypes.POINTER(ctypes.c_uint64))
        kind = ctypes.c_uint16 if size.value == 2 else ctypes.c_uint32
        words[{1: 0, 6: 1, 5: 2, 8: 3}[attribute]] = ctypes.cast(value, ctypes.POINTER(kind))[0]
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, desc, weight, x, out, same_out, algo, checked):
        tile = ctypes.cast(algo, ctypes.POINTER(ctypes.c_uint64))[0]
        self.checked.append(tile)
        ctypes.cast(checked, ctypes.POINTER(cublaslt._Checked))[0].workspace_bytes = 4 * (tile in self.wanting)
        return 0 if tile in self.numbers else 15

    def cublasLtMatmul(self, *arguments):
        if "cublasLtMatmul" in self.fails:
            return 14
        _, _, one, weight, weight_layout, x, x_layout, zero, out, out_layout, *_ = arguments
        algo, workspace, num_bytes = arguments[12:15]
        scales = [ctypes.cast(scale, ctypes.POINTER(ctypes.c_float))[0] for scale in (one, zero)]
        assert scales == [1.0, 0.0] and workspace is None and num_bytes.value == 0
        x_TD, weight_OD = self._matrix(x, x_layout), self._matrix(weight, weight_layout)
        _, num_out, num_rows, stride = self.layouts[out_layout.value]
        out_TO = (x_TD.float() @ weight_OD.float().T).bfloat16()
        assert out_TO.shape == (num_rows, num_out) and stride == num_out
        ctypes.memmove(out.value, out_TO.data_ptr(), out_TO.nbytes)
        self.calls.append(tuple(ctypes.cast(algo, ctypes.POINTER(ctypes.c_uint64))[:4]))
        return 0

    def _made(self, name, where, what):
        if name in self.fails:
            return 3
        ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))[0] = len(self.layouts) + 1
        self.layouts[len(self.layouts) + 1] = what
        return 0

    def _matrix(self, address, layout):
        """What lies there by columns, as rows."""
        kind, width, num_rows, stride = self.layouts[layout.value]
        assert kind == 14
        memory = (ctypes.c_int16 * ((num_rows - 1) * stride + width)).from_address(address.value)
        return torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((num_rows, width), (stride, 1))


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def operands(num_rows=160, num_out=512, width=64, gap=8, device="cpu", dtype=torch.bfloat16):
    """Rows with gaps between them, as slices of larger tensors have."""
    x_TD = torch.randn(num_rows, width + gap, device=device).to(dtype)[:, :width]
    weight_OD = torch.randn(num_out, width + 2 * gap, device=device).to(dtype)[:, :width]
    return x_TD, weight_OD


def error_of(out_TO, x_TD, weight_OD):
    expected_TO = x_TD.double() @ weight_OD.double().T
    assert out_TO.shape == expected_TO.shape and out_TO.dtype == x_TD.dtype and out_TO.is_contiguous()
    return ((out_TO.double() - expected_TO).norm() / expected_TO.norm()).item()


def test_the_best_tile_that_the_library_has_is_taken_and_looked_for_once(on_cpu):
    x_TD, weight_OD = operands()
    best, second, third, *_ = filling_tiles(160, 512, H200_SMS)
    library = FakeLibrary([second, third])
    lt = CublasLt(library, H200_SMS)
    for _ in range(2):
        assert error_of(lt.linear(x_TD, weight_OD), x_TD, weight_OD) < LIMIT
    chosen = next(one for one in filling_algorithms(160, 512, H200_SMS) if (one.features, one.rows) == second)
    assert library.calls == [(tile_numbers()[second], 35, chosen.variant, chosen.cluster)] * 2
    assert library.checked == [tile_numbers()[best]] * 2 + [tile_numbers()[second]]


def test_other_strides_and_row_counts_are_other_products(on_cpu):
    library = FakeLibrary(tile_numbers())
    lt = CublasLt(library, H200_SMS)
    for num_rows, gap in ((160, 8), (160, 0), (176, 8)):
        x_TD, weight_OD = operands(num_rows, gap=gap)
        assert error_of(lt.linear(x_TD, weight_OD), x_TD, weight_OD) < LIMIT
    assert len(library.checked) == 3


def test_a_kernel_that_wants_memory_of_its_own_is_passed_over(on_cpu):
    best, second, *_ = filling_tiles(160, 512, H200_SMS)
    library = FakeLibrary([best, second], wants_memory=[best])
    assert CublasLt(library, H200_SMS).linear(*operands()) is not None
    assert {call[0] for call in library.calls} == {tile_numbers()[second]}


def test_a_product_for_which_there_is_no_kernel_is_left_to_others(on_cpu):
    library = FakeLibrary([])
    lt = CublasLt(library, H200_SMS)
    assert lt.linear(*operands()) is None and lt.linear(*operands()) is None
    assert len(library.checked) == 2 * cublaslt.MOST_TRIED


@pytest.mark.parametrize("name", ["cublasLtCreate", "cublasLtMatmulDescCreate", "cublasLtMatmul"])
def test_a_call_that_fails_is_named_with_its_status(on_cpu, name):
    library = FakeLibrary(tile_numbers(), fails=[name])
    with pytest.raises(RuntimeError, match=rf"{name} failed with status \d+"):
        CublasLt(library, H200_SMS).linear(*operands())


def test_only_a_few_hundred_aligned_rows_of_two_bytes_fit():
    x_TD, weight_OD = operands()
    assert fits(x_TD, weight_OD) and fits(x_TD.half(), weight_OD.half())
    for num_rows in (MIN_ROWS - 1, MAX_ROWS + 1):
        assert not fits(operands(num_rows)[0], weight_OD)
    assert fits(operands(MIN_ROWS)[0], weight_OD) and fits(operands(MAX_ROWS)[0], weight_OD)
    assert not fits(x_TD.float(), weight_OD.float()) and not fits(x_TD.half(), weight_OD)
    assert not fits(x_TD, weight_OD[:500]) and fits(x_TD, weight_OD[:504])
    assert not fits(x_TD, weight_OD.contiguous().T) and not fits(x_TD[:, 1:], weight_OD[:, 1:])
    assert not fits(operands(gap=3)[0], weight_OD) and not fits(x_TD[None], weight_OD)
    assert not fits(x_TD[:1].expand(160, -1), weight_OD), "rows on top of each other"


def test_there_is_none_without_a_card():
    assert cublaslt.cublaslt(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_out", "width"), [(25600, 1024), (5120, 4096), (2560, 512), (1000, 512), (6144, 1024)])
def test_products_on_a_card_are_right_alone_and_captured(num_out, width, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    lt = cublaslt.cublaslt(device)
    if lt is None:
        pytest.skip("no Hopper card")
    num_found = 0
    for num_rows in (145, 160, 192, 208, 256, 384, 511):
        x_TD, weight_OD = operands(num_rows, num_out, width, device=device, dtype=dtype)
        assert fits(x_TD, weight_OD)
        out_TO = lt.linear(x_TD, weight_OD)
        if out_TO is None:
            continue
        num_found += 1
        assert error_of(out_TO, x_TD, weight_OD) < LIMIT
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured_TO = lt.linear(x_TD, weight_OD)
        x_TD.copy_(torch.randn(x_TD.shape, device=device))
        graph.replay()
        assert error_of(captured_TO, x_TD, weight_OD) < LIMIT
    assert num_found >= 5


@pytest.mark.gpu
def test_every_tile_of_the_rule_that_a_card_has_computes_the_same():
    device = torch.device("cuda", torch.cuda.current_device())
    lt = cublaslt.cublaslt(device)
    if lt is None:
        pytest.skip("no Hopper card")
    x_TD, weight_OD = operands(224, 5120, 512, device=device)
    product, num_found = lt.product(x_TD, weight_OD), 0
    for tile in filling_tiles(224, 5120, lt.num_sms, most=40):
        for cluster, variant in ((ALONE, 0), (ALONE, 1), (ALONE, 4), (ALONE, 5), (TWO_ROWS, 0), (TWO_ROWS, 1)):
            kernel = product.kernel(Algorithm(*tile, cluster, variant))
            if kernel is not None:
                num_found += 1
                assert error_of(product.launch(kernel, x_TD, weight_OD), x_TD, weight_OD) < LIMIT, (tile, variant)
    assert num_found > 20
