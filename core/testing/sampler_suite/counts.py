"""Tests of counts of draws against probabilities: Pearson's chi-square, without SciPy, and pairs of equal draws.

Legend: V values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0
"""Rarer values are counted together: the test's distribution is an approximation for many counts."""


def chi_square_p_value(counts_V: Tensor, probabilities_V: Tensor) -> float:
    """How probable it is that counts at least this far off come from these probabilities; 0 for an impossible value."""
    counts_V, probabilities_V = counts_V.double().cpu(), probabilities_V.double().cpu()
    if bool((counts_V[probabilities_V == 0] > 0).any()):
        return 0.0
    counts_V, expected_V = _pool_rare(counts_V, probabilities_V * counts_V.sum())
    if len(counts_V) < 2:
        return 1.0
    statistic = ((counts_V - expected_V).square() / expected_V).sum()
    half_freedom = torch.tensor((len(counts_V) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def num_repeats(counts_V: Tensor) -> int:
    """How many pairs of draws have the same value."""
    counts_V = counts_V.long()
    return int((counts_V * (counts_V - 1)).sum()) // 2


def most_repeats(probabilities_V: Tensor, num_draws: int, num_deviations: float = 8.0) -> float:
    """How many pairs of equal draws are still likely: the mean of independent draws plus num_deviations deviations.

    More pairs mean that too few values are drawn. This also works where each value is too rare for its own count.
    """
    probabilities_V = probabilities_V.double().cpu()
    same, all_same = (float(probabilities_V.pow(power).sum()) for power in (2, 3))  # two draws, and three, are equal
    num_pairs = num_draws * (num_draws - 1) / 2
    variance = num_pairs * (same - same**2 + 2 * (num_draws - 2) * (all_same - same**2))
    return num_pairs * same + num_deviations * math.sqrt(max(variance, 0.0))


def _pool_rare(counts_V: Tensor, expected_V: Tensor) -> tuple[Tensor, Tensor]:
    """Count the rare values as one, and that one with the rarest other if it is rare still."""
    order_V = expected_V.argsort()
    counts_V, expected_V = counts_V[order_V], expected_V[order_V]
    num_rare = int((expected_V < LEAST_EXPECTED).sum())
    while 0 < num_rare < len(expected_V) and float(expected_V[:num_rare].sum()) < LEAST_EXPECTED:
        num_rare += 1
    pooled = [torch.cat((x_V[:num_rare].sum()[None], x_V[num_rare:])) for x_V in (counts_V, expected_V)]
    return (pooled[0], pooled[1]) if num_rare else (counts_V, expected_V)
