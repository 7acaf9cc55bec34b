"""The rows of a step: which of them are wanted, and how they are cut into chunks.

While one chunk's product is summed over the ranks, the next chunk's is computed. Layers that compute each row by itself
may take the chunks one by one; attention needs all rows.
Legend: T tokens, N rows wanted, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ROW_TILE = 256
"""Chunks are multiples of this many rows, since matrix products are computed in tiles of as many."""
MOST_CHUNKS = 4
LEAST_ROWS = 4096
"""Fewer rows are not cut: small chunks cost as much in launches and slower products as hiding the sums saves
(docs/log)."""


def sensible_chunks(num_rows: int) -> int:
    """How many chunks to cut a step into, so that the sums of some run beside the products of others."""
    return 1 if num_rows < LEAST_ROWS else max(2, min(MOST_CHUNKS, num_rows // LEAST_ROWS))


def cut(x_TD: Tensor, num_chunks: int) -> list[Tensor]:
    """Views of the rows in this many nearly equal chunks; in fewer, but at least one, if there are too few rows."""
    num_rows = x_TD.shape[0]
    num_tiles = -(-num_rows // ROW_TILE)
    num_chunks = max(1, min(num_chunks, num_tiles))
    stops = [min(num_rows, -(-num_tiles * chunk // num_chunks) * ROW_TILE) for chunk in range(1, num_chunks + 1)]
    return [x_TD[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def cut_like(x_TD: Tensor, chunks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of the rows in pieces as long as these chunks."""
    return torch.split(x_TD, [len(chunk) for chunk in chunks])


def whole(chunks: Iterable[Tensor]) -> Tensor:
    """All chunks in one tensor; a single chunk is returned as it is."""
    parts = list(chunks)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
