"""Block tables as FlashInfer wants them: the pages of all rows one after the other, without gaps.

Arithmetic only: knows neither flashinfer nor a GPU. Legend: B rows, M blocks in a table row, S tokens a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class HostPages:
    """The layout of a step whose lengths the host knows."""

    starts_B1: np.ndarray
    """First page of each row, and the number of all pages; int32."""
    places: np.ndarray
    """Where each page's block stands in the flattened block table; int64."""
    last_lens_B: np.ndarray
    """Tokens in each row's last page; int32."""


def host_pages(context_lens_B: np.ndarray, table_width: int, block_size: int) -> HostPages:
    """Lay out rows of these context lengths."""
    counts_B = -(-context_lens_B // block_size)
    starts_B1 = np.concatenate(([0], np.cumsum(counts_B))).astype(np.int32)
    row = np.repeat(np.arange(len(counts_B), dtype=np.int64), counts_B)
    places = row * table_width + np.arange(starts_B1[-1]) - starts_B1[row]
    return HostPages(starts_B1, places, ((context_lens_B - 1) % block_size + 1).astype(np.int32))


class DevicePages:
    """The same for decode rows whose lengths only the device knows: buffers that keep their addresses in a graph."""

    def __init__(self, num_rows: int, table_width: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.dump = block_size, num_rows * table_width
        ints = {"dtype": torch.int32, "device": device}
        self.query_starts_B1 = torch.arange(num_rows + 1, **ints)
        self.starts_B1 = torch.zeros(num_rows + 1, **ints)
        self.last_lens_B = torch.ones(num_rows, **ints)
        self.blocks = torch.zeros(self.dump + 1, **ints)
        """All pages, and behind them a place for what belongs to no row."""
        self.column_M = torch.arange(table_width, **ints)

    def update(self, context_lens_B: Tensor, block_table_BM: Tensor) -> None:
        """Follow the lengths. Device: no host sync, no shape that depends on data."""
        counts_B = (context_lens_B + (self.block_size - 1)) // self.block_size
        torch.cumsum(counts_B, 0, dtype=torch.int32, out=self.starts_B1[1:])
        torch.sub(context_lens_B, (counts_B - 1) * self.block_size, out=self.last_lens_B)
        place_BM = self.starts_B1[:-1, None] + self.column_M
        place_BM = torch.where(self.column_M < counts_B[:, None], place_BM, self.dump)
        self.blocks.scatter_(0, place_BM.flatten().long(), block_table_BM.flatten())
