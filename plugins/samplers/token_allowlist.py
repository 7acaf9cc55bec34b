"""allowed_token_ids: the only tokens that may be drawn. Legend: R rows of the table, N rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts
from hookline.core.errors import RequestError
from hookline.plugins.samplers import TokenAllowlistArguments


class TokenAllowlist(LogitsProcessor):
    """Keeps the mask of forbidden tokens of each row."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self.is_forbidden_RV = torch.zeros(spec.num_rows, spec.vocab_size, dtype=torch.bool, device=spec.device)

    @staticmethod
    def encode(arguments: TokenAllowlistArguments, request: RequestFacts) -> Sequence[int]:
        """The allowed token ids, checked."""
        allowed = arguments.allowed_token_ids or ()
        if max(allowed) >= request.vocab_size:
            raise RequestError(
                f"sampling.allowed_token_ids: token id {max(allowed)} is outside the vocabulary "
                f"(0 to {request.vocab_size - 1})"
            )
        return allowed

    def load(self, row: int, values_X: Tensor) -> None:
        """Store the mask of the request in the row."""
        self.is_forbidden_RV[row] = len(values_X) > 0
        self.is_forbidden_RV[row, values_X] = False

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        return logits_NV.masked_fill_(self.is_forbidden_RV.index_select(0, rows.rows_N), -torch.inf)
