"""The request table on its device: what it keeps of a draw, and in how many operations."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.core.contracts import NO_TOKEN, SamplingBatch
from hookline.core.worker.request_table import RequestTable, SampleRows


class Operations(TorchDispatchMode):
    """Counts what would be launched: all operations but allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [] if "empty" in str(func) else [str(func)]
        return func(*args, **(kwargs or {}))


def test_token_0_stands_for_no_token_and_costs_no_operation_more():
    table = RequestTable(4, 8, 16, 0, torch.device("cpu"))
    rows_N, position_N = torch.tensor([2, 0]), torch.tensor([7, 9])
    sampled = SampleRows(rows_N, None, SamplingBatch(torch.zeros(2), torch.zeros(2).long(), position_N))
    tokens_N = torch.tensor([NO_TOKEN, 5])
    with Operations() as operations:
        table.write_back(sampled, tokens_N)
    assert table.last_token_R[rows_N].tolist() == [0, 5]
    assert table.length_R[rows_N].tolist() == [8, 10] and table.length_R.dtype == torch.int32
    assert len(operations.names) == 4, operations.names  # as many as without NO_TOKEN: two stores, and one for each
