"""What of a step travels to the device, and what is there already."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hookline.core.step.message import SECTIONS, Step
from hookline.core.worker import request_table
from hookline.core.worker.request_table import RequestTable

ROWS = np.array([2, 0, 3])


@pytest.fixture
def sent(monkeypatch):
    """The table, and how many messages it sent to the device."""
    count, on_device = [0], request_table.on_device
    table = RequestTable(4, 8, 16, 0, torch.device("cpu"))

    def counted(array, device):
        count[0] += 1
        return on_device(array, device)

    monkeypatch.setattr(request_table, "on_device", counted)
    return table, count


def received(table, step):
    """The sections as the device has them are those of the step."""
    views = table.receive(step).views
    for name in SECTIONS:
        assert views[name].tolist() == getattr(step, name).tolist(), name


def test_decodes_of_the_same_rows_are_sent_once(sent):
    table, count = sent
    for length in (10, 11, 12):
        received(table, Step(decode_rows=ROWS.copy(), max_context_len=length))
    assert count == [1]
    received(table, Step(decode_rows=ROWS[:2]))
    received(table, Step(decode_rows=ROWS[::-1]))
    received(table, Step(decode_rows=ROWS[::-1], masked_draws=np.array([0, 2])))
    received(table, Step(decode_rows=ROWS[::-1], masked_draws=np.array([0, 1])))
    assert count == [5]


def test_a_message_that_is_written_over_does_not_change_what_was_sent(sent):
    table, count = sent
    rows = ROWS.copy()
    received(table, Step(decode_rows=rows))
    rows[:] = [1, 2, 3]
    received(table, Step(decode_rows=rows))
    assert count == [2]


def test_whatever_comes_beside_decodes_is_sent(sent):
    table, count = sent
    received(table, Step(decode_rows=ROWS))
    one = np.array([1])
    blocks = {"table_rows": one, "table_columns": one, "table_blocks": one}
    chunk = {"chunk_rows": one, "chunk_starts": one, "chunk_lens": one, "token_ids_T": one, "sampled_chunks": one}
    for more in (blocks, chunk, {"mask_rows": one, "mask_tokens": one}, {"shared_rows": ROWS, "shared_len": 16}):
        received(table, Step(decode_rows=ROWS, **more))
    assert count == [5] and table.block_table_RM[1, 1] == 1 and table.shared_len_R[2] == 16
    received(table, Step(decode_rows=ROWS))
    assert count == [5]
