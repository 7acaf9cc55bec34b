"""The page lists, against a plain loop; on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hookline_flashinfer.pages import DevicePages, host_pages

LENGTHS = [[1], [16], [17, 1, 48], [5, 33, 16, 64, 2]]


def expected(lengths: list[int], table: np.ndarray, size: int) -> tuple[list[int], list[int], list[int]]:
    blocks = [table[row, : -(-length // size)].tolist() for row, length in enumerate(lengths)]
    starts = [0]
    for row in blocks:
        starts.append(starts[-1] + len(row))
    last = [length - (len(row) - 1) * size for length, row in zip(lengths, blocks, strict=True)]
    return starts, [block for row in blocks for block in row], last


def table_of(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(num_rows * 4).reshape(num_rows, 4).astype(np.int32)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_hosts_layout_is_the_plain_one(lengths: list[int]) -> None:
    table = table_of(len(lengths))
    pages = host_pages(np.array(lengths, dtype=np.int32), 4, 16)
    found = pages.starts_B1.tolist(), table.flatten()[pages.places].tolist(), pages.last_lens_B.tolist()
    assert found == expected(lengths, table, 16)
    assert (pages.starts_B1.dtype, pages.last_lens_B.dtype) == (np.int32, np.int32)


def test_the_devices_layout_follows_the_lengths_in_the_same_buffers() -> None:
    pages = DevicePages(3, 4, 16, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in (pages.starts_B1, pages.blocks, pages.last_lens_B)]
    table = table_of(3)
    for lengths in ([17, 1, 48], [64, 16, 2], [1, 1, 1]):
        pages.update(torch.tensor(lengths, dtype=torch.int32), torch.from_numpy(table))
        starts = pages.starts_B1.tolist()
        found = starts, pages.blocks[: starts[-1]].tolist(), pages.last_lens_B.tolist()
        assert found == expected(lengths, table, 16)
    assert addresses == [tensor.data_ptr() for tensor in (pages.starts_B1, pages.blocks, pages.last_lens_B)]
