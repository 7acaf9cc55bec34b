"""The recurrence over sequences, beside a loop that goes token by token; without lengths on the host."""

from __future__ import annotations

from itertools import pairwise

import torch
from hookline_mamba2.recurrence import BLOCK, recurrence

from hookline.core.contracts import StateRows

LENGTHS = [1, 1, 3, 0, BLOCK + 9, 2]
"""Tokens of each request: two decodes, then chunks, one of them empty and one of more than a block."""
NUM_DECODES = 2


def rows_of(lengths: list[int]) -> StateRows:
    """In a table of more rows than requests, and not in order."""
    starts_B1 = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows_B = torch.arange(len(lengths)).flip(0) + 1
    return StateRows(
        {}, rows_B, starts_B1, torch.zeros(len(lengths), dtype=torch.bool), NUM_DECODES, max(lengths), None
    )


def test_a_recurrence_goes_on_from_the_state_of_its_own_sequence() -> None:
    torch.manual_seed(0)
    states, num_tokens = rows_of(LENGTHS), sum(LENGTHS)
    x_THP, b_THS, c_THS = torch.randn(num_tokens, 2, 3), torch.randn(num_tokens, 2, 4), torch.randn(num_tokens, 2, 4)
    decay_TH = -torch.rand(num_tokens, 2)
    state_RHPS = torch.randn(8, 2, 3, 4)
    before = state_RHPS.clone()
    y_THP = recurrence(x_THP, decay_TH, b_THS, c_THS, state_RHPS, states)
    for row, (start, stop) in zip(states.rows_B.tolist(), pairwise(states.query_starts_B1.tolist()), strict=True):
        state_HPS = before[row]
        for token in range(start, stop):
            added_HPS = x_THP[token].unsqueeze(-1) * b_THS[token].unsqueeze(-2)
            state_HPS = decay_TH[token].exp()[:, None, None] * state_HPS + added_HPS
            expected_HP = (state_HPS * c_THS[token].unsqueeze(-2)).sum(-1)
            torch.testing.assert_close(y_THP[token], expected_HP, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state_RHPS[row], state_HPS, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state_RHPS[[0, 7]], before[[0, 7]], rtol=0, atol=0)
