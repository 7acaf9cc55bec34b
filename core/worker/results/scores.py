"""Log-probabilities on a rank: of drawn tokens, and of the tokens of prompts.

Legend: N draws, V vocabulary, K alternatives, X = 2 + 2K integers of a scored token: its id, the bits of its float32
log-probability, the ids of the K most likely tokens and the bits of their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hookline.core.requests.scores import NUM_LOGPROBS
from hookline.core.worker.request_table import on_device
from hookline.core.worker.results.prompt_readers import Group, RankReader

ROWS_AT_ONCE = 256
"""Most prompt tokens whose logits are in memory at a time."""


class PromptScorer(RankReader):
    """Scores the tokens of prompts that it is given as values, each by the hidden state of the token before.

    logits_of: (P, D) -> (P, V). score: (logits, tokens, K) -> (P, X).
    """

    reads_last = False

    def __init__(
        self, logits_of: Callable[[Tensor], Tensor], score: Callable[[Tensor, Tensor, int], Tensor], num_logprobs: int
    ) -> None:
        self._logits_of, self._score, self._num_logprobs = logits_of, score, num_logprobs
        self.num_columns = 2 + 2 * num_logprobs

    def run(self, group: Group, hidden_TD: Tensor) -> Tensor:
        """See RankReader: the integers of each token, as the bits of float32."""
        targets_P = on_device(group.values, hidden_TD.device)
        hidden, tokens = (torch.split(rows, ROWS_AT_ONCE) for rows in (hidden_TD, targets_P))
        scored_PX = torch.cat(
            [
                self._score(self._logits_of(some_D), some, self._num_logprobs)
                for some_D, some in zip(hidden, tokens, strict=True)
            ]
        )
        return scored_PX.to(torch.int32).view(torch.float32)


def prompt_scorers(
    logits_of: Callable[[Tensor], Tensor], score: Callable[[Tensor, Tensor, int], Tensor], vocab_size: int
) -> dict[int, RankReader]:
    """The readers that score prompts, by index: one for each number of alternatives."""
    return {index: PromptScorer(logits_of, score, min(count, vocab_size)) for index, count in enumerate(NUM_LOGPROBS)}


def scored(raw_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
    """Tokens with their log-probabilities, and the most likely tokens with theirs, (N, X) int64."""
    return _scored(raw_NV, tokens_N, raw_NV.topk(num_logprobs, dim=1) if num_logprobs else None)


def scored_alone(raw_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
    """`scored` of each row by itself: how torch adds up a row depends on how many there are.

    Equally likely tokens are in the order of their ids; topk orders them differently for other num_logprobs.
    """
    rows = []
    for raw_1V, token_1 in zip(torch.split(raw_NV, 1), torch.split(tokens_N, 1), strict=True):
        top = None
        if num_logprobs:
            values_1V, ids_1V = raw_1V.sort(dim=1, descending=True, stable=True)
            top = values_1V[:, :num_logprobs], ids_1V[:, :num_logprobs]
        rows.append(_scored(raw_1V, token_1, top))
    return torch.cat(rows)


def _scored(raw_NV: Tensor, tokens_N: Tensor, top: tuple[Tensor, Tensor] | None) -> Tensor:
    total_N1 = raw_NV.float().logsumexp(1, keepdim=True)
    drawn_N1 = tokens_N.unsqueeze(1)
    columns = [drawn_N1, _bits(raw_NV.gather(1, drawn_N1.clamp(min=0)) - total_N1)]  # NO_TOKEN may be among them
    if top is not None:
        top_NK, ids_NK = top
        columns += [ids_NK, _bits(top_NK - total_N1)]
    return torch.cat(columns, dim=1)


def _bits(values: Tensor) -> Tensor:
    """float32 bit patterns in int64."""
    return values.contiguous().view(torch.int32).long()
