"""Batches and caches made by hand, for testing kernels and models without an engine.

Blocks lie in random order, and table entries past a row's context name arbitrary blocks, which must not be read.
Legend: T tokens, B rows, M blocks of a table row, N blocks, S block size, L layers, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Batch


@dataclass(frozen=True)
class Row:
    """The last `num_queries` of a sequence's `context` tokens, whose cache blocks are `blocks`."""

    context: int
    num_queries: int
    blocks: tuple[int, ...]


def make_batch(
    rows: Sequence[Row], spec: AttentionSpec, *, num_decodes: int, token_ids_T: Tensor | None = None, filler: int = 0
) -> Batch:
    """The batch of these rows, decodes first. filler: the block that entries past a row's context name."""
    starts = np.array([0, *accumulate(row.num_queries for row in rows)], dtype=np.int32)
    contexts = np.array([row.context for row in rows], dtype=np.int32)
    positions = [torch.arange(row.context - row.num_queries, row.context) for row in rows]
    slots = [_slots(row, position_T, spec.block_size) for row, position_T in zip(rows, positions, strict=True)]
    width = max(len(row.blocks) for row in rows)
    table = [[*row.blocks, *[filler] * (width - len(row.blocks))] for row in rows]
    no_ids_T = torch.zeros(int(starts[-1]), dtype=torch.int64)
    return Batch(
        token_ids_T=(no_ids_T if token_ids_T is None else token_ids_T).to(spec.device),
        positions_T=torch.cat(positions).to(spec.device),
        slot_mapping_T=torch.cat(slots).to(spec.device),
        query_starts_B1=torch.from_numpy(starts.copy()).to(spec.device),
        context_lens_B=torch.from_numpy(contexts.copy()).to(spec.device),
        block_table_BM=torch.tensor(table, dtype=torch.int32, device=spec.device),
        num_decodes=num_decodes,
        max_query_len=max(row.num_queries for row in rows),
        max_context_len=int(contexts.max()),
        query_starts_host=starts,
        context_lens_host=contexts,
    )


def scatter_rows(
    lengths: Sequence[tuple[int, int]], block_size: int, num_blocks: int, seed: int, num_shared: int = 0
) -> list[Row]:
    """Rows of these (context, queries), each with its own blocks in random order.

    num_shared: the number of leading blocks that all rows share, if their contexts reach beyond them.
    """
    free = np.random.default_rng(seed).permutation(num_blocks).tolist()
    shared = [free.pop() for _ in range(num_shared)]
    rows = []
    for context, num_queries in lengths:
        num_needed = -(-context // block_size)
        own = [free.pop() for _ in range(max(0, num_needed - num_shared))]
        rows.append(Row(context, num_queries, (*shared, *own)[:num_needed]))
    return rows


def seen_slots(rows: Sequence[Row], block_size: int) -> Tensor:
    """Every flat cache slot that some row's context occupies; a shared one as often as it is shared."""
    return torch.cat([_slots(row, torch.arange(row.context), block_size) for row in rows])


def random_cache(spec: AttentionSpec, num_blocks: int, seed: int, num_layers: int = 1) -> Tensor:
    """A cache full of standard normal values: [2, L, N + 1, S, K, E], or [1, ...] of keys alone.

    The last block is scratch.
    """
    shape = (spec.num_cached, num_layers, num_blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(spec.device, spec.stored_dtype)


def _slots(row: Row, position_T: Tensor, block_size: int) -> Tensor:
    return torch.tensor(row.blocks)[position_T // block_size] * block_size + position_T % block_size
