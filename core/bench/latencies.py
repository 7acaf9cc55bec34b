"""Latencies of requests and tokens, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookline.core.bench.recorder import Column, RequestRecord
from hookline.core.bench.slo import Slo

STATISTICS = ("mean", "p50", "p90", "p99", "max")


def request_latencies(request: RequestRecord) -> dict[str, float]:
    """A served request's latencies in seconds, by the names of Slo's fields; tpot_s of a single token is 0."""
    assert request.first_token_s is not None and request.finish_s is not None and request.start_s is not None
    after_first = max(request.output_tokens - 1, 1)
    return {
        "ttft_s": request.first_token_s - request.arrival_s,
        "tpot_s": (request.finish_s - request.first_token_s) / after_first,
        "e2e_s": request.finish_s - request.arrival_s,
        "queue_s": request.start_s - request.arrival_s,
    }


def gaps_s(times_s: Column, starts: Column) -> Column:
    """Seconds between a request's tokens, over all requests."""
    gaps = np.diff(times_s)
    inside = np.ones(len(gaps), dtype=bool)
    firsts = starts[1:-1]
    inside[firsts[(firsts > 0) & (firsts < len(times_s))] - 1] = False
    return gaps[inside]


def spread(values: Sequence[float] | Column) -> dict[str, float] | None:
    """Mean, percentiles (linear between samples) and maximum of the values that are not NaN; None without any."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if len(array) == 0:
        return None
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    figures = (array.mean(), p50, p90, p99, array.max())
    return {name: round(float(value), 6) for name, value in zip(STATISTICS, figures, strict=True)}


def slo_of(request: RequestRecord, default: Slo) -> Slo:
    """The bounds that a request must keep: its own, or the default if it has none."""
    return Slo(**request.slo) if request.slo else default
