"""Which of a step's tokens a worker asks a model for, and what it takes for the answer."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from core.contracts import Attend
from core.rows import wanted_rows
from core.testing.plain_kernels import PlainKernels
from core.worker import Worker
from tests.hf_models import one_prompt


class EveryRow:
    """A token's hidden state is its id; notes how many were wanted and given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, int]] = []

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        rows_N = wanted_rows(attend)
        hidden_ND = self.some(token_ids_T.float().unsqueeze(1), rows_N)
        self.calls.append((None if rows_N is None else len(rows_N), len(hidden_ND)))
        return hidden_ND

    def some(self, hidden_TD: Tensor, rows_N: Tensor | None) -> Tensor:
        return hidden_TD


class WantedRows(EveryRow):
    def some(self, hidden_TD: Tensor, rows_N: Tensor | None) -> Tensor:
        return hidden_TD if rows_N is None else hidden_TD[rows_N]


@pytest.mark.parametrize("model_class", [EveryRow, WantedRows])
@pytest.mark.parametrize(
    ("tokens", "num_asked"),
    [(None, None), ([3], 1), ([], 1), ([4, 0, 0], 3), ([4, 3, 2, 1, 0], None), ([0, 1, 2, 3, 4, 4, 4], None)],
)
def test_the_hidden_states_are_those_of_the_tokens_named_whatever_the_model_computes(model_class, tokens, num_asked):
    model, worker = model_class(), Worker.__new__(Worker)
    worker.model, worker.kernels, worker.kv_layers = model, PlainKernels(None, cast(Any, None)), []
    batch = one_prompt([50, 51, 52, 53, 54])
    hidden_ND = worker.forward(batch, None if tokens is None else torch.tensor(tokens, dtype=torch.int64))
    assert hidden_ND.squeeze(1).tolist() == [50 + token for token in (range(5) if tokens is None else tokens)]
    given = num_asked if model_class is WantedRows and num_asked is not None else 5
    assert model.calls == [(num_asked, given)]
