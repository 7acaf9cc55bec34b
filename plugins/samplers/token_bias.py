"""logit_bias: numbers added to some logits. Legend: R rows of the table, N rows, V vocabulary, K tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts
from hookline.core.errors import RequestError
from hookline.plugins.samplers import TokenBiasArguments

MAX_TOKENS = 512
"""Most biased tokens of a request."""


class TokenBias(LogitsProcessor):
    """Keeps the tokens and biases of each row; unused places add 0 to token 0."""

    def __init__(self, spec: ProcessorSpec) -> None:
        num_places = min(MAX_TOKENS, spec.vocab_size)
        self.tokens_RK = torch.zeros(spec.num_rows, num_places, dtype=torch.int64, device=spec.device)
        self.biases_RK = torch.zeros(spec.num_rows, num_places, dtype=torch.float32, device=spec.device)

    @staticmethod
    def encode(arguments: TokenBiasArguments, request: RequestFacts) -> Sequence[int]:
        """The tokens and their biases, checked."""
        tokens, biases = list(arguments.logit_bias), list(arguments.logit_bias.values())
        if len(tokens) > MAX_TOKENS:
            raise RequestError(f"sampling.logit_bias has {len(tokens)} tokens; at most {MAX_TOKENS} may have a bias")
        if max(tokens) >= request.vocab_size:
            raise RequestError(
                f"sampling.logit_bias: token id {max(tokens)} is outside the vocabulary (0 to {request.vocab_size - 1})"
            )
        return [*tokens, *np.array(biases, np.float32).view(np.int32).tolist()]

    def load(self, row: int, values_X: Tensor) -> None:
        """Store the tokens and biases of the request in the row."""
        count = len(values_X) // 2
        self.tokens_RK[row].zero_()
        self.biases_RK[row].zero_()
        self.tokens_RK[row, :count] = values_X[:count]
        self.biases_RK[row, :count] = values_X[count:].to(torch.int32).view(torch.float32)

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        tokens_NK, biases_NK = (table.index_select(0, rows.rows_N) for table in (self.tokens_RK, self.biases_RK))
        return logits_NV.scatter_add_(1, tokens_NK, biases_NK)
