"""DRY: a penalty on tokens that would continue a repetition of the text's end.

Legend: N rows, V vocabulary, L tokens of a request, R rows of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts, TokenTexts
from hookline.core.errors import RequestError
from hookline_dry import DryArguments

MAX_LENGTH = 48
"""Longest repetition that is told from a longer one."""
MAX_BREAKERS = 64


class Dry(LogitsProcessor):
    """Keeps for each row which tokens break sequences; repetitions are looked for anew at each draw."""

    reads_tokens = True
    reads_texts = True

    def __init__(self, spec: ProcessorSpec) -> None:
        self.is_breaker_RV = torch.zeros(spec.num_rows, spec.vocab_size, dtype=torch.bool, device=spec.device)
        self.places_L = torch.arange(spec.max_model_len + 1, device=spec.device)

    @staticmethod
    def num_draws(arguments: DryArguments, request: RequestFacts) -> int | None:
        return 0 if arguments.multiplier == 0 else None

    @staticmethod
    def encode(arguments: DryArguments, request: RequestFacts) -> Sequence[int]:
        """The ids of the tokens that break sequences."""
        breakers = tuple(arguments.sequence_breakers)
        if len(breakers) > MAX_BREAKERS or not all(breakers):
            raise RequestError(f"dry.sequence_breakers must be at most {MAX_BREAKERS} texts, none of them empty")
        if not breakers:
            return ()
        if request.tokenizer is None:
            raise RequestError("dry.sequence_breakers are texts, and the checkpoint has no tokenizer; pass []")
        return breaking_tokens(request.tokenizer, breakers)

    def load(self, row: int, values_X: Tensor) -> None:
        self.is_breaker_RV[row].fill_(False)
        self.is_breaker_RV[row, values_X] = True

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        lengths_NL, tokens_NL = self.lengths(rows)
        multiplier_N1, base_N1, allowed_N1 = (
            rows.columns[name].unsqueeze(1) for name in ("multiplier", "base", "allowed_length")
        )
        excess_NL = lengths_NL - allowed_N1
        penalty_NL = torch.where(excess_NL >= 0, multiplier_N1 * base_N1 ** excess_NL.clamp(min=0), 0.0)
        # Of several repetitions that a token would continue, the longest counts.
        penalty_NV = torch.zeros_like(logits_NV).scatter_reduce_(1, tokens_NL, penalty_NL, "amax")
        return logits_NV - penalty_NV

    def lengths(self, rows: LogitsRows) -> tuple[Tensor, Tensor]:
        """For each token the number of tokens before it that the request's last ones repeat; and the tokens: (N, L)."""
        assert rows.tokens_RL is not None
        tokens_NL = rows.tokens_RL[:, : rows.max_num_tokens].index_select(0, rows.rows_N).long()
        position_N1 = rows.sampling.position_N.unsqueeze(1)
        places_L = self.places_L[: tokens_NL.shape[1]]
        is_breaker_NL = self.is_breaker_RV.index_select(0, rows.rows_N).gather(1, tokens_NL)
        repeats_NL = (places_L < position_N1).expand_as(tokens_NL)
        lengths_NL = torch.zeros_like(tokens_NL)
        for back in range(1, min(MAX_LENGTH, tokens_NL.shape[1] - 1) + 1):
            end_N1 = (position_N1 - back).clamp(min=0)
            is_open_N1 = ~is_breaker_NL.gather(1, end_N1) & (position_N1 >= back)
            is_same_NL = tokens_NL.roll(back, 1) == tokens_NL.gather(1, end_N1)
            repeats_NL = repeats_NL & is_same_NL & is_open_N1 & (places_L >= back)
            lengths_NL += repeats_NL
        return lengths_NL, tokens_NL


@lru_cache(maxsize=32)
def breaking_tokens(tokenizer: TokenTexts, breakers: tuple[str, ...]) -> tuple[int, ...]:
    """The ids of all tokens with one of these texts in theirs."""
    return tuple(id_ for id_, text in enumerate(tokenizer.texts) if any(one in text for one in breakers))
