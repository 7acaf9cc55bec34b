"""Paged attention in plain torch: a step's rows planned once, then attended with in every layer.

Queries and keys come normalised and rotated. Decode rows are attended with together, without a loop: the G query heads
that share a kv head are the query rows of one product. A sequence whose blocks lie side by side is read in place (CPU
only, where looking at the table costs nothing); any other is gathered. Blocks that lie before a window are not read.
Legend: T tokens, B decode rows, Q queries of a row and L tokens of its context that they see, H = K * G heads,
K kv heads, E head dim, N blocks, S block size, M blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hookline.core.contracts import AttentionForm, AttentionSpec, Batch

WORTH_A_GROUP = 512
"""Fewest padded tokens that one more group of decode rows must save to pay for its calls."""


@dataclass(frozen=True)
class Sequence:
    """Queries [start, stop) of one sequence over the last `context` tokens of its blocks.

    skip: tokens of the first block before them. first_slot: the slot of the first token if all slots are adjacent, else
    None, and blocks_M has the blocks. mask_QL: additive; None if is_causal describes the whole mask.
    """

    start: int
    stop: int
    context: int
    skip: int
    first_slot: int | None
    blocks_M: Tensor
    mask_QL: Tensor | None
    is_causal: bool


@dataclass(frozen=True)
class Decodes:
    """`count` queries, one per sequence, each over the first `context` tokens of its blocks, masked.

    queries_B: which of the step's queries they are; None if the first ones in order.
    """

    count: int
    context: int
    blocks_BM: Tensor
    mask_B11L: Tensor
    queries_B: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Groups of rows in the order they are attended in; order_T puts their outputs back, None if they are in order."""

    groups: list[Sequence | Decodes]
    order_T: Tensor | None = None


def plan_rows(batch: Batch, spec: AttentionSpec) -> Rows:
    """The groups of rows that every layer of this step attends to at once, decodes first. No host sync."""
    lens = batch.context_lens_host
    if lens is None:
        assert batch.num_decodes == batch.num_requests, "a prefill needs its length on the host"
        return Rows([_decodes(batch, spec, batch.max_context_len, None)])
    groups: list[Sequence | Decodes] = []
    order_T = None
    if batch.num_decodes == 1:
        groups.append(_sequence(batch, spec, 0, int(lens[0])))
    elif batch.num_decodes:
        seen_B = lens[: batch.num_decodes] if batch.window is None else lens[: batch.num_decodes].clip(max=batch.window)
        members = group_by_length(seen_B)
        groups += [_decodes(batch, spec, int(lens[rows].max()), rows if len(members) > 1 else None) for rows in members]
        if len(members) > 1:
            order = np.concatenate([*members, np.arange(batch.num_decodes, batch.num_tokens)]).argsort()
            order_T = torch.from_numpy(order).to(batch.token_ids_T.device)
    groups += [_sequence(batch, spec, row, int(lens[row])) for row in range(batch.num_decodes, batch.num_requests)]
    return Rows(groups, order_T)


def group_by_length(lens_B: np.ndarray) -> list[np.ndarray]:
    """Rows of similar length together, since each row of a group costs as much as its longest.

    A group holds lengths within a factor of two; a group that saves little joins the longer one before it.
    """
    groups: list[np.ndarray] = []
    by_length = np.argsort(-lens_B, kind="stable")
    while len(by_length):
        longest = lens_B[by_length[0]]
        is_shorter = lens_B[by_length] * 2 <= longest
        saved = int((longest - lens_B[by_length[is_shorter]]).sum())
        if saved < WORTH_A_GROUP:
            return [*groups, by_length]
        groups.append(by_length[~is_shorter])
        by_length = by_length[is_shorter]
    return groups


def attend_rows(q_THE: Tensor, kv_2NSKE: Tensor, rows: Rows, spec: AttentionSpec, form: AttentionForm) -> Tensor:
    """Attention of all rows: (T, H, E) -> (T, H, E), or the head dim of values that are a part of the keys."""
    parts = [
        _attend_decodes(q_THE, kv_2NSKE, row, spec, form)
        if isinstance(row, Decodes)
        else _attend_sequence(q_THE, kv_2NSKE, row, spec, form)
        for row in rows.groups
    ]
    out_THE = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_THE if rows.order_T is None else out_THE.index_select(0, rows.order_T)


def _decodes(batch: Batch, spec: AttentionSpec, longest: int, rows: np.ndarray | None) -> Decodes:
    table_BM, queries_B = batch.block_table_BM[: batch.num_decodes], None
    lens_B = batch.context_lens_B[: batch.num_decodes]
    if rows is not None:
        queries_B = torch.from_numpy(rows).to(lens_B.device)
        table_BM, lens_B = table_BM.index_select(0, queries_B), lens_B.index_select(0, queries_B)
    if batch.window is None or longest <= batch.window:
        return _masked_decodes(table_BM, lens_B, None, longest, queries_B, spec)
    first_B = (lens_B - batch.window).clamp(min=0)
    first_block_B = first_B // spec.block_size
    longest = min(longest, batch.window + spec.block_size - 1)
    column_M = torch.arange(-(-longest // spec.block_size), device=table_BM.device)
    column_BM = (first_block_B[:, None] + column_M).clamp(max=table_BM.shape[1] - 1)
    before_B = first_block_B * spec.block_size
    blocks_BM = table_BM.gather(1, column_BM)
    return _masked_decodes(blocks_BM, lens_B - before_B, first_B - before_B, longest, queries_B, spec)


def _masked_decodes(
    table_BM: Tensor,
    lens_B: Tensor,
    skip_B: Tensor | None,
    longest: int,
    queries_B: Tensor | None,
    spec: AttentionSpec,
) -> Decodes:
    """Decodes over tokens skip_B to lens_B of these blocks, `longest` at most."""
    blocks_BM = table_BM[:, : -(-longest // spec.block_size)]
    position_L = torch.arange(longest, device=blocks_BM.device)
    is_hidden_BL = position_L >= lens_B[:, None]
    if skip_B is not None:
        is_hidden_BL |= position_L < skip_B[:, None]
    mask_BL = torch.zeros(is_hidden_BL.shape, device=blocks_BM.device, dtype=spec.dtype)
    mask_BL.masked_fill_(is_hidden_BL, -torch.inf)
    return Decodes(len(lens_B), longest, blocks_BM.reshape(-1), mask_BL[:, None, None], queries_B)


def _sequence(batch: Batch, spec: AttentionSpec, row: int, context: int) -> Sequence:
    assert batch.query_starts_host is not None
    start, stop = (int(at) for at in batch.query_starts_host[row : row + 2])
    num_queries, window = stop - start, batch.window
    first = 0 if window is None else max(0, context - num_queries - window + 1)
    first_block, seen = first // spec.block_size, context - first
    blocks_M = batch.block_table_BM[row, first_block : -(-context // spec.block_size)]
    is_cut = window is not None and seen > window
    is_whole = num_queries == seen and not is_cut
    mask_QL = (
        None if num_queries == 1 or is_whole else _causal_mask(num_queries, seen, window if is_cut else None, spec)
    )
    skip = first - first_block * spec.block_size
    first_slot = _first_slot(blocks_M, spec.block_size, skip)
    return Sequence(start, stop, seen, skip, first_slot, blocks_M, mask_QL, is_whole and num_queries > 1)


def _causal_mask(num_queries: int, context: int, window: int | None, spec: AttentionSpec) -> Tensor:
    """Query i is token context - num_queries + i and sees up to itself, from `window` tokens on if that is given."""
    past = context - num_queries
    hidden_QL = torch.full((num_queries, context), -torch.inf, device=spec.device, dtype=spec.dtype)
    return hidden_QL.triu(past + 1).add_(hidden_QL.tril_(past - window)) if window else hidden_QL.triu_(past + 1)


def _first_slot(blocks_M: Tensor, block_size: int, skip: int) -> int | None:
    """The first visible slot of blocks that are adjacent in memory; None if they are not, or if the check would wait
    for a device.
    """
    if blocks_M.device.type != "cpu":
        return None
    blocks = blocks_M.tolist()
    is_one_piece = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    return blocks[0] * block_size + skip if is_one_piece else None


def _attend_decodes(q_THE: Tensor, kv_2NSKE: Tensor, row: Decodes, spec: AttentionSpec, form: AttentionForm) -> Tensor:
    q_BHE = q_THE[: row.count] if row.queries_B is None else q_THE.index_select(0, row.queries_B)
    q_BKGE = q_BHE.view(row.count, spec.num_kv_heads, -1, spec.head_dim)
    k_BKLE, v_BKLE = keys_and_values(
        [
            blocks_NSKE.index_select(0, row.blocks_BM)
            .to(q_THE.dtype)
            .view(row.count, -1, *blocks_NSKE.shape[2:])[:, : row.context]
            .transpose(1, 2)
            for blocks_NSKE in kv_2NSKE
        ],
        spec,
    )
    sinks_1KG1 = None if form.sinks_H is None else form.sinks_H.view(1, spec.num_kv_heads, -1, 1)
    if q_THE.device.type == "cpu":  # where looking costs nothing
        out_BKGE = _attention(q_BKGE, k_BKLE, v_BKLE, spec, form, sinks_1KG1, row.mask_B11L)
        if not out_BKGE.isnan().any():
            return out_BKGE.flatten(1, 2)
    # A hidden slot may hold infinity or NaN of an earlier request, and 0 * NaN is NaN.
    is_hidden_B1L1 = row.mask_B11L.transpose(2, 3) != 0
    k_BKLE.masked_fill_(is_hidden_B1L1, 0)
    v_BKLE.masked_fill_(is_hidden_B1L1, 0)
    return _attention(q_BKGE, k_BKLE, v_BKLE, spec, form, sinks_1KG1, row.mask_B11L).flatten(1, 2)


def _attend_sequence(
    q_THE: Tensor, kv_2NSKE: Tensor, row: Sequence, spec: AttentionSpec, form: AttentionForm
) -> Tensor:
    halves = [_context(blocks_NSKE, row).to(q_THE.dtype).transpose(0, 1).unsqueeze(1) for blocks_NSKE in kv_2NSKE]
    k_K1LE, v_K1LE = keys_and_values(halves, spec)
    q_QKGE = q_THE[row.start : row.stop].view(row.stop - row.start, spec.num_kv_heads, -1, spec.head_dim)
    sinks_KG11 = None if form.sinks_H is None else form.sinks_H.view(spec.num_kv_heads, -1, 1, 1)
    if row.stop - row.start == 1:
        q_K1GE = q_QKGE.transpose(0, 1)  # The heads of a group are the rows of one product.
        sinks_K1G1 = None if sinks_KG11 is None else sinks_KG11.transpose(1, 2)
        return _attention(q_K1GE, k_K1LE, v_K1LE, spec, form, sinks_K1G1).reshape(1, -1, spec.out_dim)
    q_KGQE = q_QKGE.permute(1, 2, 0, 3)
    num_groups = q_KGQE.shape[1]
    k_KGLE, v_KGLE = (x_K1LE.expand(-1, num_groups, -1, -1) for x_K1LE in (k_K1LE, v_K1LE))
    out_KGQE = _attention(q_KGQE, k_KGLE, v_KGLE, spec, form, sinks_KG11, row.mask_QL, row.is_causal)
    return out_KGQE.permute(2, 0, 1, 3).flatten(1, 2)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    form: AttentionForm,
    sinks: Tensor | None,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention of this form over the last two dimensions; mask is additive, and sinks broadcast to the scores."""
    scale = spec.scale if form.scale is None else form.scale
    if form.softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = q.float() @ k.float().transpose(-2, -1) * scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if is_causal:
        scores += torch.full(scores.shape[-2:], -torch.inf, device=scores.device).triu_(1)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores).expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights.to(v.dtype) @ v).to(v.dtype)


def keys_and_values(halves: list[Tensor], spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Keys, and values, which are the second half of the cache or the last numbers of the keys: (..., E), (..., F)."""
    return halves[0], halves[-1][..., spec.head_dim - spec.out_dim :]


def put_rows(slots_NKE: Tensor, slot_mapping_T: Tensor, new_TKE: Tensor) -> None:
    """Store keys or values at their slots of a cache, clamped to the largest number of e4m3."""
    if slots_NKE.dtype == torch.float8_e4m3fn:  # whose rows torch copies as bytes alone
        limit = torch.finfo(slots_NKE.dtype).max
        new_TKE = new_TKE.clamp(-limit, limit).to(slots_NKE.dtype).view(torch.uint8)
        slots_NKE = slots_NKE.view(torch.uint8)
    slots_NKE.index_copy_(0, slot_mapping_T, new_TKE)


def _context(blocks_NSKE: Tensor, row: Sequence) -> Tensor:
    """The keys or values that a sequence's queries see, (L, K, E): a view if they lie in one piece.

    Keys and values are taken apart first: a layer's part of the cache is not contiguous as a whole, and index_select
    would copy all of it.
    """
    if row.first_slot is not None:
        return blocks_NSKE.flatten(0, 1)[row.first_slot : row.first_slot + row.context]
    return blocks_NSKE.index_select(0, row.blocks_M).flatten(0, 1)[row.skip : row.skip + row.context]
