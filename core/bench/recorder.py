"""Records a load step by step and request by request, as plain arrays.

`StepRecorder` wraps an engine's executor and records each step; it changes nothing. All times are
seconds since the load's start, on the clock it is given. docs/benchmarks.md describes the columns.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import numpy as np

from hookline.core.bench.step_counts import StepCounter, StepCounts, has_drafts
from hookline.core.contracts import StepStats
from hookline.core.engine.engine import Engine
from hookline.core.errors import HooklineError
from hookline.core.step.executor import Executor, StepResult
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock as StepClock
from hookline.core.util.arrays import WordArray, ints

Column = np.ndarray[Any, Any]
COUNTS = StepCounts._fields
"""Columns of whole numbers that a step's message alone determines; see StepCounts."""
TIMES = tuple(one.name for one in fields(StepStats) if one.name.endswith("_s"))
"""Durations that the engine reports of each step; columns of the same names, NaN where it has none."""
STATES = ("running", "waiting", "free_blocks", "cached_tokens", "preemptions")
"""Columns that the engine reports when the step is committed."""


@dataclass
class RequestRecord:
    """A request of a load, in the load's order; times as in Recording, None for events that never happened."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None
    follows: int | None = None
    priority: int = 0
    tags: dict[str, str] = field(default_factory=dict)
    deadline_s: float | None = None
    cache_salt: str | None = None
    slo: dict[str, float] | None = None
    """The request's own bounds by the names of Slo's fields; None: the benchmark's bounds."""
    start_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None

    def arrive(self, arrival_s: float, prompt_tokens: int) -> None:
        """Note when it arrived, with how many prompt tokens."""
        self.arrival_s, self.prompt_tokens = arrival_s, prompt_tokens

    def start(self, start_s: float) -> None:
        """Note when it was first computed, or sent; later times do not count."""
        if self.start_s is None:
            self.start_s = start_s

    def finish(self, reason: str | None, output_tokens: int, cached_tokens: int, preemptions: int = 0) -> None:
        """Note why the request finished, and the tokens and preemptions that it took."""
        self.finish_reason, self.output_tokens = reason, output_tokens
        self.cached_tokens, self.preemptions = cached_tokens, preemptions

    def note_times(self, first_token_s: float, finish_s: float) -> None:
        """Note when its first and its last token came."""
        self.first_token_s, self.finish_s = first_token_s, finish_s

    def fail(self, error: str) -> None:
        """Note why it was not served."""
        self.error, self.finish_reason = error, "error"


@dataclass(frozen=True)
class Recording:
    """Everything recorded under one load.

    steps: equally long columns, one entry per step. drawn: places in `requests` of the requests whose token a step
    drew, num_drawn of them per step, once more for each draft that was kept; chunk_request and chunk_tokens: the prompt
    chunks, prefill_chunks per step.
    """

    seconds: float
    num_blocks: int
    block_size: int
    requests: Sequence[RequestRecord]
    steps: Mapping[str, Column]
    drawn: Column
    chunk_request: Column
    chunk_tokens: Column


@dataclass(frozen=True)
class _Noted:
    """A launched step; ids are the engine's."""

    start_s: float
    counts: StepCounts
    drawn: Column
    chunk_ids: Column
    chunk_tokens: Column


@dataclass
class StepRecorder:
    """An Executor around an engine's own, for as long as a load runs: `with StepRecorder(engine, now) as recorder`."""

    engine: Engine
    now: Callable[[], float]
    rows: list[tuple[float, ...]] = field(default_factory=list)
    """start_s, end_s, then COUNTS, STATES and TIMES, step by step."""
    drawn: list[Column] = field(default_factory=list)
    chunk_ids: list[Column] = field(default_factory=list)
    chunk_tokens: list[Column] = field(default_factory=list)

    def __enter__(self) -> StepRecorder:
        max_num_seqs = self.engine.limits.plan.max_num_seqs
        self._owner = np.full(max_num_seqs, -1, dtype=np.int64)
        self._counter = StepCounter(max_num_seqs)
        self._launched: deque[_Noted] = deque()
        self._collected: _Noted | None = None
        self._stats = self.engine.last_stats
        self._executor: Executor = self.engine.executor
        self.engine.state.use_executor(self)
        return self

    def __exit__(self, *details: object) -> None:
        self.engine.state.use_executor(self._executor)

    @property
    def progress(self) -> int:
        """Pass it on."""
        return self._executor.progress

    @property
    def watches_steps(self) -> bool:
        """Pass it on."""
        return self._executor.watches_steps

    @property
    def is_here(self) -> bool:
        """Pass it on."""
        return self._executor.is_here

    @property
    def late_work(self) -> Mapping[str, int]:
        """Pass it on."""
        return self._executor.late_work

    def launch(self, step: Step) -> Any:
        """Launch a step, and record its counts and its requests."""
        started = self.now()
        handle = self._executor.launch(step)
        self._launched.append(self._note(step, started))
        return handle

    def late_rows(self, num_rows: int) -> WordArray:
        """Pass it on."""
        return self._executor.late_rows(num_rows)

    def release(self, handle: Any, num_rows: int) -> None:
        """Pass it on."""
        self._executor.release(handle, num_rows)

    def collect(self, handle: Any) -> StepResult:
        """Pass the result on."""
        result = self._executor.collect(handle)
        self._collected = self._launched.popleft()
        return result

    def time_steps(self) -> StepClock:
        """Pass it on."""
        return self._executor.time_steps()

    def tell_if_stuck(self, tell: Callable[[HooklineError], None]) -> None:
        """Pass it on."""
        self._executor.tell_if_stuck(tell)

    def close(self) -> None:
        """Pass it on."""
        self._executor.close()

    def step_ended(self) -> None:
        """Call it after each step of the engine: it completes the record of the step that it committed, if any."""
        stats = self.engine.last_stats
        if stats is self._stats or stats is None:
            return
        self._stats, noted = stats, self._collected
        self._collected = None
        end_s = self.now()
        if noted is None:  # it preempted and computed nothing
            none = np.empty(0, dtype=np.int64)
            noted = _Noted(end_s, StepCounts(), none, none, none)
        self.rows.append((noted.start_s, end_s, *noted.counts, *_states(stats), *_times(stats)))
        self.drawn.append(np.concatenate([noted.drawn, ints(self.engine.state.decoding.kept_ids)]))
        self.chunk_ids.append(noted.chunk_ids)
        self.chunk_tokens.append(noted.chunk_tokens)

    def _note(self, step: Step, started: float) -> _Noted:
        newest = islice(reversed(self.engine.queue.running.values()), len(step.admit_rows))
        for request in newest:  # the requests that this step admitted
            self._owner[request.row] = request.id
        chunk_ids, is_prompt = self._owner[step.chunk_rows], ~has_drafts(step)
        is_drawn = np.bincount(step.sampled_chunks, minlength=len(chunk_ids)) > 0  # np.unique's first call takes 40 ms
        drawn = np.concatenate([self._owner[step.decode_rows], chunk_ids[is_drawn], self._owner[step.drafting_rows]])
        if len(step.drafting_rows):
            table = self.engine.queue.table
            held = np.flatnonzero(table.id_S >= 0)  # what the step before keeps is not known yet
            self._counter.note_lengths(table.row_S[held], table.num_computed_tokens_S[held])
        counts = self._counter.count(step)
        return _Noted(started, counts, drawn, chunk_ids[is_prompt], step.chunk_lens[is_prompt])

    def finish(self, seconds: float, requests: Sequence[RequestRecord], places: Mapping[int, int]) -> Recording:
        """The whole record. places: id of a request in the engine -> its place in `requests`."""
        names = ("start_s", "end_s", *COUNTS, *STATES, *TIMES)
        table = np.array(self.rows, dtype=np.float64).reshape(len(self.rows), len(names)).T
        steps: dict[str, Column] = {
            name: column.copy() if name.endswith("_s") else column.astype(np.int64)
            for name, column in zip(names, table, strict=True)
        }
        ends_before = np.concatenate([[0.0], steps["end_s"][:-1]]) if self.rows else np.empty(0)
        steps["busy_s"] = steps["end_s"] - np.maximum(steps["start_s"], ends_before)
        steps["num_drawn"] = np.array([len(ids) for ids in self.drawn], dtype=np.int64)
        limits = self.engine.limits.plan
        return Recording(
            seconds=seconds,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            requests=requests,
            steps=steps,
            drawn=_places(self.drawn, places),
            chunk_request=_places(self.chunk_ids, places),
            chunk_tokens=_joined(self.chunk_tokens),
        )


def _states(stats: StepStats) -> tuple[int, ...]:
    return (
        stats.num_running,
        stats.num_waiting,
        stats.num_free_blocks,
        stats.num_cached_tokens,
        stats.num_preemptions,
    )


def _times(stats: StepStats) -> tuple[float, ...]:
    times = (getattr(stats, name) for name in TIMES)
    return tuple(math.nan if time is None else time for time in times)


def _joined(parts: Sequence[Column]) -> Column:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _places(ids: Sequence[Column], places: Mapping[int, int]) -> Column:
    """The places of requests by their ids; -1 for a request that is not of the load."""
    joined = _joined(ids)
    if not len(joined):
        return joined
    first = min(int(joined.min()), *places)
    table = np.full(max(int(joined.max()), *places) - first + 1, -1, dtype=np.int64)
    table[np.fromiter(places, dtype=np.int64) - first] = np.fromiter(places.values(), dtype=np.int64)
    found: Column = table[joined - first]
    return found


def token_times(recording: Recording) -> tuple[Column, Column]:
    """When each token came, request after request in the load's order, and where each request's tokens begin.

    Returns times_s (all tokens) and starts (one more entry than there are requests). A request keeps as many tokens as
    its output has: tokens drawn after its end were thrown away.
    """
    drawn = recording.drawn
    known = drawn >= 0
    ends_s = np.repeat(recording.steps["end_s"], recording.steps["num_drawn"])[known]
    order = np.argsort(drawn[known], kind="stable")
    requests = drawn[known][order]
    counts = np.bincount(requests, minlength=len(recording.requests))
    begins = np.concatenate([[0], np.cumsum(counts)])
    rank = np.arange(len(requests)) - begins[requests]
    wanted = np.array([request.output_tokens for request in recording.requests], dtype=np.int64)
    kept = rank < wanted[requests]
    starts = np.concatenate([[0], np.cumsum(np.minimum(counts, wanted))])
    return ends_s[order][kept], starts
