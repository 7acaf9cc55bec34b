"""Paged attention in plain torch: a step's rows planned once, then attended with in every layer.

Knows nothing of norms or rotations. Decode rows are attended with together, without a loop: the G query heads that
share a kv head are the query rows of one product. A sequence whose blocks lie side by side is read in place (CPU only,
where looking at the table costs nothing); any other is gathered.
Legend: T tokens, B decode rows, Q queries and L context of a row, H = K * G heads, K kv heads, E head dim, N blocks,
S block size, M blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hookline.core.contracts import AttentionSpec, Batch

WORTH_A_GROUP = 512
"""Fewest padded tokens that one more group of decode rows must save to pay for its calls."""


@dataclass(frozen=True)
class Sequence:
    """Queries [start, stop) of one sequence over its `context` tokens.

    first_slot: where the context starts if it lies in one piece, else None and blocks_M says where it is.
    mask_QL: additive; None if no query is masked beyond what is_causal says.
    """

    start: int
    stop: int
    context: int
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
    """What every layer of this step attends with, decodes first. Does not wait for the device."""
    lens = batch.context_lens_host
    if lens is None:
        assert batch.num_decodes == batch.num_requests, "a prefill needs its length on the host"
        return Rows([_decodes(batch, spec, batch.max_context_len, None)])
    groups: list[Sequence | Decodes] = []
    order_T = None
    if batch.num_decodes == 1:
        groups.append(_sequence(batch, spec, 0, int(lens[0])))
    elif batch.num_decodes:
        members = group_by_length(lens[: batch.num_decodes])
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


def attend_rows(q_THE: Tensor, kv_2NSKE: Tensor, rows: Rows, spec: AttentionSpec) -> Tensor:
    """Attention of all rows: (T, H, E) -> (T, H, E)."""
    parts = [
        _attend_decodes(q_THE, kv_2NSKE, row, spec)
        if isinstance(row, Decodes)
        else _attend_sequence(q_THE, kv_2NSKE, row, spec)
        for row in rows.groups
    ]
    out_THE = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_THE if rows.order_T is None else out_THE.index_select(0, rows.order_T)


def _decodes(batch: Batch, spec: AttentionSpec, longest: int, rows: np.ndarray | None) -> Decodes:
    num_blocks = -(-longest // spec.block_size)
    blocks_BM = batch.block_table_BM[: batch.num_decodes, :num_blocks]
    lens_B, queries_B = batch.context_lens_B[: batch.num_decodes], None
    if rows is not None:
        queries_B = torch.from_numpy(rows).to(lens_B.device)
        blocks_BM, lens_B = blocks_BM.index_select(0, queries_B), lens_B.index_select(0, queries_B)
    position_L = torch.arange(longest, device=blocks_BM.device)
    is_hidden_BL = position_L >= lens_B[:, None]
    mask_BL = torch.zeros(is_hidden_BL.shape, device=blocks_BM.device, dtype=spec.dtype)
    mask_BL.masked_fill_(is_hidden_BL, -torch.inf)
    return Decodes(len(lens_B), longest, blocks_BM.reshape(-1), mask_BL[:, None, None], queries_B)


def _sequence(batch: Batch, spec: AttentionSpec, row: int, context: int) -> Sequence:
    assert batch.query_starts_host is not None
    start, stop = (int(at) for at in batch.query_starts_host[row : row + 2])
    blocks_M = batch.block_table_BM[row, : -(-context // spec.block_size)]
    num_queries = stop - start
    is_whole = num_queries == context
    mask_QL = None if num_queries == 1 or is_whole else _causal_mask(num_queries, context, spec)
    first_slot = _first_slot(blocks_M, spec.block_size)
    return Sequence(start, stop, context, first_slot, blocks_M, mask_QL, is_whole and num_queries > 1)


def _causal_mask(num_queries: int, context: int, spec: AttentionSpec) -> Tensor:
    """Query i is the context's token context - num_queries + i and sees up to itself."""
    hidden_QL = torch.full((num_queries, context), -torch.inf, device=spec.device, dtype=spec.dtype)
    return hidden_QL.triu_(context - num_queries + 1)


def _first_slot(blocks_M: Tensor, block_size: int) -> int | None:
    """Where blocks that lie side by side begin; None if they don't, or if looking would wait for a device."""
    if blocks_M.device.type != "cpu":
        return None
    blocks = blocks_M.tolist()
    return blocks[0] * block_size if blocks == list(range(blocks[0], blocks[0] + len(blocks))) else None


def _attend_decodes(q_THE: Tensor, kv_2NSKE: Tensor, row: Decodes, spec: AttentionSpec) -> Tensor:
    q_BHE = q_THE[: row.count] if row.queries_B is None else q_THE.index_select(0, row.queries_B)
    q_BKGE = q_BHE.view(row.count, spec.num_kv_heads, -1, spec.head_dim)
    k_BKLE, v_BKLE = (
        blocks_NSKE.index_select(0, row.blocks_BM)
        .view(row.count, -1, *blocks_NSKE.shape[2:])[:, : row.context]
        .transpose(1, 2)
        for blocks_NSKE in kv_2NSKE
    )
    out_BKGE = scaled_dot_product_attention(q_BKGE, k_BKLE, v_BKLE, attn_mask=row.mask_B11L, scale=spec.scale)
    return out_BKGE.flatten(1, 2)


def _attend_sequence(q_THE: Tensor, kv_2NSKE: Tensor, row: Sequence, spec: AttentionSpec) -> Tensor:
    k_K1LE, v_K1LE = (_context(blocks_NSKE, row).transpose(0, 1).unsqueeze(1) for blocks_NSKE in kv_2NSKE)
    q_QKGE = q_THE[row.start : row.stop].view(row.stop - row.start, spec.num_kv_heads, -1, spec.head_dim)
    if row.stop - row.start == 1:
        q_K1GE = q_QKGE.transpose(0, 1)  # The heads of a group are the rows of one product.
        return scaled_dot_product_attention(q_K1GE, k_K1LE, v_K1LE, scale=spec.scale).reshape(1, -1, spec.head_dim)
    q_KGQE = q_QKGE.permute(1, 2, 0, 3)
    num_groups = q_KGQE.shape[1]
    k_KGLE, v_KGLE = (x_K1LE.expand(-1, num_groups, -1, -1) for x_K1LE in (k_K1LE, v_K1LE))
    out_KGQE = scaled_dot_product_attention(
        q_KGQE, k_KGLE, v_KGLE, attn_mask=row.mask_QL, is_causal=row.is_causal, scale=spec.scale
    )
    return out_KGQE.permute(2, 0, 1, 3).flatten(1, 2)


def _context(blocks_NSKE: Tensor, row: Sequence) -> Tensor:
    """The sequence's keys or values, (L, K, E): a view if they lie in one piece.

    Keys and values are taken apart first: a layer's part of the cache is not contiguous as a whole, and index_select
    would copy all of it.
    """
    if row.first_slot is not None:
        return blocks_NSKE.flatten(0, 1)[row.first_slot : row.first_slot + row.context]
    return blocks_NSKE.index_select(0, row.blocks_M).flatten(0, 1)[: row.context]
