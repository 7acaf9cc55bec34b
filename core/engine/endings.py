"""Ends requests in whatever state they are; keeps outputs from outside a commit until the next step returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.ends import fault_of, no_token
from hookline.core.engine.feedback import PolicyFeedback
from hookline.core.engine.in_flight import InFlight
from hookline.core.engine.listeners import Listeners
from hookline.core.engine.time_limits import TimeLimits
from hookline.core.engine.times import Times
from hookline.core.errors import EngineError, HooklineError, PluginError, RequestError
from hookline.core.outputs import FinishReason, RequestOutput
from hookline.core.requests.request import Request
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.requests.structured_output import StructuredOutput


class Endings:
    """Ends the requests of one engine, and tells observers and the policy; for what reasons is decided in ends.py.

    names: of the plugins, by kind, for errors.
    """

    def __init__(
        self,
        queue: RequestQueue,
        dispatcher: Dispatcher,
        feedback: PolicyFeedback,
        listeners: Listeners,
        structured_output: StructuredOutput | None,
        times: Times,
        names: Mapping[str, str],
    ) -> None:
        self._queue, self._dispatcher, self._feedback = queue, dispatcher, feedback
        self._listeners, self._structured_output, self._times = listeners, structured_output, times
        self._names = names
        self.time_limits = TimeLimits()
        self.kept: list[RequestOutput] = []
        """Outputs of requests that ended outside a commit; the next step returns them."""

    def end(self, request: Request, reason: FinishReason, error: HooklineError | None = None) -> RequestOutput:
        """End a request and give back its blocks and its row; the caller has to tell the observers.

        error: why, if it is not served to its end; a PluginError or an EngineError is no fault of the request.
        """
        if request.id in self._queue.compiling and self._structured_output is not None:
            self._structured_output.forget(request.id)
        self._dispatcher.retire(request)
        self._queue.remove(request)
        text = None if error is None else str(error)
        self._feedback.ended(request, reason, text)
        is_fault = isinstance(error, PluginError | EngineError)
        return request.output(reason, self._times.now(), text, is_fault=is_fault)

    def end_tokenless(self, request: Request, token_id: int) -> RequestOutput:
        """End a request for which no token was drawn, and empty the prefix cache, whose blocks may hold NaN, too."""
        self._dispatcher.cache.pool.reset_cache()
        return self.end(request, FinishReason.ERROR, no_token(request, token_id, self._names))

    def abort(self, ids: Iterable[int], reason: FinishReason) -> list[RequestOutput]:
        """See Engine.abort."""
        live = [self._queue.live[id_] for id_ in dict.fromkeys(ids) if id_ in self._queue.live]
        outputs = [self.end(request, reason) for request in live]
        self._listeners.notify_ends(outputs)
        return outputs

    def end_late(self) -> None:
        """End the requests whose time limits have passed."""
        live = self._queue.live
        late = [
            self.end(live[id_], FinishReason.ABORT, RequestError(f"timeout_s={timeout_s} passed before it was done"))
            for id_, timeout_s in self.time_limits.passed(self._times.now())
            if id_ in live
        ]
        self.kept += late
        self._listeners.notify_ends(late)

    def end_maskless(self, launched: InFlight) -> list[RequestOutput]:
        """End the requests whose grammars failed to fill a mask; what is drawn for them is dropped."""
        ids = launched.dispatched.sampled.ids_N[launched.dispatched.step.masked_draws].tolist()
        requests = [request for id_ in ids if (request := self._queue.live.get(id_)) is not None]
        faulty = [request for request in requests if fault_of(request) is not None]
        outputs = [self.end(request, FinishReason.ERROR, fault_of(request)) for request in faulty]
        self._listeners.notify_ends(outputs)
        return outputs

    def break_off(self, error: BaseException) -> None:
        """End all requests after a step failed half-way, and empty the prefix cache: some blocks were not filled."""
        cause = EngineError(f"the engine broke off: {str(error) or type(error).__name__}")
        live = list(self._queue.live.values())
        broken = [self.end(request, FinishReason.ERROR, cause) for request in live]
        self.kept += broken
        self._dispatcher.cache.pool.reset_cache()
        self._feedback.broke_off(self._times.now())
        self._listeners.notify_ends(broken)
