"""Paged decode attention, split along the context (flash-decoding) with the combine in the same launch.

Once a step a small kernel cuts all contexts into work items of about equal length, from the lengths on the device, so a
captured graph stays balanced whatever the lengths are at replay. Each item attends with all query heads of one kv head
(they are the rows of the matrix product, so K and V are read once) and the last item of a request to finish merges
them. On the way it can normalise and rotate queries and the newest token's key, and write that token to the cache.
Knows nothing of layers or prefill.
Legend: B requests, H heads, K kv heads, G = H / K, E head dim, M blocks in a table row, N cache blocks, S block size,
W work items, R shared-prefix parts.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.core.contracts import QKNorm, Rope
from hookline.plugins.kernels.attention.triton_forms import (
    Scoring,
    first_seen,
    load_rotation,
    load_sinks,
    rotary_partner,
    rotated,
    scored,
)
from hookline.plugins.kernels.triton_launch import WIDE_GROUP, launch_options, triggers_late

ITEM_WIDTH = 8
"""Integers of a work item: row (-1: none), first and end position, first item of the row, items of the row, and with
a window the first position that the row sees."""
ITEMS_PER_PROGRAM = 16
FEW_ROWS = 32
"""Batches up to this size are cut by a smaller variant of the scheduling kernel."""
MIN_ITEM_TOKENS = 64
"""Fewest tokens of a work item: shorter ones cost more to merge than they gain."""
MAX_PROGRAMS_PER_SM = 8
MERGE_ROWS = 32
"""Rows merged at a time: partial results times heads of a kv head."""


@dataclass(frozen=True)
class Card:
    """What tilings depend on besides the problem. Off the GPU (the interpreter): a small card."""

    num_sms: int
    large_shared_memory: bool
    """Room for 200 KB a program, as on Hopper; the tilings for less are checked for results only."""

    @classmethod
    def of(cls, device: torch.device) -> Card:
        """The card behind a device."""
        if device.type != "cuda":
            return cls(num_sms=4, large_shared_memory=False)
        properties = torch.cuda.get_device_properties(device)
        shared_memory_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
        return cls(properties.multi_processor_count, shared_memory_bytes >= 200_000)


@dataclass(frozen=True)
class DecodeTiling:
    """How decode is cut: tile in positions, programs aimed at per multiprocessor."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def decode_tiling(num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, card: Card) -> DecodeTiling:
    """The measured choice for a batch, from static sizes alone (docs/log.md).

    Few rows are cut in small tiles and merged. With more of them a program has a row and kv head to itself, and only
    rows longer than most are cut, for merging costs more than imbalance; the fewer programs run, the more tiles of each
    are under way.
    """
    pairs = num_rows * num_kv_heads
    if dtype == torch.float32:
        return DecodeTiling(tile=32, num_warps=4, num_stages=2, programs_per_sm=3)
    if pairs <= 128 or pairs >= 1536 or head_dim > 128:
        return DecodeTiling(tile=32, num_warps=2, num_stages=3, programs_per_sm=2 if pairs <= 64 else 3)
    num_stages = 4 if 256 < pairs <= 640 and card.large_shared_memory else 3 if pairs < 896 else 2
    return DecodeTiling(tile=64, num_warps=4, num_stages=num_stages, programs_per_sm=1)


@dataclass
class DecodeScratch:
    """What decode needs besides its inputs; made once, sized for the largest batch, so graphs see fixed addresses.

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


@dataclass
class SharedPartials:
    """What the shared-prefix kernel leaves for the combine: part r of row b lies at r * B + b. Float32."""

    partial_PHE: Tensor
    stats_PH2: Tensor


@dataclass(frozen=True)
class Newest:
    """What is left to do for the newest token of every row before attention: norm, rotation and the cache write.

    Shapes: context_lens_B (B,) int32, this token included.
    """

    context_lens_B: Tensor
    rope: Rope | None
    norm: QKNorm | None


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


@triton.jit(do_not_specialize=["num_rows", "num_items", "target", "shared_parts", "window"])
def _schedule_kernel(
    context_lens_ptr, shared_lens_ptr, items_ptr, shared_info_ptr, num_rows, num_items, target, shared_parts, window,
    TILE: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, SHARED_TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OTHERS: tl.constexpr, BLOCK_ITEMS: tl.constexpr,
    ITEM_WIDTH: tl.constexpr,
):  # fmt: skip
    """Cut the rows into at most `num_items` items; every program derives the whole cut and writes its few items."""
    row = tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    length = tl.load(context_lens_ptr + row, mask=is_row, other=0)
    if WINDOW:
        length -= first_seen(length, window) // TILE * TILE
    if SHARED:
        shared = tl.load(shared_lens_ptr + row, mask=is_row, other=0)
        length -= shared
        if tl.program_id(0) == 0:
            shared_tokens = tl.max(shared, axis=0)
            shared_tiles = tl.cdiv(shared_tokens, SHARED_TILE)
            tiles_a_part = tl.maximum(tl.cdiv(shared_tiles, shared_parts), 1)
            tl.store(shared_info_ptr, tl.argmax(shared, axis=0))
            tl.store(shared_info_ptr + 1, shared_tokens)
            tl.store(shared_info_ptr + 2, tl.cdiv(shared_tiles, tiles_a_part))
            tl.store(shared_info_ptr + 3, tiles_a_part * SHARED_TILE)
    tiles = tl.cdiv(length, TILE)
    tiles_an_item = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), target), MIN_TILES)
    while tl.sum(tl.cdiv(tiles, tiles_an_item), axis=0) > num_items:
        tiles_an_item += tl.cdiv(tiles_an_item, 4)
    parts, even = _even_parts(tiles, tiles_an_item)
    # Long items come first, so that short ones fill up the end; of equal ones the earlier row's.
    first_item = tl.zeros([BLOCK_ROWS], tl.int32)
    for begin_other in range(0, num_rows, BLOCK_OTHERS):
        other = begin_other + tl.arange(0, BLOCK_OTHERS)
        other_length = tl.load(context_lens_ptr + other, mask=other < num_rows, other=0)
        if WINDOW:
            other_length -= first_seen(other_length, window) // TILE * TILE
        if SHARED:
            other_length -= tl.load(shared_lens_ptr + other, mask=other < num_rows, other=0)
        other_parts, other_even = _even_parts(tl.cdiv(other_length, TILE), tiles_an_item)
        is_earlier = (other_even[None, :] == even[:, None]) & (other[None, :] < row[:, None])
        is_before = (other_even[None, :] > even[:, None]) | is_earlier
        first_item += tl.sum(tl.where(is_before, other_parts[None, :], 0), axis=1)
    end = first_item + parts

    item = tl.program_id(0) * BLOCK_ITEMS + tl.arange(0, BLOCK_ITEMS)
    mine = (item[:, None] >= (end - parts)[None, :]) & (item[:, None] < end[None, :])
    item_row = tl.sum(tl.where(mine, row[None, :] + 1, 0), axis=1) - 1
    first = tl.sum(tl.where(mine, (end - parts)[None, :], 0), axis=1)
    item_parts = tl.sum(tl.where(mine, parts[None, :], 0), axis=1)
    stride = tl.sum(tl.where(mine, even[None, :], 0), axis=1) * TILE
    used = item_row >= 0
    begin = (item - first) * stride
    if SHARED:
        begin += tl.load(shared_lens_ptr + item_row, mask=used, other=0)
    item_length = tl.load(context_lens_ptr + item_row, mask=used, other=0)
    at = items_ptr + item * ITEM_WIDTH
    inside = item < num_items
    if WINDOW:
        seen = first_seen(item_length, window)
        begin += seen // TILE * TILE
        tl.store(at + 5, seen, mask=inside)
    stop = tl.minimum(begin + stride, item_length)
    tl.store(at, item_row, mask=inside)
    tl.store(at + 1, begin, mask=inside)
    tl.store(at + 2, stop, mask=inside)
    tl.store(at + 3, first, mask=inside)
    tl.store(at + 4, item_parts, mask=inside)


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
    block_rows = FEW_ROWS if num_rows <= FEW_ROWS else triton.next_power_of_2(len(scratch.counters_BK))
    _schedule_kernel[(triton.cdiv(num_items, ITEMS_PER_PROGRAM),)](
        context_lens_B, context_lens_B if shared_lens_B is None else shared_lens_B,
        scratch.items_W8, scratch.shared_info_4, num_rows, num_items,
        target_items(num_kv_heads, scratch.card.num_sms, tiling.programs_per_sm), max_shared_parts,
        0 if window is None else window, WINDOW=window is not None, TILE=tiling.tile,
        MIN_TILES=max(1, MIN_ITEM_TOKENS // tiling.tile), SHARED=shared_lens_B is not None,
        SHARED_TILE=shared_tile, BLOCK_ROWS=block_rows, BLOCK_OTHERS=16,
        BLOCK_ITEMS=ITEMS_PER_PROGRAM, ITEM_WIDTH=ITEM_WIDTH,
        num_warps=4 if block_rows <= FEW_ROWS else 8,
    )  # fmt: skip
    return num_items


@triton.jit
def tile_blocks(table_row_ptr, start, limit, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of the TILE positions from `start`, or of each of them if blocks do not hold whole tiles.

    Loops ask for it a tile ahead: while a load waits for another load of its tile, fewer tiles are under way.
    """
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_row_ptr + start // BLOCK_SIZE, mask=start < limit, other=0)
    else:
        position = start + tl.arange(0, TILE)
        return tl.load(table_row_ptr + position // BLOCK_SIZE, mask=position < limit, other=0)


@triton.jit
def tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Offsets into one half of the cache of the TILE positions from `start`, which lie in these blocks."""
    if BLOCK_SIZE % TILE == 0:
        offset = start % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        offset = (start + tl.arange(0, TILE)) % BLOCK_SIZE
    return blocks.to(tl.int64) * block_stride + offset * offset_stride


@triton.jit
def _merge_parts(
    maximum, total, acc, partial_ptr, stats_ptr, first, count, part_stride, head, heads, dim, dims,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge partials first, first + 1, … into the running (maximum, sum, weighted values) of some heads.

    Loads bypass the L1 cache: other programs may have written the partials while this one ran.
    """
    for begin in range(0, count, PARTS):
        index = begin + tl.arange(0, PARTS)
        at = (first + index.to(tl.int64))[:, None] * part_stride + head[None, :]
        inside = (index < count)[:, None] & heads[None, :]
        part_maximum = tl.load(stats_ptr + at * 2, mask=inside, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(stats_ptr + at * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial_ptr + at[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=inside[:, :, None] & dims[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, axis=0))
        new_maximum = tl.where(heads, new_maximum, 0.0)  # keeps padding heads free of inf - inf
        weight = tl.exp2(part_maximum - new_maximum[None, :])
        rescale = tl.exp2(maximum - new_maximum)
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * values, axis=0)
        total = total * rescale + tl.sum(weight * part_total, axis=0)
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _attend_tile(q, k, v, inside, maximum, total, acc, factor, cap, CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Take a tile of keys and values into the running (maximum, sum, weighted values)."""
    scores = scored(tl.dot(q, tl.trans(k), input_precision=PRECISION), factor, cap, CAP)
    scores = tl.where(inside[None, :], scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    rescale = tl.exp2(maximum - new_maximum)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return new_maximum, total, acc


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _decode_kernel(
    q_ptr, cache_ptr, table_ptr, items_ptr, out_ptr, partial_ptr, stats_ptr, counters_ptr,
    shared_lens_ptr, shared_info_ptr, shared_partial_ptr, shared_stats_ptr, num_rows,
    q_stride, half_stride: tl.int64, block_stride, offset_stride, head_stride, table_stride, factor, cap, sinks_ptr,
    context_lens_ptr, rope_ptr, q_weight_ptr, k_weight_ptr, rope_stride, eps,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, ROTARY_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FUSED: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_GROUP: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, ITEM_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    if PDL and not LATE:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)  # fastest: programs that run together read neighbouring heads of the same tokens
    item = tl.program_id(1)
    row = tl.load(items_ptr + item * ITEM_WIDTH)
    begin = tl.load(items_ptr + item * ITEM_WIDTH + 1)
    stop = tl.load(items_ptr + item * ITEM_WIDTH + 2)
    first = tl.load(items_ptr + item * ITEM_WIDTH + 3)
    parts = tl.load(items_ptr + item * ITEM_WIDTH + 4)
    if row < 0:
        return
    if WINDOW:
        seen = tl.load(items_ptr + item * ITEM_WIDTH + 5)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_DIM)
    dims = dim < HEAD_DIM
    head = kv_head * GROUP + member
    mask_md = (member < GROUP)[:, None] & dims[None, :]
    row64 = row.to(tl.int64)
    table_row_ptr = table_ptr + row64 * table_stride
    end = stop
    head_ptr = cache_ptr + kv_head * head_stride + dim[None, :]
    if FUSED:
        last = tl.load(context_lens_ptr + row) - 1
        newest_block = tl.load(table_row_ptr + last // BLOCK_SIZE).to(tl.int64)
        end = tl.minimum(stop, last)
        is_last = stop > last
        partner = rotary_partner(dim, ROTARY_DIM, HEAD_DIM)
        cos, sin = 1.0 + tl.zeros([BLOCK_DIM], tl.float32), tl.zeros([BLOCK_DIM], tl.float32)
        if ROPE:
            cos, sin = load_rotation(rope_ptr + last * rope_stride, dim, dims, HEAD_DIM, ROTARY_DIM)
        q_weight, k_weight, other_q_weight, other_k_weight = cos, cos, cos, cos
        if NORM:
            q_weight = tl.load(q_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
            k_weight = tl.load(k_weight_ptr + dim, mask=dims, other=0.0).to(tl.float32)
            other_q_weight = tl.load(q_weight_ptr + partner, mask=dims, other=0.0).to(tl.float32)
            other_k_weight = tl.load(k_weight_ptr + partner, mask=dims, other=0.0).to(tl.float32)
    blocks = tile_blocks(table_row_ptr, begin, end, BLOCK_SIZE, TILE)
    if PDL:
        gdc_wait()
    if PDL and LATE:
        gdc_launch_dependents()
    shared_parts = 0
    if SHARED:  # loaded early, used late; the first item of a row merges the shared part
        shared_parts = tl.load(shared_info_ptr + 2)
        shared_parts = tl.where((item == first) & (tl.load(shared_lens_ptr + row) > 0), shared_parts, 0)

    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    if SINKS:  # the first item of a row begins from them
        sink = load_sinks(sinks_ptr, head, member < GROUP)
        maximum = tl.where(item == first, sink, maximum)
        total += tl.where(item == first, 1.0, 0.0)
    if FUSED:
        one = tl.arange(0, 1)[:, None]
        q_head_ptr = q_ptr + row64 * q_stride + head[:, None] * HEAD_DIM
        k_ptr = q_ptr + row64 * q_stride + (NUM_HEADS + kv_head + one) * HEAD_DIM
        mask_1d = (one == 0) & dims[None, :]
        new_v = tl.load(k_ptr + NUM_KV_HEADS * HEAD_DIM + dim[None, :], mask=mask_1d, other=0.0)
        new_k = rotated(
            k_ptr, mask_1d, k_weight, other_k_weight, cos, sin, eps, dim, partner, HEAD_DIM, NORM, ROPE
        ).to(q_ptr.dtype.element_ty)  # fmt: skip
        q = rotated(
            q_head_ptr, mask_md, q_weight, other_q_weight, cos, sin, eps, dim, partner, HEAD_DIM, NORM, ROPE
        ).to(q_ptr.dtype.element_ty)  # fmt: skip
        if is_last:  # the row's newest token is not in the cache yet: this program starts from it, and writes it there
            slot_ptr = head_ptr + newest_block * block_stride + last % BLOCK_SIZE * offset_stride
            tl.store(slot_ptr, new_k, mask=mask_1d)
            tl.store(slot_ptr + half_stride, new_v, mask=mask_1d)
            score = scored(tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1), factor, cap, CAP)
            if SINKS:
                new_maximum = tl.maximum(maximum, score)
                weight = tl.exp2(score - new_maximum)
                total = total * tl.exp2(maximum - new_maximum) + weight
                acc += weight[:, None] * new_v.to(tl.float32)
                maximum = new_maximum
            else:
                maximum = score
                total += 1.0
                acc += new_v.to(tl.float32)
    else:
        q = tl.load(q_ptr + row64 * q_stride + head[:, None] * HEAD_DIM + dim[None, :], mask=mask_md, other=0.0)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        if WINDOW:
            inside &= position >= seen
        place = tile_places(blocks, start, block_stride, offset_stride, BLOCK_SIZE, TILE)
        blocks = tile_blocks(table_row_ptr, start + TILE, end, BLOCK_SIZE, TILE)
        load_mask = inside[:, None] & dims[None, :]
        k = tl.load(head_ptr + place[:, None], mask=load_mask, other=0.0)
        # Masked: a slot past the context may hold anything, and 0 * NaN is NaN.
        v = tl.load(head_ptr + half_stride + place[:, None], mask=load_mask, other=0.0)
        maximum, total, acc = _attend_tile(q, k, v, inside, maximum, total, acc, factor, cap, CAP, PRECISION)
    group = tl.arange(0, BLOCK_GROUP)
    heads = group < GROUP
    group_head = kv_head * GROUP + group
    group_mask = heads[:, None] & dims[None, :]
    mask_m = member < GROUP
    if SHARED:
        # Drop the rows that only fill up the matrix product, so that the partials load in whole rows.
        REPEAT: tl.constexpr = BLOCK_M // BLOCK_GROUP
        maximum = tl.sum(tl.reshape(tl.where(mask_m, maximum, 0.0), [REPEAT, BLOCK_GROUP]), axis=0)
        total = tl.sum(tl.reshape(tl.where(mask_m, total, 0.0), [REPEAT, BLOCK_GROUP]), axis=0)
        acc = tl.sum(tl.reshape(tl.where(mask_m[:, None], acc, 0.0), [REPEAT, BLOCK_GROUP, BLOCK_DIM]), axis=0)
        head, mask_m, mask_md = group_head, heads, group_mask
        maximum, total, acc = _merge_parts(
            maximum, total, acc,
            shared_partial_ptr + row64 * NUM_HEADS * HEAD_DIM, shared_stats_ptr + row64 * NUM_HEADS * 2,
            0, shared_parts, num_rows * NUM_HEADS, head, heads, dim, dims, HEAD_DIM, SHARED_PARTS,
        )  # fmt: skip
    out_row_ptr = out_ptr + row64 * NUM_HEADS * HEAD_DIM
    if parts == 1:
        out = acc / tl.where(mask_m, total, 1.0)[:, None]
        tl.store(out_row_ptr + head[:, None] * HEAD_DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_md)
    else:
        at = item.to(tl.int64) * NUM_HEADS + head
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask_md)
        tl.store(stats_ptr + at * 2, maximum, mask=mask_m)
        tl.store(stats_ptr + at * 2 + 1, total, mask=mask_m)
        counter_ptr = counters_ptr + row * NUM_KV_HEADS + kv_head
        tl.debug_barrier()  # every thread's partials are written before one thread publishes them
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if arrived == parts - 1:
            tl.store(counter_ptr, 0)  # for the next launch
            _, merged_total, merged = _merge_parts(
                tl.full([BLOCK_GROUP], -float("inf"), tl.float32), tl.zeros([BLOCK_GROUP], tl.float32),
                tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32), partial_ptr, stats_ptr,
                first, parts, NUM_HEADS, group_head, heads, dim, dims, HEAD_DIM, PARTS,
            )  # fmt: skip
            merged = merged / tl.where(heads, merged_total, 1.0)[:, None]
            to_out = out_row_ptr + group_head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(to_out, merged.to(out_ptr.dtype.element_ty), mask=group_mask)


def decode_attention(
    q_BHE: Tensor,
    kv_2NSKE: Tensor,
    block_table_BM: Tensor,
    num_items: int,
    scratch: DecodeScratch,
    scoring: Scoring,
    out_BHE: Tensor,
    tiling: DecodeTiling,
    shared_lens_B: Tensor | None = None,
    shared: SharedPartials | None = None,
    newest: Newest | None = None,
    *,
    has_window: bool = False,
) -> None:
    """One query token per row against its cached context, by the work list that `schedule_decode` wrote.

    has_window: whether the list was written for a window.

    Shapes: q_BHE, out_BHE (B, H, E), heads contiguous; block_table_BM (B, M) int32. With `newest`, q_BHE is
    (B, H + 2K, E), heads of q, k and v as they are projected, and the newest key and value are written to the cache.
    Device: one launch, no host sync; safe in a CUDA graph. Contexts are at least 1 token (beyond the shared ones).
    Source: Dao et al. 2023, flash-decoding; Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).
    """
    num_rows, num_heads, head_dim = out_BHE.shape
    _, _, block_size, num_kv_heads, _ = kv_2NSKE.shape
    group = num_heads // num_kv_heads
    block_group = triton.next_power_of_2(group)
    half_stride, block_stride, offset_stride, head_stride, _ = kv_2NSKE.stride()
    with_shared = shared_lens_B is not None and shared is not None
    rope, norm = (newest.rope, newest.norm) if newest is not None else (None, None)
    table = rope.table_PE if rope is not None else scratch.stats_WH2
    q_weight, k_weight = (norm.q_weight_E, norm.k_weight_E) if norm is not None else (q_BHE, q_BHE)
    _decode_kernel[(num_kv_heads, num_items)](
        q_BHE, kv_2NSKE, block_table_BM, scratch.items_W8, out_BHE, scratch.partial_WHE, scratch.stats_WH2,
        scratch.counters_BK, shared_lens_B if with_shared else block_table_BM, scratch.shared_info_4,
        shared.partial_PHE if shared is not None else scratch.partial_WHE,
        shared.stats_PH2 if shared is not None else scratch.stats_WH2, num_rows,
        q_BHE.stride(0), half_stride, block_stride, offset_stride, head_stride, block_table_BM.stride(0),
        scoring.factor, scoring.cap, q_BHE if scoring.sinks_H is None else scoring.sinks_H,
        newest.context_lens_B if newest is not None else block_table_BM, table, q_weight, k_weight, table.stride(0),
        norm.eps if norm is not None else 0.0,
        WINDOW=has_window, CAP=scoring.cap != 0, SINKS=scoring.sinks_H is not None,
        ROTARY_DIM=table.shape[1] if rope is not None else head_dim,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SHARED=with_shared,
        FUSED=newest is not None, NORM=norm is not None, ROPE=rope is not None,
        BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_GROUP=block_group, TILE=tiling.tile, PARTS=max(1, MERGE_ROWS // block_group),
        SHARED_PARTS=max(1, MERGE_ROWS // 2 // block_group), ITEM_WIDTH=ITEM_WIDTH,
        PRECISION="ieee", num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        LATE=triggers_late(num_rows, is_large=group >= WIDE_GROUP), **launch_options(q_BHE.device),
    )  # fmt: skip
