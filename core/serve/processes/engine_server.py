"""The engine's process: takes requests off a socket, does steps, and sends each front end what a step brought it.

One thread and one loop; sending and receiving is ZeroMQ's thread's. Token ids in, token ids out: the tokenizer and the
text are the front ends'.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import zmq

from hookline.core.errors import (
    EngineError,
    HooklineError,
    QueueFullError,
    RequestError,
    ends_engine,
    one_short_line,
    requests_ended_by,
)
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.processes.messages import (
    AskMetrics,
    Broken,
    Cancel,
    Finish,
    Gone,
    Hello,
    LoadReport,
    Metrics,
    Stop,
    Submit,
    TurnedAway,
    decode_to_engine,
    end_of,
    refusal_of,
    unpacked,
)
from hookline.core.serve.processes.outbox import Completion, Outbox
from hookline.core.serve.throughput import Throughput

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM

_log = logging.getLogger("hookline")

MAX_ADMITTED = 256
"""Most prompts queued between two steps: a burst of arrivals must not hold up those that run."""
MAX_READ = 10_000
"""Most messages read between two steps, as many as a front end keeps: one takes some 5 us, queueing a prompt 40."""
MAX_UNSENT = 1000
"""Messages that ZeroMQ keeps for a front end that does not read; more are gathered into one."""
STUCK_S = 10.0
"""After which a front end that takes nothing is given up."""
REPORT_S = 0.5
"""Between two reports of how busy the engine is."""
IDLE_S = 1.0
"""Longest wait for a message, after which the parent is looked for."""
LINGER_S = 1.0
"""For last messages to leave."""


class EngineServer:
    """Serves one LLM's engine on a ZeroMQ address until it is told to stop or the engine is dead.

    max_requests: most completions at once; further ones are refused. is_orphan: whether the supervisor has gone.
    """

    def __init__(self, llm: LLM, address: str, max_requests: int, is_orphan: Callable[[], bool]) -> None:
        self._llm, self._engine, self._max_requests, self._is_orphan = llm, llm.engine, max_requests, is_orphan
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # who is gone is an error, and not silence
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        self._socket.set(zmq.LINGER, round(LINGER_S * 1000))
        self._socket.bind(address)
        self._outboxes: dict[bytes, Outbox] = {}
        self._arrived: dict[tuple[bytes, int], Submit] = {}
        """Prompts that are not queued yet, in their order; one that is left meanwhile costs nothing more."""
        self._open: dict[tuple[bytes, int], Completion] = {}
        self._by_request: dict[int, Completion] = {}
        self._scored: dict[int, Completion] = {}
        self._throughput = Throughput(self._engine.clock)
        self._engine.sleep = self._idle
        self.death: str | None = None
        """Why the engine ended, if a fault ended it."""
        self._is_stopping = False

    def run(self) -> None:
        """Serve until told to stop, or the engine is dead."""
        try:
            while not self._is_stopping:
                self._turn()
        finally:
            try:
                self._guarded(self._flush_all)
            finally:
                self._context.destroy(linger=round(LINGER_S * 1000))

    def _turn(self) -> None:
        self._guarded(self._take_messages)
        self._guarded(self._step)
        self._guarded(self._flush_all)
        if self._throughput.is_due(REPORT_S, has_work=self._engine.has_work):
            self._report()

    def _step(self) -> None:
        if self._engine.has_work:
            self._hand_out(self._engine.step())
            self._throughput.count(self._engine.last_stats)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call something that may end requests or compute a step, in which a plugin may fail."""
        try:
            act()
        except zmq.ZMQError:  # nobody can be told any more
            raise
        except Exception as error:
            self._break_off(error)
            for outbox in list(self._outboxes.values()):
                self._flush(outbox)  # who is gone is found by the next `_flush_all`

    # ------------------------------------------------------------------------------------------------ messages

    def _take_messages(self) -> None:
        """Carry out what front ends ask for, prompts last; waits for something if there is nothing to do."""
        is_idle = not self._engine.has_work and not self._arrived
        if is_idle and not self._socket.poll(round(IDLE_S * 1000)):
            self._is_stopping |= self._is_orphan()
            return
        for _ in range(MAX_READ):
            try:
                name, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(name, data)
        for name, handle in list(islice(self._arrived, MAX_ADMITTED)):
            self._submit(name, self._arrived.pop((name, handle)))

    def _idle(self, seconds: float) -> None:
        """Wait as a policy asked to, but not while somebody has a message for us."""
        self._socket.poll(math.ceil(seconds * 1000))

    def _take(self, name: bytes, data: bytes) -> None:
        message = decode_to_engine(data)
        match message:
            case Submit():
                self._arrived[name, message.handle] = message
            case Cancel():
                self._end(name, message.handles)
            case Finish():
                self._finish(name, message.handles)
            case TurnedAway():
                for _ in range(message.count):
                    self._engine.refuse((), self._full())
            case AskMetrics():
                self._outbox(name).post(Metrics(message.number, self._metrics()))
            case Hello():
                self._outbox(name)
                self._report()
            case Gone():
                self._lose(message.name.encode())
            case Stop():
                self._is_stopping = True

    def _outbox(self, name: bytes) -> Outbox:
        if name not in self._outboxes:
            self._outboxes[name] = Outbox(name, self._send)
        return self._outboxes[name]

    def _send(self, name: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart((name, data), zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise LookupError(f"front end {name.decode()} is gone") from error
        return True

    def _metrics(self) -> str:
        return "".join(one.text() for one in self._llm.observers.values() if hasattr(one, "text"))

    def _report(self) -> None:
        engine, rates = self._engine, self._throughput.rates()
        report = LoadReport((engine.num_running, engine.num_waiting, engine.num_free_blocks, engine.num_blocks, *rates))
        for outbox in self._outboxes.values():
            outbox.post(report)

    # ------------------------------------------------------------------------------------------------ requests

    def _submit(self, name: bytes, message: Submit) -> None:
        outbox, added = self._outbox(name), list[Completion]()
        token_ids: Any = unpacked(message.token_ids)  # an array does for a sequence
        try:
            params = SamplingParams(**message.params)
            pooling = None if message.pooling is None else PoolingParams(**message.pooling)
            options = RequestOptions(**message.options)
            self._check_room(params.n)
            for index, one in enumerate(params.each()):
                completion = Completion(message.handle + index, outbox)
                like = added[0].request_id if added else None
                completion.request_id = self._engine.add(
                    token_ids,
                    one,
                    options=options,
                    arrival_s=message.arrival_s,
                    watcher=completion,
                    like=like,
                    pooling=pooling,
                )
                added.append(completion)
                self._add(name, completion, is_scored=one.logprobs is not None)
        except Exception as error:
            outbox.post(refusal_of(message.handle, error))
            if isinstance(error, RequestError):
                self._engine.refuse(token_ids.tolist(), error)
            self._end(name, [one.handle for one in added])

    def _check_room(self, num_requests: int) -> None:
        self._engine.check_room(num_requests)
        if len(self._open) + num_requests > self._max_requests:
            raise self._full()

    def _full(self) -> QueueFullError:
        return QueueFullError("serve.max_requests", self._max_requests, len(self._open), 0)

    def _add(self, name: bytes, completion: Completion, *, is_scored: bool) -> None:
        self._open[name, completion.handle] = self._by_request[completion.request_id] = completion
        if is_scored:
            self._scored[completion.request_id] = completion

    def _end(self, name: bytes, handles: Sequence[int]) -> None:
        """End completions of a front end, which is told nothing more about them."""
        for handle in handles:
            self._arrived.pop((name, handle), None)
        ended = [self._open[name, handle] for handle in handles if (name, handle) in self._open]
        for completion in ended:
            self._forget(completion)
        self._engine.abort([completion.request_id for completion in ended])

    def _finish(self, name: bytes, handles: Iterable[int]) -> None:
        ids = [self._open[name, handle].request_id for handle in handles if (name, handle) in self._open]
        self._hand_out(self._engine.abort(ids, reason=FinishReason.STOP))

    def _forget(self, completion: Completion) -> None:
        self._open.pop((completion.outbox.name, completion.handle), None)
        self._by_request.pop(completion.request_id, None)
        self._scored.pop(completion.request_id, None)

    def _lose(self, name: bytes) -> None:
        """A front end is gone, and with it whoever waits there."""
        self._outboxes.pop(name, None)
        self._end(name, [handle for other, handle in (*self._arrived, *self._open) if other == name])

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            completion = self._by_request.get(output.request_id)
            if completion is None:
                continue
            outbox, handle = completion.outbox, completion.handle
            if output.logprobs is not None and len(output.logprobs) > completion.num_scored:
                outbox.scored.setdefault(handle, []).extend(output.logprobs[completion.num_scored :])
            outbox.ends.append(end_of(handle, output))
            self._forget(completion)
        for id_, completion in self._scored.items():
            request = self._engine.queue.live.get(id_)
            rows = request.scores.sampled(completion.num_scored) if request and request.scores else None
            if rows:
                completion.outbox.scored.setdefault(completion.handle, []).extend(rows)
                completion.num_scored += len(rows)

    # -------------------------------------------------------------------------------------------------- faults

    def _break_off(self, error: Exception) -> None:
        """Tell those whose requests a step ended; if the engine cannot go on, everybody that it is dead."""
        reason = one_short_line(error) if not isinstance(error, HooklineError) else str(error)
        _log.error("the engine broke off: %s", reason)
        if ends_engine(error) or not self._llm.device_works():
            for outbox in self._outboxes.values():
                outbox.clear()
                outbox.post(Broken(reason))
            self._arrived, self._open, self._by_request, self._scored = {}, {}, {}, {}
            self.death, self._is_stopping = reason, True
            return
        ended = requests_ended_by(error)
        ids = [id_ for id_ in self._by_request if ended is None or id_ in ended]
        for id_ in ids:
            completion = self._by_request[id_]
            completion.outbox.post(refusal_of(completion.handle, EngineError(reason)))
            self._forget(completion)
        try:
            self._engine.abort(ids)
        except Exception as further:
            _log.error("while ending requests after an error: %s", further)
        self._hand_out(self._engine.pop_finished())  # of others, that ended before the error: there may be no next step

    def _flush_all(self) -> None:
        lost = [outbox for outbox in self._outboxes.values() if not self._flush(outbox)]
        for outbox in lost:
            self._lose(outbox.name)

    def _flush(self, outbox: Outbox) -> bool:
        try:
            outbox.flush()
        except LookupError:
            return False
        if outbox.stuck_s > STUCK_S:
            _log.error("front end %s has read nothing for %.0f s: its requests end", outbox.name.decode(), STUCK_S)
            return False
        return True
