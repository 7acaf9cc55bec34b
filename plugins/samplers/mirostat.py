"""Mirostat 2.0: keep the surprise of the text near a target. Basu et al. 2021, arXiv:2007.14966, algorithm 2.

Legend: R rows of the table, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts
from hookline.core.errors import RequestError
from hookline.plugins.samplers import MirostatArguments

UNITS = 1 << 20
"""Units per bit: the bound is sent as a whole number."""
MAX_BITS = 64.0
"""Largest bound in bits, which no token's surprise reaches."""


@dataclass
class Bound:
    """The arguments of a request, and its bound."""

    bits: float
    tau: float
    eta: float


class Mirostat(LogitsProcessor):
    """Forbids tokens that are more surprising than a bound, which follows the surprise of the tokens drawn.

    The bound is kept on the host, where the tokens' log-probabilities arrive, so a preempted request goes on with it.
    """

    follows_tokens = True

    def __init__(self, spec: ProcessorSpec) -> None:
        self.bits_R = torch.zeros(spec.num_rows, device=spec.device)

    @staticmethod
    def num_draws(arguments: MirostatArguments, request: RequestFacts) -> int | None:
        """All tokens (None), or 0 tokens with tau 0 or if the request is greedy."""
        return 0 if arguments.tau == 0 or request.temperature == 0 else None

    @staticmethod
    def start(arguments: MirostatArguments, request: RequestFacts) -> Bound:
        """The bound of a request's first token: 2 tau bits.

        Raises: RequestError without log-probabilities.
        """
        if not request.has_logprobs:
            raise RequestError("mirostat follows the tokens' log-probabilities: set sampling.logprobs=0 or more")
        return Bound(min(2 * arguments.tau, MAX_BITS), arguments.tau, arguments.eta)

    @staticmethod
    def on_token(state: Bound, token_id: int, logprob: float | None) -> str | None:
        """Lower the bound by eta times the bits by which the token's surprise exceeds tau. Never ends the request."""
        assert logprob is not None
        bits = state.bits - state.eta * (-logprob / math.log(2) - state.tau)
        state.bits = min(max(bits, 0.0), MAX_BITS)
        return None

    @staticmethod
    def encode(arguments: MirostatArguments, request: RequestFacts) -> Sequence[int]:
        """The bound as one whole number, see UNITS."""
        return [round(request.state.bits * UNITS)]

    def load(self, row: int, values_X: Tensor) -> None:
        """Store the bound of the request in the row."""
        self.bits_R[row] = values_X[0] / UNITS if len(values_X) else 0.0

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """Forbid tokens whose surprise exceeds the row's bound, but never the most likely one."""
        is_used_N1 = (rows.columns["tau"] > 0).unsqueeze(1)
        bits_N1 = self.bits_R.index_select(0, rows.rows_N).unsqueeze(1)
        surprise_NV = logits_NV.log_softmax(1) / -math.log(2)
        least_N1 = surprise_NV.amin(1, keepdim=True)  # some token is always left
        is_too_much_NV = surprise_NV > torch.maximum(bits_N1, least_N1)
        return logits_NV.masked_fill(is_used_N1 & is_too_much_NV, -torch.inf)
