"""A client's measurements of a server, in the form of a recording of an engine.

A step of it is a chunk of a stream. Values that only an engine knows (blocks, computed prompt tokens, preemptions,
device times) are 0 or NaN in the columns and null in the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hookline.core.bench.latencies import spread
from hookline.core.bench.metrics import TIMES as STEP_TIMES
from hookline.core.bench.metrics import summarise
from hookline.core.bench.recorder import COUNTS, STATES, TIMES, Column, Recording, RequestRecord
from hookline.core.bench.remote.answer import Answer
from hookline.core.bench.slo import Slo

UNSEEN = ("steps", "prefill_tokens", "preemptions", "busy_s", "pool_usage", "step_times", *STEP_TIMES)
"""Figures that a client cannot measure."""


def recording_of(records: Sequence[RequestRecord], answers: Sequence[Answer | None]) -> Recording:
    """The record of a load whose requests have all ended."""
    served = [(place, one) for place, one in enumerate(answers) if one is not None and one.error is None]
    times_s = np.array([time_s for _, answer in served for time_s in answer.times_s], dtype=np.float64)
    counts = np.array([count for _, answer in served for count in answer.counts], dtype=np.int64)
    places = np.array([place for place, answer in served for _ in answer.times_s], dtype=np.int64)
    order = np.argsort(times_s, kind="stable")
    times_s, counts, places = times_s[order], counts[order], places[order]
    steps: dict[str, Column] = {name: np.zeros(len(times_s), dtype=np.int64) for name in (*COUNTS, *STATES)}
    steps |= {name: np.full(len(times_s), np.nan) for name in (*TIMES, "busy_s")}
    steps |= {"start_s": times_s, "end_s": times_s, "num_drawn": counts}
    steps["running"], steps["waiting"] = _in_flight(records, answers, times_s)
    none = np.empty(0, dtype=np.int64)
    ends_s = [answer.ended_s for answer in answers if answer is not None and answer.ended_s is not None]
    seconds = max([0.0, *ends_s, *times_s[-1:].tolist()])
    return Recording(seconds, 0, 0, records, steps, np.repeat(places, counts), none, none)


def _in_flight(
    records: Sequence[RequestRecord], answers: Sequence[Answer | None], times_s: Column
) -> tuple[Column, Column]:
    """Requests that stream, and that are due and wait for their first token, at each time."""
    ends = {place: one.ended_s for place, one in enumerate(answers) if one is not None and one.ended_s is not None}
    sent = [(record, ends[place]) for place, record in enumerate(records) if place in ends]
    due = _number_until([record.arrival_s for record, _ in sent], times_s)
    first = _number_until(
        [end if record.first_token_s is None else record.first_token_s for record, end in sent], times_s
    )
    ended = _number_until([end for _, end in sent], times_s)
    return first - ended, np.maximum(due - first, 0)


def _number_until(moments: Sequence[float], times_s: Column) -> Column:
    found: Column = np.searchsorted(np.sort(np.asarray(moments, dtype=np.float64)), times_s, side="right")
    return found


def figures(recording: Recording, slo: Slo) -> dict[str, Any]:
    """`metrics.summarise`, with None for figures that a client cannot measure."""
    return {**summarise(recording, slo), **dict.fromkeys(UNSEEN)}


def failures(recording: Recording) -> dict[str, tuple[int, str]]:
    """Kinds of failure, the most frequent first: how many requests failed in this way, and the first one's message."""
    errors = [request.error for request in recording.requests if request.error is not None]
    first = {error.partition(":")[0]: error for error in reversed(errors)}
    counts = Counter(error.partition(":")[0] for error in errors)
    return {kind: (count, first[kind]) for kind, count in counts.most_common()}


def lateness(recording: Recording) -> dict[str, float] | None:
    """Seconds from when a request was due to when the client sent it."""
    return spread([one.start_s - one.arrival_s for one in recording.requests if one.start_s is not None])
