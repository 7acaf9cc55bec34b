"""Where requests' entries lie in a head's KV cache: each request's row of the block table, and its blocks.

Entries are numbered from 0 for each request, whatever its first position is. If all rows or blocks are taken, the least
recently used request is dropped: a preempted request, since each step uses the entries of running requests.
Legend: R rows of requests, M blocks of a row, T tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class HeadSequence:
    """The entries of a request. row: of the block table. length: number of valid entries. end: the position after the
    last entry's.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    end: int = 0


class HeadCache:
    """The rows and blocks of one head. max_len: most entries of a request; num_blocks: without the scratch block.

    table_RM: int32 on the device. Its last row, padding_row, has the scratch block alone.
    """

    def __init__(self, num_rows: int, max_len: int, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.padding_row, self.block_size, self.max_len = num_rows, block_size, max_len
        num_columns = -(-max_len // block_size)
        self.table_RM = torch.full((num_rows + 1, num_columns), num_blocks, dtype=torch.int32, device=device)
        self._sequences: OrderedDict[int, HeadSequence] = OrderedDict()
        """By request id, the least recently used request first."""
        self._rows, self._blocks = list(reversed(range(num_rows))), list(reversed(range(num_blocks)))
        self._written: dict[tuple[int, int], int] = {}
        """Blocks by row and column that have not been written to the table on the device yet."""

    def get(self, id: int) -> HeadSequence | None:
        """A request's sequence; None if it has none."""
        return self._sequences.get(id)

    def with_room(self, id: int, num_entries: int, needed: Collection[int]) -> HeadSequence | None:
        """A request's sequence with blocks for so many entries after its valid ones; None if no blocks are left.

        needed: requests that are not dropped for it. A request without a sequence gets an empty one.
        """
        sequence = self._sequences.get(id)
        if sequence is None:
            if not self._rows and not self._drop_oldest(needed):
                return None
            sequence = self._sequences[id] = HeadSequence(self._rows.pop())
        self._sequences.move_to_end(id)
        num_blocks = -(-(sequence.length + num_entries) // self.block_size)
        while len(sequence.blocks) < num_blocks:
            if not self._blocks and not self._drop_oldest(needed):
                return None
            block = self._written[sequence.row, len(sequence.blocks)] = self._blocks.pop()
            sequence.blocks.append(block)
        return sequence

    def send(self) -> None:
        """Bring the table on the device up to date. Device: no host sync."""
        if self._written:
            written = np.array([(*place, block) for place, block in self._written.items()], dtype=np.int64)
            rows, columns, blocks = on_device(written.T, self.table_RM.device)
            self.table_RM[rows, columns] = blocks.to(torch.int32)
            self._written.clear()

    def forget(self, id: int) -> None:
        """Free a request's row and blocks."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._rows.append(sequence.row)
            self._blocks.extend(reversed(sequence.blocks))

    def clear(self) -> None:
        """Forget all requests."""
        for id_ in list(self._sequences):
            self.forget(id_)

    def slots(self, table_TM: Tensor, index_T: Tensor) -> Tensor:
        """The flat cache slot of entry index_T[t] of the request whose blocks are table_TM[t]. Device: graph-safe."""
        column_T = index_T // self.block_size
        block_T = table_TM.gather(1, column_T.unsqueeze(1)).squeeze(1)
        return index_T + (block_T - column_T) * self.block_size

    def _drop_oldest(self, needed: Collection[int]) -> bool:
        """Forget the least recently used request that is not needed; False if all are needed."""
        oldest = next((id_ for id_ in self._sequences if id_ not in needed), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy of an array on the device, without waiting for it."""
    sent = torch.from_numpy(np.ascontiguousarray(array))
    return sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent
