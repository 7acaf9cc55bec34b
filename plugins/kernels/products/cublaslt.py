"""Products of a few hundred rows by cuBLASLt, cut into tiles that fill the card in whole waves.

cuBLASLt lets its caller name a kernel's tile. Its own heuristics, and so torch, often choose one that leaves part of
the card idle in the last wave; most of these products are 3 to 15 % faster on an H200 by a tile that does not, and a
third at a few sizes (docs/log). Products that cuBLASLt refuses are left to torch.
Legend: T rows, D input features, O output features.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hookline.plugins.kernels.products.operands import has_aligned_rows

MIN_ROWS, MAX_ROWS = 145, 512
"""Rows that pay. With fewer, reading the weight decides how long a product takes; more have not been measured."""
DTYPES = {torch.bfloat16: 14, torch.float16: 2}
"""dtypes, and cuBLASLt's numbers for them."""
LEAST_FEATURES, MOST_FEATURES = 64, 320
LEAST_TILE_ROWS = 48
MOST_TILE = 41_000
"""Most elements of a tile: beside their operands, a multiprocessor's registers hold no more."""
READ_COST = 32
"""Cost of reading a row of either operand for a tile, in elements computed in that time."""
WAVES_SHARE = 0.6
"""Share of a tile's cost that counts by waves. It put the fastest tile first in 16 of 18 searches (docs/log)."""
MOST_TRIED = 6

_FIRST_TILES = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 "
    "128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 "
    "256x32"
)
_HOPPER_KERNELS = 66
_STEPS_OF_64 = 35  # input features a step, as many steps under way as fit
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_OPERATION_OF_FIRST, _TRANSPOSED = 3, 1
_TILE, _VARIANT, _STAGES, _CLUSTER = 1, 5, 6, 8
_FEATURES_FIRST, _LARGE = 1, 4  # bits of the variant; of large tiles there are only kernels with the second


@dataclass(frozen=True)
class Algorithm:
    """A kernel of cuBLASLt for Hopper cards: its tile, its cluster (a cublasLtClusterShape_t), and its variant."""

    features: int
    rows: int
    cluster: int
    variant: int


ALONE, TWO_ROWS = 2, 5
"""Clusters of one tile, and of two tiles that read the same output features' weights."""


@cache
def tile_numbers() -> dict[tuple[int, int], int]:
    """(output features, rows) to cublasLtMatmulTile_t, in whose order they are counted.

    Source: cublasLt.h from CUDA 12.6 on: 35 of old, then multiples of 64 rows, then multiples of 64 features.
    """
    of_old = [(int(features), int(rows)) for features, rows in (tile.split("x") for tile in _FIRST_TILES.split())]
    by_rows = [(m, n) for m in range(8, 769, 8) for n in range(64, 769, 64) if m * n <= 768 * 64]
    by_features = [(m, n) for m in range(64, 769, 64) for n in range(8, 769, 8) if m * n <= 256 * 256]
    each_once = dict.fromkeys(of_old + by_rows + by_features)
    return {tile: number for number, tile in enumerate(each_once, start=1)}


def filling_tiles(num_rows: int, num_out: int, num_sms: int, most: int = MOST_TRIED) -> list[tuple[int, int]]:
    """(output features, rows) of the tiles for such a product, the best first.

    A tile costs its elements and the reading of its operands. One share counts for the tiles that are computed (energy,
    which a card limits), the other for the places in as many full waves (time). Matrix units take multiples of 64 along
    one side, of 8 along the other.
    """

    def cost(tile: tuple[int, int]) -> float:
        features, rows = tile
        programs = math.ceil(num_out / features) * math.ceil(num_rows / rows)
        places = math.ceil(programs / num_sms) * num_sms
        return ((1 - WAVES_SHARE) * programs + WAVES_SHARE * places) * (features * rows + READ_COST * (features + rows))

    return heapq.nsmallest(most, _sound_tiles(), key=cost)


@cache
def _sound_tiles() -> list[tuple[int, int]]:
    return [
        (features, rows)
        for features, rows in tile_numbers()
        if LEAST_FEATURES <= features <= MOST_FEATURES
        and rows >= LEAST_TILE_ROWS
        and features * rows <= MOST_TILE
        and (features % 64 == 0 or rows % 64 == 0)
    ]


def filling_algorithms(num_rows: int, num_out: int, num_sms: int) -> Iterator[Algorithm]:
    """Kernels of the best tiles, the best first; cuBLASLt has not all of them."""
    for features, rows in filling_tiles(num_rows, num_out, num_sms):
        row_tiles = math.ceil(num_rows / rows)
        is_one_wave = math.ceil(num_out / features) * row_tiles <= num_sms
        cluster = TWO_ROWS if row_tiles == 2 and is_one_wave else ALONE
        side = 0 if rows % 64 == 0 else _FEATURES_FIRST
        yield Algorithm(features, rows, cluster, side)
        yield Algorithm(features, rows, cluster, side | _LARGE)


class Kernel(ctypes.Structure):
    """cublasLtMatmulAlgo_t: an algorithm that cuBLASLt has for a product, as cuBLASLt describes it."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Checked(ctypes.Structure):
    _fields_ = (
        ("kernel", Kernel),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Product:
    """The product of rows and a weight of such shapes and strides, and cuBLASLt's descriptions of it.

    To cuBLASLt, whose matrices lie by columns, it is W times x.T, with a column for each row.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p, x_TD: Tensor, weight_OD: Tensor) -> None:
        self._library, self._handle, self._kind = library, handle, DTYPES[x_TD.dtype]
        (num_rows, width), num_out = x_TD.shape, len(weight_OD)
        self._desc = ctypes.c_void_p()
        _call(library, "cublasLtMatmulDescCreate", ctypes.byref(self._desc), _COMPUTE_FLOAT32, _FLOAT32)
        transposed = _sized(ctypes.c_int(_TRANSPOSED))
        _call(library, "cublasLtMatmulDescSetAttribute", self._desc, _OPERATION_OF_FIRST, *transposed)
        self._weight = self._layout(width, num_out, weight_OD.stride(0))
        self._x = self._layout(width, num_rows, x_TD.stride(0))
        self._out = self._layout(num_out, num_rows, num_out)
        self._one, self._zero, self._no_bytes = ctypes.c_float(1.0), ctypes.c_float(0.0), ctypes.c_size_t(0)

    def kernel(self, algorithm: Algorithm) -> Kernel | None:
        """The kernel of this algorithm; None if there is none for such a product, or if it needs a workspace."""
        kernel, checked = Kernel(), _Checked()
        types = (_COMPUTE_FLOAT32, _FLOAT32, *[self._kind] * 4)
        if self._library.cublasLtMatmulAlgoInit(self._handle, *types, _HOPPER_KERNELS, ctypes.byref(kernel)):
            return None
        for attribute, value in (
            (_TILE, ctypes.c_uint32(tile_numbers()[algorithm.features, algorithm.rows])),
            (_STAGES, ctypes.c_uint32(_STEPS_OF_64)),
            (_VARIANT, ctypes.c_uint32(algorithm.variant)),
            (_CLUSTER, ctypes.c_uint16(algorithm.cluster)),
        ):
            if self._library.cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(kernel), attribute, *_sized(value)):
                return None
        refused = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._desc, self._weight, self._x, self._out, self._out, ctypes.byref(kernel),
            ctypes.byref(checked),
        )  # fmt: skip
        return None if refused or checked.workspace_bytes else kernel

    def launch(self, kernel: Kernel, x_TD: Tensor, weight_OD: Tensor) -> Tensor:
        """x @ W.T of operands with these shapes and strides, on torch's current stream.

        Shapes: (T, D) -> (T, O), contiguous.
        Device: one launch, no host sync.
        """
        out_TO = torch.empty((len(x_TD), len(weight_OD)), dtype=x_TD.dtype, device=x_TD.device)
        x, weight, out = (ctypes.c_void_p(one.data_ptr()) for one in (x_TD, weight_OD, out_TO))
        stream = ctypes.c_void_p(torch.cuda.current_stream(x_TD.device).cuda_stream)
        _call(
            self._library, "cublasLtMatmul", self._handle, self._desc, ctypes.byref(self._one), weight, self._weight,
            x, self._x, ctypes.byref(self._zero), out, self._out, out, self._out, ctypes.byref(kernel),
            None, self._no_bytes, stream,
        )  # fmt: skip
        return out_TO

    def _layout(self, num_rows: int, num_columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(num_rows), ctypes.c_uint64(num_columns), ctypes.c_int64(stride))
        _call(self._library, "cublasLtMatrixLayoutCreate", ctypes.byref(layout), self._kind, *sizes)
        return layout


class CublasLt:
    """A device's handle, and the products that it was asked for."""

    def __init__(self, library: Any, num_sms: int) -> None:
        self._library, self.num_sms = library, num_sms
        self._handle = ctypes.c_void_p()
        _call(library, "cublasLtCreate", ctypes.byref(self._handle))
        self._chosen: dict[tuple[Any, ...], tuple[Product, Kernel | None]] = {}

    def linear(self, x_TD: Tensor, weight_OD: Tensor) -> Tensor | None:
        """x @ W.T of operands that `fits` accepts, by the first available one of `filling_algorithms`; None if there
        is none.

        Shapes: (T, D) -> (T, O), contiguous.
        Device: one launch, no host sync.
        """
        key = (x_TD.shape, x_TD.stride(0), weight_OD.shape, weight_OD.stride(0), x_TD.dtype)
        if key not in self._chosen:
            product = self.product(x_TD, weight_OD)
            tried = filling_algorithms(len(x_TD), len(weight_OD), self.num_sms)
            self._chosen[key] = product, next(filter(None, map(product.kernel, tried)), None)
        product, kernel = self._chosen[key]
        return None if kernel is None else product.launch(kernel, x_TD, weight_OD)

    def product(self, x_TD: Tensor, weight_OD: Tensor) -> Product:
        """The product, to be tried with other algorithms than `linear` takes."""
        return Product(self._library, self._handle, x_TD, weight_OD)


def _sized(value: Any) -> tuple[Any, ctypes.c_size_t]:
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with status {code}")


def fits(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """Whether cuBLASLt takes these operands, and they have as many rows as pay.

    Device: looks at shapes, strides, addresses and dtypes only, so a captured graph keeps its answer.
    """
    if x_TD.dim() != 2 or not MIN_ROWS <= len(x_TD) <= MAX_ROWS:
        return False
    if x_TD.dtype not in DTYPES or x_TD.dtype != weight_OD.dtype or len(weight_OD) % 8:
        return False
    return has_aligned_rows(x_TD) and has_aligned_rows(weight_OD)


@cache
def cublaslt(device: torch.device) -> CublasLt | None:
    """This device's CublasLt; None if it is no Hopper card, or torch was installed without the library."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    return CublasLt(library, torch.cuda.get_device_properties(device).multi_processor_count)
