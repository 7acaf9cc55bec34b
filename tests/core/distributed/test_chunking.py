"""Rows in chunks: none lost, none empty, all in whole tiles but the last."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.core.distributed.ranks import ROW_TILE, cut, cut_like, sensible_chunks, whole


@settings(deadline=None)
@given(num_rows=st.integers(1, 6 * ROW_TILE), num_chunks=st.integers(1, 8))
def test_chunks_are_whole_tiles_of_nearly_the_same_number_and_together_the_whole(
    num_rows: int, num_chunks: int
) -> None:
    x_TD = torch.arange(num_rows).view(-1, 1).clone()
    chunks = cut(x_TD, num_chunks)
    tiles = [-(-len(chunk) // ROW_TILE) for chunk in chunks]
    assert len(chunks) == min(num_chunks, sum(tiles)) and all(len(chunk) for chunk in chunks)
    assert all(len(chunk) % ROW_TILE == 0 for chunk in chunks[:-1]) and max(tiles) - min(tiles) <= 1
    assert torch.equal(whole(chunks), x_TD) and all(chunk._base is x_TD for chunk in chunks)
    assert [len(part) for part in cut_like(x_TD + 1, chunks)] == [len(chunk) for chunk in chunks]


def test_no_rows_are_one_chunk() -> None:
    assert [len(chunk) for chunk in cut(torch.empty(0, 4), 3)] == [0]


def test_a_single_chunk_is_not_copied() -> None:
    x_TD = torch.ones(3, 4)
    assert whole([x_TD]) is x_TD


LARGE = {1: 1, 4095: 1, 4096: 2, 8192: 2, 12287: 2, 12288: 3, 16384: 4, 65536: 4}


@pytest.mark.parametrize(("num_rows", "num_chunks"), LARGE.items())
def test_large_steps_are_cut_into_two_to_four_chunks(num_rows: int, num_chunks: int) -> None:
    assert sensible_chunks(num_rows) == num_chunks
