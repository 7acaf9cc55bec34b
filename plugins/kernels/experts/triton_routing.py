"""Triton kernels that route tokens to experts, and list the pairs of a token and one of its experts by expert.

`order_P` lists the pairs, and tiles of at most `block_m` pairs of one expert are the units of both products. There is
room for the worst routing, so nothing waits for the host and a CUDA graph holds for any routing.
Legend: T tokens, X experts, A experts of a token, P = T * A pairs, W most tiles.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.triton_card import Card, Room, refused
from hookline.plugins.kernels.triton_launch import launch_options, next_power_of_2

MOST_PAIRS_SCANNED = 32768
"""Most pairs for which every expert's program reads all pairs; a sort is faster for more."""
SCAN_BLOCK = 1024
MOST_EXPERTS = 1 << 16
"""Most experts that the keys of a choice can name."""
LEAST_DEPTH = 16
"""Least depth of a step of a matrix product, in elements."""


@triton.jit
def expert_keys(logits, num_experts):
    """An integer for each logit (in 16 or 32 bits): larger for a larger logit, and of equal ones for the first.

    Its low 16 bits are 65,535 less the expert; above are the logit's bits, from sign and magnitude to two's complement.
    The largest of 32 bits in a warp takes one instruction, where a value and its place take ten exchanges.
    """
    column = tl.arange(0, logits.shape[0])
    if logits.dtype.primitive_bitwidth == 16:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits < 0, -(bits & 0x7FFF), bits)
    else:
        bits = logits.to(tl.int32, bitcast=True).to(tl.int64)
        ordered = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    lowest: tl.constexpr = -(1 << (bits.dtype.primitive_bitwidth - 1))
    return tl.where(column < num_experts, ordered * 0x10000 + (0xFFFF - column), lowest)


@triton.jit
def next_best(keys, best):
    """The largest of the keys that are less than `best`."""
    lowest: tl.constexpr = -(1 << (keys.dtype.primitive_bitwidth - 1))
    return tl.max(tl.where(keys < best, keys, lowest), axis=0)


@triton.jit
def logits_of(keys, dtype: tl.constexpr):
    """The logits of keys, in float32."""
    ordered = keys >> 16
    if dtype.primitive_bitwidth == 16:
        bits = tl.where(ordered < 0, 0x8000 - ordered, ordered).to(tl.int16)
    else:
        bits = tl.where(ordered < 0, 0x80000000 - ordered, ordered).to(tl.int32)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _route_kernel(
    logits_ptr, scale_ptr, expert_ptr, weight_ptr, row_stride, num_experts,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column, place = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_A)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < num_experts, other=float("-inf"))
    keys = expert_keys(logits, num_experts)
    best = tl.max(keys, axis=0)
    score = tl.exp(logits.to(tl.float32) - logits_of(best, logits.dtype))
    total, chosen = tl.sum(score, axis=0), tl.zeros([BLOCK_A], keys.dtype) + best
    for index in tl.static_range(1, TOP_K):
        best = next_best(keys, best)
        chosen = tl.where(place == index, best, chosen)
    highest = tl.max(logits_of(chosen, logits.dtype), axis=0)
    weight = tl.where(place < TOP_K, tl.exp(logits_of(chosen, logits.dtype) - highest) / total, 0.0)
    if NORMALISE:
        weight = weight / tl.sum(weight, axis=0)
    expert = 0xFFFF - (chosen & 0xFFFF)
    if scale_ptr is not None:
        weight *= tl.load(scale_ptr + expert, mask=place < TOP_K, other=0.0).to(tl.float32)
    expert = tl.where(place < TOP_K, expert, num_experts + place - TOP_K).to(tl.int64)
    weight = tl.where(place < TOP_K, weight, 1.0)
    tl.store(expert_ptr + row * (TOP_K + SHARED) + place, expert, mask=place < TOP_K + SHARED)
    tl.store(weight_ptr + row * (TOP_K + SHARED) + place, weight, mask=place < TOP_K + SHARED)


def route_experts(
    logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None, num_shared: int = 0
) -> tuple[Tensor, Tensor]:
    """See Kernels.route_experts. Of equal experts the first is taken.

    Device: one launch, no host sync.
    """
    num_tokens, num_experts = logits_TX.shape
    assert num_experts <= MOST_EXPERTS
    expert_TA = torch.empty((num_tokens, top_k + num_shared), dtype=torch.int64, device=logits_TX.device)
    weight_TA = torch.empty(expert_TA.shape, dtype=torch.float32, device=logits_TX.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits_TX, scale_X, expert_TA, weight_TA, logits_TX.stride(0), num_experts,
            TOP_K=top_k, SHARED=num_shared, NORMALISE=normalise, BLOCK_X=next_power_of_2(num_experts),
            BLOCK_A=next_power_of_2(top_k + num_shared), num_warps=1 if num_experts <= 256 else 4,
            **launch_options(logits_TX.device),
        )  # fmt: skip
    return expert_TA, weight_TA


FEW_PAIRS = 48
"""Most pairs for each expert for which small tiles are used; with more pairs, large tiles are full."""


@dataclass(frozen=True)
class Tiling:
    """How the products are cut: pairs of a tile, columns and depth of a step of each product, warps and stages."""

    block_m: int
    gate_up: tuple[int, int, int, int]
    down: tuple[int, int, int, int]


def tiling(num_pairs: int, num_experts: int, itemsize: int) -> Tiling:
    """The tiling for so many pairs an expert on average; wider types take shallower steps. From an H200 (docs/log)."""
    shrink = max(1, itemsize // 2)
    if num_pairs <= 8 * num_experts:
        return Tiling(16, (32, 128 // shrink, 4, 4), (32, 128 // shrink, 4, 4))
    if num_pairs <= FEW_PAIRS * num_experts:
        return Tiling(32, (64, 128 // shrink, 4, 3), (64, 128 // shrink, 4, 3))
    return Tiling(128 // shrink, (64, 64 // shrink, 4, 3), (128, 64 // shrink, 4, 3))


def clamped_tiling(num_pairs: int, num_experts: int, itemsize: int) -> Tiling:
    """The tiling of clamped experts for so many pairs an expert on average; wider types take shallower steps.

    Between 16 and 48 pairs a tile holds nearly all pairs of an expert, so that its weights are read once: these experts
    are few and large, and their weights do not stay in the L2 from one tile to the next.
    """
    shrink = max(1, itemsize // 2)
    if 16 * num_experts < num_pairs <= FEW_PAIRS * num_experts:
        return Tiling(64, (64, 64 // shrink, 4, 4), (128, 64 // shrink, 4, 4))
    return tiling(num_pairs, num_experts, itemsize)


def scaled_tiling(num_pairs: int, num_experts: int, itemsize: int) -> Tiling:
    """The tiling for weights in 8 or 4 bits: twice the columns of `tiling`, so as many bytes are under way.

    Not measured: many pairs have twice the warps, since a step's sums lie beside those of all steps.
    """
    shrink = max(1, itemsize // 2)
    if num_pairs <= FEW_PAIRS * num_experts:
        step = 64, 128 // shrink, 4, 4 if num_pairs <= 8 * num_experts else 3
        return Tiling(16 if num_pairs <= 8 * num_experts else 32, step, step)
    return Tiling(128 // shrink, (64, 64 // shrink, 8, 3), (128, 64 // shrink, 8, 3))


def rounded_tiling(num_pairs: int, num_experts: int, itemsize: int) -> Tiling:
    """The tiling for weights in e4m3 and rows that are rounded to it, see `rounds_ahead`; itemsize: of the rows, 2.

    The fastest of 5 to 8 tilings for each of six numbers of tokens, at Qwen3-30B-A3B's shape on an H200.
    """
    if rounds_ahead(num_pairs, num_experts):
        return Tiling(64, (64, 128, 4, 4), (128, 128, 4, 4))
    if num_pairs > 8 * num_experts:
        return Tiling(32, (64, 128, 4, 3), (64, 128, 4, 3))
    return Tiling(16, (128, 128, 8, 3), (128, 128, 8, 3))


def rounds_ahead(num_pairs: int, num_experts: int) -> bool:
    """Whether a launch of its own rounds all rows; else each program rounds its rows, for each block of columns."""
    return num_pairs > FEW_PAIRS * num_experts


@cache
def fitting_cut(
    cut: Tiling, itemsize: int, card: Card, weight_bits: int | None = None, *, rounds: bool = False
) -> Tiling:
    """This tiling with as many stages of each product as the card has room for, else with shallower steps.

    weight_bits: of a stored value, where these are widened to items of `itemsize` bytes, for which there is room too;
    `rounds`: they stay, and the rows become e4m3, for which there is room.
    Raises: ConfigError if not even one step of the least depth fits.
    """

    def fitted(product: tuple[int, int, int, int], num_weights: int) -> tuple[int, int, int, int]:
        columns, depth, num_warps, num_stages = product
        stored = num_weights * columns * depth
        widened = 0 if weight_bits is None else cut.block_m * depth if rounds else stored * itemsize
        room = Room(cut.block_m * depth * itemsize + stored * (weight_bits or 8 * itemsize) // 8, widened)
        num_stages = min(num_stages, card.most_stages(room))
        if num_stages:
            return columns, depth, num_warps, num_stages
        if depth <= LEAST_DEPTH:
            raise refused("a product of experts", room, card)
        return fitted((columns, depth // 2, num_warps, product[3]), num_weights)

    return Tiling(cut.block_m, fitted(cut.gate_up, 2), fitted(cut.down, 1))


@dataclass(frozen=True)
class Groups:
    """Pairs grouped by expert. order_P: pair numbers (token * A + place), int32. ends_X: end of each expert's pairs.

    tile_expert_W, tile_row_W: of each tile the expert and the first of its places in order_P. num_tiles_1: how many of
    the W tiles are used.
    """

    order_P: Tensor
    ends_X: Tensor
    tile_expert_W: Tensor
    tile_row_W: Tensor
    num_tiles_1: Tensor


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    expert_ptr, order_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, num_pairs,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    index = tl.arange(0, BLOCK_X)
    counts = tl.zeros([BLOCK_X], tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        expert = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=0).to(tl.int32)
        counts += tl.histogram(expert, BLOCK_X, mask=pair < num_pairs)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    begin = tl.sum(tl.where(index < mine, counts, 0), axis=0)
    end = tl.sum(tl.where(index <= mine, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(index < mine, tiles, 0), axis=0)
    tl.store(ends_ptr + mine, end)
    if mine == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, axis=0))
    tile = 0
    for row in range(begin, end, BLOCK_M):
        tl.store(tile_expert_ptr + first_tile + tile, mine)
        tl.store(tile_row_ptr + first_tile + tile, row)
        tile += 1
    place = begin
    for start in range(0, num_pairs, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        expert = tl.load(expert_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_mine = (expert == mine).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_mine, axis=0) - 1, pair, mask=is_mine == 1)
        place += tl.sum(is_mine, axis=0)


def group_by_expert(expert_TA: Tensor, num_experts: int, block_m: int) -> Groups:
    """Group the pairs by expert, each expert's pairs in order of their tokens, and cut the groups into tiles.

    Device: one launch for up to MOST_PAIRS_SCANNED pairs, else a sort and some more; no host sync.
    """
    expert_P, num_pairs = expert_TA.reshape(-1), expert_TA.numel()
    most_tiles = min(num_pairs, num_experts + num_pairs // block_m)
    if num_pairs > MOST_PAIRS_SCANNED:
        return _group_by_sorting(expert_P, num_experts, block_m, most_tiles)
    order_P, ends_X, tile_expert_W, tile_row_W, num_tiles_1 = (
        torch.empty(size, dtype=torch.int32, device=expert_P.device)
        for size in (num_pairs, num_experts, most_tiles, most_tiles, 1)
    )
    _group_kernel[(num_experts,)](
        expert_P, order_P, ends_X, tile_expert_W, tile_row_W, num_tiles_1, num_pairs,
        BLOCK_M=block_m, BLOCK_P=min(SCAN_BLOCK, max(32, next_power_of_2(num_pairs))),
        BLOCK_X=max(32, next_power_of_2(num_experts)), num_warps=4, **launch_options(expert_P.device),
    )  # fmt: skip
    return Groups(order_P, ends_X, tile_expert_W, tile_row_W, num_tiles_1)


def _group_by_sorting(expert_P: Tensor, num_experts: int, block_m: int, most_tiles: int) -> Groups:
    device = expert_P.device
    sorted_P, order_P = expert_P.to(torch.int32).sort(stable=True)
    ends_X = torch.searchsorted(sorted_P, torch.arange(num_experts, device=device, dtype=torch.int32), right=True)
    begins_X = torch.cat((ends_X.new_zeros(1), ends_X[:-1]))
    tile_ends_X = ((ends_X - begins_X + block_m - 1) // block_m).cumsum(0)
    tile_W = torch.arange(most_tiles, device=device)
    expert_W = torch.searchsorted(tile_ends_X, tile_W, right=True).clamp_(max=num_experts - 1)
    first_W = torch.cat((tile_ends_X.new_zeros(1), tile_ends_X[:-1])).index_select(0, expert_W)
    row_W = begins_X.index_select(0, expert_W) + (tile_W - first_W) * block_m
    narrow = (tensor.to(torch.int32) for tensor in (order_P, ends_X, expert_W, row_W, tile_ends_X[-1:]))
    return Groups(*narrow)
