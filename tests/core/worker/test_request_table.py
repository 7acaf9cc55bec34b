"""The request table on its device: what of a step travels there, and what is kept of a draw, in how few operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.core.step.message import SECTIONS, Step
from hookline.core.worker import request_table
from hookline.core.worker.request_table import LayerStates, RequestTable

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
    received(table, Step(decode_rows=ROWS[::-1], late_draws=np.array([0, 2])))
    received(table, Step(decode_rows=ROWS[::-1], late_draws=np.array([0, 1])))
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
    for more in (
        blocks,
        chunk,
        {"forbidden_draws": one, "forbidden_tokens": one},
        {"shared_rows": ROWS, "shared_len": 16},
    ):
        received(table, Step(decode_rows=ROWS, **more))
    assert count == [5] and table.block_table_RM[1, 1] == 1 and table.shared_len_R[2] == 16
    received(table, Step(decode_rows=ROWS))
    assert count == [5]


class Operations(TorchDispatchMode):
    """Counts what would be launched: all operations but allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [] if "empty" in str(func) else [str(func)]
        return func(*args, **(kwargs or {}))


def test_what_decodes_compute_takes_three_operations():
    table = RequestTable(4, 8, 16, 0, torch.device("cpu"))
    table.length_R[:] = torch.arange(5, dtype=torch.int32) + 3
    rows_N = torch.tensor([2, 0])
    with Operations() as operations:
        tokens_N, positions_N, context_N = table.newest(rows_N)
    assert (positions_N.dtype, context_N.dtype) == (torch.int64, torch.int32)
    assert (positions_N.tolist(), context_N.tolist(), tokens_N.tolist()) == ([4, 2], [5, 3], [0, 0])
    assert len(operations.names) == 3, operations.names


def test_memory_for_copies_of_states_is_not_written_before_a_copy_is_and_copies_are_whole():
    form = ((3, 2), torch.float32)
    states = LayerStates({0: {"a": form}, 2: {"a": form, "b": ((5,), torch.bfloat16)}}, 4, torch.device("cpu"))
    with Operations() as operations:
        states.make_slots(7)
    assert operations.names == [], "a CPU would give each page of the memory now"
    for tensor in states.tensors[:2]:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in states.tensors[:2]]
    states.save([3, 1], [6, 0])
    states.clear(torch.tensor([1, 3]))
    states.restore([1, 3], [0, 6])
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(states.tensors[:2], before, strict=True))
