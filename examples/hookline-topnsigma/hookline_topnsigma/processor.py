"""Top-n-sigma truncation: Tang et al. 2024, arXiv:2411.07641. Legend: N rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts
from hookline_topnsigma import TopNSigmaArguments


class TopNSigma(LogitsProcessor):
    """Keeps what lies within n standard deviations of the largest logit.

    Logits of a sensible answer are few and far above a crowd that is distributed normally, whose width is a measure of
    the noise. Dividing all logits by a temperature changes nothing of what is kept.
    """

    def __init__(self, spec: ProcessorSpec) -> None:
        self.spec = spec

    @staticmethod
    def num_draws(arguments: TopNSigmaArguments, request: RequestFacts) -> int | None:
        """None for a greedy request: the largest logit always stays."""
        return 0 if request.temperature == 0 else None

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        n_N1 = rows.columns["n"].unsqueeze(1)
        floor_N1 = logits_NV.amax(1, keepdim=True) - n_N1 * deviation(logits_NV)
        return logits_NV.masked_fill((logits_NV < floor_N1) & (n_N1 > 0), -torch.inf)


def deviation(logits_NV: Tensor) -> Tensor:
    """Standard deviation (N, 1) of each row's logits, without tokens that others have forbidden."""
    is_open_NV = logits_NV > -torch.inf
    count_N1 = is_open_NV.sum(1, keepdim=True).clamp(min=1)
    mean_N1 = logits_NV.masked_fill(~is_open_NV, 0.0).sum(1, keepdim=True) / count_N1
    off_NV = (logits_NV - mean_N1).masked_fill(~is_open_NV, 0.0)
    return (off_NV.square().sum(1, keepdim=True) / count_N1).sqrt()
