"""How decode attention is cut: the tiling of a batch, and the work list that a small kernel writes once a step.

The kernel cuts all contexts into work items of about equal length, from the lengths on the device, so a captured graph
stays balanced for any lengths at replay. It also finds the prefix that the rows share.
Legend: B requests, H heads, K kv heads, E head dim, W work items.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.attention.triton_forms import first_seen
from hookline.plugins.kernels.attention.triton_tiles import WIDE_HEAD, fitting_tile
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, next_power_of_2

ITEM_WIDTH = 8
"""Integers of a work item: row (-1: none), first and end position, first item of the row, items of the row, and with
a window the first position that the row sees."""
ROWS_PER_PROGRAM = 16
"""Rows whose items one program of the scheduling kernel writes."""
FEW_ROWS = 32
"""Batches up to this size are cut by a smaller variant of the scheduling kernel."""
MIN_ITEM_TOKENS = 64
"""Fewest tokens of a work item: shorter ones cost more to merge than they gain."""
MAX_PROGRAMS_PER_SM = 8
MERGE_ROWS, MOST_MERGE_ROWS = 32, 64
"""Rows merged at a time, and for few pairs of a row and a kv head of at least MANY_HEADS query heads."""
MANY_HEADS = 4
FEW_PAIRS = 64
"""Up to so many pairs of a row and a kv head programs do not fill the card, and the last one's merge is waited for."""


@dataclass(frozen=True)
class DecodeTiling:
    """How decode is cut: tile in positions, programs aimed at per multiprocessor.

    merge_rows: rows merged at a time, partial results times heads of a kv head.
    """

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    merge_rows: int = MERGE_ROWS


def decode_tiling(
    num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, card: Card, group: int = 1,
    stored: torch.dtype | None = None,
) -> DecodeTiling:  # fmt: skip
    """The measured choice for a batch, from static sizes alone (docs/log). stored: the cache's dtype, if it is another.

    Few rows are cut in small tiles and merged. With more of them a program has a row and kv head to itself, and only
    rows longer than most are cut, for merging costs more than imbalance; the fewer programs run, the more tiles of each
    are under way, as far as the card has room for them.
    """
    pairs, in_8_bits = num_rows * num_kv_heads, stored is not None and stored.itemsize == 1
    fastest = _fastest_in_8_bits if in_8_bits and dtype.itemsize == 2 and head_dim <= 128 else _fastest
    tiling = fastest(pairs, head_dim, dtype, card)
    if pairs <= FEW_PAIRS and group >= MANY_HEADS and head_dim <= 128:
        tiling = replace(tiling, merge_rows=MOST_MERGE_ROWS)
    return fitting_tile(tiling, group, head_dim, dtype, card)


def _fastest_in_8_bits(pairs: int, head_dim: int, dtype: torch.dtype, card: Card) -> DecodeTiling:
    """As `_fastest`, for a cache in e4m3: a tile has as many bytes if it has twice the positions.

    Not for very few pairs, whose items would be merged for longer than they are attended to.
    """
    if 32 < pairs <= 128:
        return DecodeTiling(tile=64, num_warps=2, num_stages=4, programs_per_sm=4)
    if 128 < pairs <= 256:
        return DecodeTiling(tile=128, num_warps=4, num_stages=3, programs_per_sm=1)
    if pairs >= 1536:
        return DecodeTiling(tile=64, num_warps=2, num_stages=3, programs_per_sm=3)
    return _fastest(pairs, head_dim, dtype, card)


def _fastest(pairs: int, head_dim: int, dtype: torch.dtype, card: Card) -> DecodeTiling:
    """For so many pairs of a row and a kv head."""
    if dtype == torch.float32:
        return DecodeTiling(tile=32, num_warps=4, num_stages=2, programs_per_sm=3)
    if head_dim > WIDE_HEAD:
        return DecodeTiling(tile=16, num_warps=4, num_stages=3, programs_per_sm=2)
    if pairs <= 128 or pairs >= 1536 or head_dim > 128:
        return DecodeTiling(tile=32, num_warps=2, num_stages=3, programs_per_sm=2 if pairs <= FEW_PAIRS else 3)
    num_stages = 4 if 256 < pairs <= 640 and card.large_shared_memory else 3 if pairs < 896 else 2
    return DecodeTiling(tile=64, num_warps=4, num_stages=num_stages, programs_per_sm=1)


@dataclass
class DecodeScratch:
    """Decode's scratch memory; allocated once, for the largest batch, so that graphs see fixed addresses.

    Shapes: items_W8 int32; partial_WHE, stats_WH2 float32 (running maximum and sum); counters_BK int32, zero between
    launches (the last item of a row resets its own); shared_info_4 int32: leader row, tokens, parts.
    """

    items_W8: Tensor
    partial_WHE: Tensor
    stats_WH2: Tensor
    counters_BK: Tensor
    shared_info_4: Tensor
    card: Card

    @classmethod
    def make(
        cls, max_num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> DecodeScratch:
        """Allocate for batches of up to `max_num_rows`."""
        card = Card.of(device)
        num_items = max_num_items(max_num_rows, num_kv_heads, card.num_sms, MAX_PROGRAMS_PER_SM)
        return cls(
            items_W8=torch.empty((num_items, ITEM_WIDTH), dtype=torch.int32, device=device),
            partial_WHE=torch.empty((num_items, num_heads, head_dim), dtype=torch.float32, device=device),
            stats_WH2=torch.empty((num_items, num_heads, 2), dtype=torch.float32, device=device),
            counters_BK=torch.zeros((max_num_rows, num_kv_heads), dtype=torch.int32, device=device),
            shared_info_4=torch.zeros(4, dtype=torch.int32, device=device),
            card=card,
        )


def target_items(num_kv_heads: int, num_sms: int, programs_per_sm: int) -> int:
    """Work items a row of kv heads that fill the card."""
    return max(1, num_sms * programs_per_sm // num_kv_heads)


def max_num_items(num_rows: int, num_kv_heads: int, num_sms: int, programs_per_sm: int) -> int:
    """Length of the work list: items past the last one in use cost an empty program each, so not much slack."""
    return max(target_items(num_kv_heads, num_sms, programs_per_sm), num_rows + num_rows // 4)


@triton.jit
def _even_parts(tiles, tiles_an_item):
    """Parts of equal length, and as many as that takes: (parts, tiles of a part)."""
    even = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, tiles_an_item), 1))
    return tl.where(tiles > 0, tl.cdiv(tiles, tl.maximum(even, 1)), 0), even


@triton.jit
def _left_to_attend(
    context_lens_ptr, shared_lens_ptr, row, is_row, window, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Of these rows: the length, the first position that is seen, and where the items begin."""
    length = tl.load(context_lens_ptr + row, mask=is_row, other=0)
    seen = tl.zeros_like(length)
    begin = tl.zeros_like(length)
    if WINDOW:
        seen = first_seen(length, window)
        begin += seen // TILE * TILE
    if SHARED:
        begin += tl.load(shared_lens_ptr + row, mask=is_row, other=0)
    return length, seen, begin


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "target", "shared_parts", "window"],
    do_not_specialize_on_alignment=OF_STEP,
)
def _schedule_kernel(
    context_lens_ptr, shared_lens_ptr, items_ptr, shared_info_ptr, num_rows, num_items, target, shared_parts, window,
    TILE: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, SHARED_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, MY_ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr, ITEM_WIDTH: tl.constexpr,
):  # fmt: skip
    """Cut the rows into at most `num_items` items; every program finds the cut and writes the items of its few rows."""
    other = tl.arange(0, BLOCK_ROWS)
    is_other = other < num_rows
    length, _, begin = _left_to_attend(
        context_lens_ptr, shared_lens_ptr, other, is_other, window, TILE, WINDOW, SHARED
    )  # fmt: skip
    tiles = tl.cdiv(length - begin, TILE)
    tiles_an_item = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), target), MIN_TILES)
    while tl.sum(tl.cdiv(tiles, tiles_an_item), axis=0) > num_items:
        tiles_an_item += tl.cdiv(tiles_an_item, 4)
    other_parts, other_even = _even_parts(tiles, tiles_an_item)
    if SHARED and tl.program_id(0) == 0:
        shared = tl.load(shared_lens_ptr + other, mask=is_other, other=0)
        shared_tokens = tl.max(shared, axis=0)
        shared_tiles = tl.cdiv(shared_tokens, SHARED_TILE)
        tiles_a_part = tl.maximum(tl.cdiv(shared_tiles, shared_parts), 1)
        tl.store(shared_info_ptr, tl.argmax(shared, axis=0))
        tl.store(shared_info_ptr + 1, shared_tokens)
        tl.store(shared_info_ptr + 2, tl.cdiv(shared_tiles, tiles_a_part))
        tl.store(shared_info_ptr + 3, tiles_a_part * SHARED_TILE)

    row = tl.program_id(0) * MY_ROWS + tl.arange(0, MY_ROWS)
    length, seen, begin = _left_to_attend(
        context_lens_ptr, shared_lens_ptr, row, row < num_rows, window, TILE, WINDOW, SHARED
    )  # fmt: skip
    parts, even = _even_parts(tl.cdiv(length - begin, TILE), tiles_an_item)
    # Long items come first, so that short ones fill up the end; of equal ones the earlier row's.
    is_earlier = (other_even[None, :] == even[:, None]) & (other[None, :] < row[:, None])
    is_before = (other_even[None, :] > even[:, None]) | is_earlier
    first = tl.sum(tl.where(is_before, other_parts[None, :], 0), axis=1)
    for first_part in range(0, tl.max(parts, axis=0), BLOCK_PARTS):
        part = first_part + tl.arange(0, BLOCK_PARTS)[None, :]
        mine = part < parts[:, None]
        at = items_ptr + (first[:, None] + part) * ITEM_WIDTH
        item_begin = begin[:, None] + part * (even[:, None] * TILE)
        tl.store(at, row[:, None] + tl.zeros_like(part), mask=mine)
        tl.store(at + 1, item_begin, mask=mine)
        tl.store(at + 2, tl.minimum(item_begin + even[:, None] * TILE, length[:, None]), mask=mine)
        tl.store(at + 3, first[:, None] + tl.zeros_like(part), mask=mine)
        tl.store(at + 4, parts[:, None] + tl.zeros_like(part), mask=mine)
        if WINDOW:
            tl.store(at + 5, seen[:, None] + tl.zeros_like(part), mask=mine)
    num_used = tl.sum(other_parts, axis=0)
    for first_item in range(tl.program_id(0) * BLOCK_ROWS, num_items, tl.num_programs(0) * BLOCK_ROWS):
        item = first_item + other
        tl.store(
            items_ptr + item * ITEM_WIDTH,
            tl.full([BLOCK_ROWS], -1, tl.int32),
            mask=(item >= num_used) & (item < num_items),
        )


def schedule_decode(
    context_lens_B: Tensor,
    scratch: DecodeScratch,
    num_kv_heads: int,
    tiling: DecodeTiling,
    shared_lens_B: Tensor | None = None,
    shared_tile: int = 64,
    max_shared_parts: int = 1,
    window: int | None = None,
) -> int:
    """Write this step's work list into the scratch; returns W, the length of the list (static).

    window: tokens that a row sees; a row's items then begin with the tile of the first of them.
    Shapes: context_lens_B, shared_lens_B (B,) int32.
    Device: one launch, no host sync; the grid depends on B alone.
    """
    num_rows = len(context_lens_B)
    num_items = max_num_items(num_rows, num_kv_heads, scratch.card.num_sms, tiling.programs_per_sm)
    assert num_items <= len(scratch.items_W8)
    # Two variants only, so that a new batch size never compiles.
    block_rows = FEW_ROWS if num_rows <= FEW_ROWS else next_power_of_2(len(scratch.counters_BK))
    _schedule_kernel[(cdiv(num_rows, ROWS_PER_PROGRAM),)](
        context_lens_B, context_lens_B if shared_lens_B is None else shared_lens_B,
        scratch.items_W8, scratch.shared_info_4, num_rows, num_items,
        target_items(num_kv_heads, scratch.card.num_sms, tiling.programs_per_sm), max_shared_parts,
        0 if window is None else window, WINDOW=window is not None, TILE=tiling.tile,
        MIN_TILES=max(1, MIN_ITEM_TOKENS // tiling.tile), SHARED=shared_lens_B is not None,
        SHARED_TILE=shared_tile, BLOCK_ROWS=block_rows, MY_ROWS=ROWS_PER_PROGRAM, BLOCK_PARTS=16,
        ITEM_WIDTH=ITEM_WIDTH, num_warps=4,
    )  # fmt: skip
    return num_items
