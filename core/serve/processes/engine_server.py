"""The engine's process: receives requests on a socket, does steps, and sends each front end its tokens of a step.

One thread and one loop; ZeroMQ sends and receives in a thread of its own. Token ids in, token ids out: the front ends
have the tokenizer and the text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from hookline.core.errors import HooklineError, QueueFullError, RequestError, ends_engine
from hookline.core.frontend.engine_driver import EngineDriver, engine_error
from hookline.core.outputs import FinishReason
from hookline.core.pooling_params import PoolingParams
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.engine_metrics import metrics_of
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
    refusal_of,
    unpacked,
    unpacked_list,
)
from hookline.core.serve.processes.outbox import Outbox, Outlet
from hookline.core.serve.throughput import Throughput

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM

_log = logging.getLogger("hookline")

MAX_READ = 10_000
"""Most messages read between two steps, as many as a front end keeps: one takes some 5 us, queueing a prompt 40."""
MAX_UNSENT = 1000
"""Messages that ZeroMQ keeps for a front end that does not read; further ones are joined into one message."""
STUCK_S = 10.0
"""Seconds after which a front end that reads nothing is given up."""
REPORT_S = 0.5
"""Seconds between two LoadReports."""
IDLE_S = 1.0
"""Longest wait for a message in seconds, before checking whether the supervisor still lives."""
LINGER_S = 1.0
"""Seconds for sending the last messages."""


Name = tuple[bytes, int]
"""A front end and one of its handles: of a prompt that has arrived, or of a completion."""


class EngineServer(EngineDriver[Name, Submit]):
    """Serves one LLM's engine on a ZeroMQ address until it is told to stop or the engine is dead.

    max_requests: most completions at once; further ones are refused. is_orphan: whether the supervisor has gone.
    """

    FATAL = (zmq.ZMQError, KeyboardInterrupt)  # when the socket fails, no front end can be told any more

    def __init__(self, llm: LLM, address: str, max_requests: int, is_orphan: Callable[[], bool]) -> None:
        super().__init__(llm.output_processor)
        self._llm, self._max_requests, self._is_orphan = llm, max_requests, is_orphan
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # who is gone is an error, and not silence
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        self._socket.set(zmq.LINGER, round(LINGER_S * 1000))
        self._socket.bind(address)
        self._outboxes: dict[bytes, Outbox] = {}
        self._throughput = Throughput(self._engine.clock)
        self._engine.state.use_sleep(self._idle)

    def run(self) -> None:
        """Serve until told to stop, or the engine is dead."""
        try:
            while not self._is_stopping:
                self.turn()
        finally:
            try:
                self._flush()
            finally:
                self._context.destroy(linger=round(LINGER_S * 1000))

    def turn(self) -> None:
        """See EngineDriver."""
        super().turn()
        if self._throughput.is_due(REPORT_S, has_work=self._engine.has_work):
            self._report()

    def _step(self) -> None:
        super()._step()
        self._throughput.count(self._engine.last_stats)

    # ------------------------------------------------------------------------------------------------ messages

    def _take_commands(self) -> None:
        """See EngineDriver."""
        if not self._has_work and not self._socket.poll(round(IDLE_S * 1000)):
            self._is_stopping |= self._is_orphan()
            return
        for _ in range(MAX_READ):
            try:
                name, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(name, data)

    def _idle(self, seconds: float) -> None:
        """See EngineDriver."""
        self._socket.poll(math.ceil(seconds * 1000))

    def _take(self, name: bytes, data: bytes) -> None:
        message = decode_to_engine(data)
        match message:
            case Submit():
                self._arrived[name, message.handle] = message
            case Cancel():
                self._forget([(name, handle) for handle in message.handles])
            case Finish():
                self._finish(name, message.handles)
            case TurnedAway():
                for _ in range(message.count):
                    self._engine.refuse((), self._full())
            case AskMetrics():
                self._outbox(name).post(Metrics(message.number, metrics_of(self._llm.observers)))
            case Hello():
                self._outbox(name)
                self._report()
            case Gone():
                self._forget(self._lose(message.name.encode()))
            case Stop():
                self._is_stopping = True

    def _outbox(self, name: bytes) -> Outbox:
        if name not in self._outboxes:
            self._outboxes[name] = Outbox(name, self._deliver)
        return self._outboxes[name]

    def _deliver(self, name: bytes, data: bytes) -> bool:
        try:
            self._socket.send_multipart((name, data), zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise LookupError(f"front end {name.decode()} is gone") from error
        return True

    def _report(self) -> None:
        engine, rates = self._engine, self._throughput.rates()
        report = LoadReport((engine.num_running, engine.num_waiting, engine.num_free_blocks, engine.num_blocks, *rates))
        for outbox in self._outboxes.values():
            outbox.post(report)

    # ------------------------------------------------------------------------------------------------ requests

    def _queue(self, caller: Name, prompt: Submit) -> Mapping[Name, set[int]]:
        """See EngineDriver. Each completion is a caller of its own: a front end names them one by one."""
        name, first = caller
        params = SamplingParams(**prompt.params)
        pooling = None if prompt.pooling is None else PoolingParams(**prompt.pooling)
        if len(self.output_processor) + params.n > self._max_requests:
            raise self._full()

        def _make(index: int, one: SamplingParams) -> Outlet:
            end = partial(self._note_end, (name, first + index))
            may_use_extensions = bool(one.extra_args) or self._engine.limits.extensions.has_settings
            is_followed = one.logprobs is not None or may_use_extensions
            return Outlet(first + index, self._outbox(name), end, is_followed=is_followed)

        token_ids: Any = unpacked(prompt.token_ids)  # an array does for a sequence
        given = {"options": RequestOptions(**prompt.options), "arrival_s": prompt.arrival_s, "pooling": pooling}
        ids = self.output_processor.queue(token_ids, params, _make, **given)
        return {(name, first + index): {id_} for index, id_ in enumerate(ids)}

    def _tell(self, caller: Name, error: HooklineError) -> None:
        """See EngineDriver."""
        name, handle = caller
        self._outbox(name).post(refusal_of(handle, error))

    def _note_refusal(self, prompt: Submit, error: RequestError) -> None:
        """See EngineDriver."""
        self._engine.refuse(unpacked_list(prompt.token_ids), error)

    def _full(self) -> QueueFullError:
        return QueueFullError("serve.max_requests", self._max_requests, len(self.output_processor), 0)

    def _finish(self, name: bytes, handles: Iterable[int]) -> None:
        """End completions in whose text a stop string was found."""
        ids = [id_ for handle in handles for id_ in self._open.get((name, handle), ())]
        self.output_processor.abort(ids, reason=FinishReason.STOP)

    def _lose(self, name: bytes) -> list[Name]:
        """Forget a front end that is gone; returns its open prompts and completions."""
        self._outboxes.pop(name, None)
        return [one for one in (*self._arrived, *self._open) if one[0] == name]

    def _break_off(self, error: BaseException) -> None:
        """See EngineDriver. If the engine cannot go on, all front ends are told that it is dead."""
        if not ends_engine(error) and self._llm.device_works():
            super()._break_off(error)
            return
        self.death, self._is_stopping = str(engine_error(error)), True
        _log.error("the engine broke off: %s", self.death)
        for outbox in self._outboxes.values():
            outbox.clear()
            outbox.post(Broken(self.death))
        self._arrived = {}
        self._drop(list(self._open))

    def _flush(self) -> list[Name]:
        """See EngineDriver."""
        lost = [outbox.name for outbox in self._outboxes.values() if not self._is_sent(outbox)]
        return [one for name in lost for one in self._lose(name)]

    def _is_sent(self, outbox: Outbox) -> bool:
        try:
            outbox.flush()
        except LookupError:
            return False
        if outbox.stuck_s > STUCK_S:
            _log.error("front end %s has read nothing for %.0f s: its requests end", outbox.name.decode(), STUCK_S)
            return False
        return True
