"""top_k, then top_p, then min_p: which tokens are left to draw from. Legend: N rows, V vocabulary.

All three come down to one threshold a row, so tokens with equal logits are kept or dropped together: with top_k, ties
with the k-th, as transformers does; with top_p, ties with the least likely token that is needed, where transformers
keeps as many of them as its sort happens to put last.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec, RequestFacts
from hookline.plugins.samplers import TruncationArguments

LOWEST_TEMPERATURE = 1e-30
"""Lowest temperature to divide by, as in gumbel.py."""


class Truncation(LogitsProcessor):
    """Sets the logits below a row's threshold to -inf."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self.fused = _fused() if spec.device.type == "cuda" else None

    @staticmethod
    def num_draws(arguments: TruncationArguments, request: RequestFacts) -> int | None:
        """None for a greedy request: the largest logit always stays."""
        return 0 if request.temperature == 0 or arguments == TruncationArguments() else None

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        if self.fused is not None:
            asked = (rows.columns[name] for name in ("top_k", "top_p", "min_p"))
            return self.fused(logits_NV, rows.sampling.temperature_N, *asked)
        scaled_NV = logits_NV / safe_temperature(rows.sampling.temperature_N).unsqueeze(1)
        threshold_N = thresholds(scaled_NV, rows.columns["top_k"], rows.columns["top_p"], rows.columns["min_p"])
        return logits_NV.masked_fill(scaled_NV < threshold_N.unsqueeze(1), -torch.inf)


def _fused() -> Callable[..., Tensor] | None:
    """The version without a sort; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from hookline.plugins.samplers.truncation_triton import truncate

    return truncate


def safe_temperature(temperature_N: Tensor) -> Tensor:
    """Temperatures to divide by. Any will do for greedy rows, as their largest logit stays in any case."""
    return temperature_N.masked_fill(temperature_N == 0, 1.0).clamp(min=LOWEST_TEMPERATURE)


def thresholds(scaled_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """The smallest logit (N,) that each row keeps of logits over temperature; -inf where it keeps all.

    A token stays under top_p if those more likely than it do not reach top_p by themselves.
    """
    num_tokens = scaled_NV.shape[1]
    last_N1 = torch.where((top_k_N <= 0) | (top_k_N > num_tokens), num_tokens, top_k_N).unsqueeze(1) - 1
    sorted_NV = _largest(scaled_NV, last_N1)
    kth_N1 = sorted_NV.gather(1, last_N1)
    sorted_NV = sorted_NV.masked_fill_(sorted_NV < kth_N1, -torch.inf)
    # In float64, so that the number of columns, which depends on the other rows, does not change the result.
    probs_NV = sorted_NV.double().softmax(1)
    before_NV = probs_NV.cumsum(1) - probs_NV
    is_kept_NV = (before_NV < top_p_N.unsqueeze(1)) | (top_p_N >= 1).unsqueeze(1)
    is_kept_NV &= (probs_NV >= min_p_N.unsqueeze(1) * probs_NV[:, :1]) & (sorted_NV > -torch.inf)
    is_kept_NV[:, 0] = True
    return sorted_NV.masked_fill_(~is_kept_NV, torch.inf).amin(1)


def _largest(scaled_NV: Tensor, last_N1: Tensor) -> Tensor:
    """The largest logits of each row in descending order: all, or on a CPU as many as last_N1 and its ties call for."""
    if scaled_NV.is_cuda:
        return scaled_NV.sort(dim=1, descending=True).values
    count = int(last_N1.max()) + 1
    top_NV = scaled_NV.topk(count, dim=1).values
    num_tied = int((scaled_NV >= top_NV.gather(1, last_N1)).sum(1).max())
    return top_NV if num_tied <= count else scaled_NV.topk(num_tied, dim=1).values
