"""Sends a load to an engine, each request when it is due, and records the steps and requests.

Open loop: a request arrives when the load says so, however far behind the engine is; its waiting counts from then.
Calls the engine's methods and reads its clock; metrics are computed elsewhere.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

from hookline.core.bench.recorder import Recording, RequestRecord, StepRecorder, token_times
from hookline.core.bench.workload import Load, LoadRequest
from hookline.core.engine.engine import Engine
from hookline.core.errors import RequestError
from hookline.core.outputs import RequestOutput
from hookline.core.request_options import LINE_KEYS


def drive(engine: Engine, load: Load) -> Recording:
    """Serve a whole load and return its recording, with times of the engine's clock.

    A request that the engine refuses is recorded with its error, and so are the turns that would have followed it.
    Raises: what the engine's step raises.
    """
    return _Drive(engine, load).run()


@dataclass
class _Drive:
    engine: Engine
    load: Load
    records: list[RequestRecord] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    due: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (seconds after the start, place in the load)."""
    histories: dict[int, list[int]] = field(default_factory=dict)
    """The conversation's tokens before a turn that is due, by the turn's place in the load."""

    def run(self) -> Recording:
        """Serve the load; see `drive`."""
        self.next_turns: dict[int, list[int]] = defaultdict(list)
        for place, request in enumerate(self.load.requests):
            self.records.append(record_of(request))
            if request.follows is None:
                self.due.append((request.arrival_s, place))
            else:
                self.next_turns[request.follows].append(place)
        heapq.heapify(self.due)
        self.started_s = started_s = self.engine.clock()

        def _now() -> float:
            return self.engine.clock() - started_s

        with StepRecorder(self.engine, _now) as recorder:
            while self.due or self.engine.has_work:
                self._add_due(_now())
                if not self.engine.has_work:
                    if self.due:
                        self.engine.sleep(max(0.0, self.due[0][0] - _now()))
                    continue
                outputs = self.engine.step()
                recorder.step_ended()
                for output in outputs:
                    self._end(output, _now())
            recording = recorder.finish(_now(), self.records, self.places)
        _fill_in_times(recording)
        return recording

    def _add_due(self, now_s: float) -> None:
        while self.due and self.due[0][0] <= now_s:
            arrival_s, place = heapq.heappop(self.due)
            request, record = self.load.requests[place], self.records[place]
            tokens = [*self.histories.pop(place, ()), *request.tokens]
            record.arrive(arrival_s, len(tokens))
            try:
                arrival = self.started_s + arrival_s
                id_ = self.engine.add(tokens, request.params, arrival_s=arrival, options=request.options)
                self.places[id_] = place
            except RequestError as error:
                self._refuse(place, str(error))

    def _refuse(self, place: int, error: str) -> None:
        self.records[place].fail(error)
        for turn in self.next_turns[place]:
            self._refuse(turn, "the turn before was refused")

    def _end(self, output: RequestOutput, now_s: float) -> None:
        place = self.places.get(output.request_id)
        if place is None:
            return  # of a request that was there before
        counts = len(output.token_ids), output.num_cached_tokens, output.num_preemptions
        self.records[place].finish(output.finish_reason.value, *counts)
        for turn in self.next_turns[place]:
            self.histories[turn] = [*output.prompt_token_ids, *output.token_ids]
            heapq.heappush(self.due, (now_s + self.load.requests[turn].arrival_s, turn))


def record_of(request: LoadRequest) -> RequestRecord:
    """The record of a request that has not arrived yet."""
    said = {key: getattr(request.options, key) for key in LINE_KEYS} | {"tags": dict(request.options.tags or {})}
    slo = request.slo.bounds or None
    return RequestRecord(request.arrival_s, len(request.tokens), follows=request.follows, slo=slo, **said)


def _fill_in_times(recording: Recording) -> None:
    """Set the time of each request's first step and of its first and last token."""
    times_s, starts = token_times(recording)
    launches = zip(recording.chunk_request, _chunk_starts_s(recording), strict=True)
    for place, start_s in launches:
        if place >= 0:
            recording.requests[place].start(float(start_s))
    for place, request in enumerate(recording.requests):
        if starts[place] < starts[place + 1]:
            request.note_times(float(times_s[starts[place]]), float(times_s[starts[place + 1] - 1]))


def _chunk_starts_s(recording: Recording) -> list[float]:
    starts: list[float] = []
    for start_s, count in zip(recording.steps["start_s"], recording.steps["prefill_chunks"], strict=True):
        starts.extend([start_s] * int(count))
    return starts
