"""Finishes requests by their tokens, a time limit or a lost step, and frees their rows and blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hookline.core.contracts import NO_TOKEN
from hookline.core.contracts.sampler import FORBIDDEN
from hookline.core.engine.dispatch import Dispatcher
from hookline.core.engine.policy_feedback import PolicyFeedback
from hookline.core.engine.state import EngineState
from hookline.core.errors import (
    EngineError,
    HooklineError,
    LostStep,
    PluginError,
    PluginFault,
    RequestError,
    RequestFault,
    show_traceback,
)
from hookline.core.outputs import FinishReason
from hookline.core.plugin.blame import breach
from hookline.core.requests.request import Request


class Finisher:
    """Finishes the requests of one engine in whatever state they are, and tells observers and the policy.

    plugin_names: of the plugins, by kind, for errors.
    """

    def __init__(
        self, state: EngineState, dispatcher: Dispatcher, feedback: PolicyFeedback, plugin_names: Mapping[str, str]
    ) -> None:
        self._state, self._queue = state, state.queue
        self._dispatcher, self._feedback, self._plugin_names = dispatcher, feedback, plugin_names

    def finish(self, request: Request, reason: FinishReason, error: HooklineError | None = None) -> None:
        """Finish a request and give back its blocks and its row; the caller has to call `EngineState.announce`.

        error: the cause, if the request is not served to its end; PluginError and EngineError are not its own fault.
        """
        if request.id in self._queue.compiling and self._state.late is not None:
            self._state.late.forget(request.id)
        if request.extensions is not None:
            request.extensions.forget()
        self._state.decoding.forget(request)
        self._dispatcher.retire(request)
        self._queue.remove(request)
        text = None if error is None else str(error)
        self._feedback.finished(request, reason, text)
        is_fault = isinstance(error, PluginError | EngineError)
        output = request.output(reason, self._state.now(), text, is_fault=is_fault)
        self._state.note_finished(output)

    def finish_without_token(self, request: Request, token_id: int) -> None:
        """Finish a request for which no token was drawn. After NaN, also empty the prefix cache: blocks may hold it."""
        if token_id < FORBIDDEN // 2:
            self.finish(request, FinishReason.ERROR, forbidden_tokens_error(request))
            return
        self._state.cache.pool.reset_cache()
        self.finish(request, FinishReason.ERROR, missing_token_fault(request, token_id, self._plugin_names))

    def finish_prompts(self, requests: Sequence[Request]) -> None:
        """Finish requests that end with their prompts, unless they have finished already."""
        for request in requests:
            if request.id in self._queue.live:
                self.finish(request, FinishReason.ERROR if request.fault else FinishReason.STOP, request.fault)

    def finish_faulty(self, requests: Iterable[Request]) -> None:
        """Finish the requests that have a fault; the tokens drawn for them are dropped."""
        for request in requests:
            if request.id in self._queue.live and (fault := fault_of(request)) is not None:
                self.finish(request, FinishReason.ERROR, fault)
        self._state.announce()

    def finish_overdue(self) -> None:
        """Finish the requests whose time limits have passed."""
        for id_, timeout_s in self._state.time_limits.passed(self._state.now()):
            if (request := self._queue.live.get(id_)) is not None:
                error = RequestError(f"timeout_s={timeout_s} passed before it was done")
                self.finish(request, FinishReason.ABORT, error)
        self._state.announce()

    def finish_all(self, error: BaseException) -> None:
        """Finish all requests after a step failed half-way, and empty the prefix cache: some blocks were not filled."""
        cause = EngineError(f"the engine broke off: {str(error) or type(error).__name__}")
        for request in list(self._queue.live.values()):
            self.finish(request, FinishReason.ERROR, cause)
        self._state.cache.pool.reset_cache()
        self._feedback.broke_off(self._state.now())
        self._state.announce()


# --------------------------------------------------------------------------------------------------- by a new token


def finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Why a request finishes with this token, after its extensions and its watcher saw it; None if it goes on."""
    if token_id < 0:
        request.drop_last_token()
        return FinishReason.ERROR
    reason = _reason_by_limits(request, token_id)
    if request.late is not None:
        reason = request.late.end or reason
        if reason is FinishReason.ERROR:
            request.drop_last_token()  # it does not fit
            return reason
    if request.extensions is not None:
        reason = _reason_by_extensions(request, token_id, reason)
    if request.watcher is None:
        return reason
    stop = request.watcher.see(token_id, reason)
    if stop is None or reason is FinishReason.ERROR:
        return reason
    request.stop_at(stop)
    return FinishReason.STOP


def stops_with(request: Request, token_id: int) -> bool:
    """Whether this token is a stop token of the request, which has reached its min_tokens."""
    return token_id in request.stop_ids and request.num_known_outputs >= request.params.min_tokens


def fault_of(request: Request) -> HooklineError | None:
    """The error that a request finishes with: of its extensions, or of its late input; None without one."""
    return request.fault if request.late is None else request.fault or request.late.fault


def missing_token_fault(request: Request, token_id: int, plugin_names: Mapping[str, str]) -> PluginFault:
    """The error of a request for which no valid token was drawn. plugin_names: by kind."""
    model, sampler = plugin_names.get("model", "the model"), plugin_names.get("sampler", "the sampler")
    if token_id == NO_TOKEN:
        kernels = plugin_names.get("kernels", "the kernels")
        told = f"{model} fails in logits: they are NaN, so that {sampler} draws no token; {kernels} may be at fault"
    else:
        told = breach(sampler, "sample", f"it drew token id {token_id}, which is outside the vocabulary")
    return PluginFault(f"request {request.id}: {told}")


def forbidden_tokens_error(request: Request) -> RequestError:
    """The error of a request whose parameters together forbid every token."""
    params = request.params
    names = [*params.processed_fields, *(f"extra_args.{name}" for name in params.extra_args)]
    names += ["min_tokens"] if params.min_tokens else []
    names += [] if request.late is None else [request.late.field]
    return RequestError(
        f"request {request.id}: no token is left that may be drawn: {', '.join(f'sampling.{name}' for name in names)} "
        "together forbid all; allow another one"
    )


def _reason_by_limits(request: Request, token_id: int) -> FinishReason | None:
    if stops_with(request, token_id):
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_known_outputs >= request.max_tokens else None


def _reason_by_extensions(request: Request, token_id: int, reason: FinishReason | None) -> FinishReason | None:
    """Show the extensions a token. reason: why it ends the request anyhow; None if it does not."""
    try:
        text = request.show_extensions(token_id)
    except HooklineError as error:
        show_traceback(error)
        kind = PluginFault if isinstance(error, PluginError) else RequestError
        request.fail(kind(f"request {request.id}: {error}"))
        return FinishReason.ERROR
    if reason is not None or text is None or request.num_known_outputs < request.params.min_tokens:
        return reason
    request.stop_at(text)
    return FinishReason.STOP


# ------------------------------------------------------------------------------------------------- by a lost step


def at_fault(error: LostStep, requests: Sequence[Request]) -> list[Request]:
    """The requests of a lost step that finish: all, or of a RequestFault those with its rows or extensions."""
    return [request for request in requests if _is_at_fault(error, request)]


def lost_step_error(request: Request, error: LostStep) -> HooklineError:
    """The error that a request of a lost step finishes with."""
    if not isinstance(error, RequestFault):
        kind = PluginFault if isinstance(error, PluginError) else EngineError
        return kind(f"request {request.id}: the engine lost a step: {error}")
    return (RequestError if error.is_refusal else PluginFault)(f"request {request.id}: {error}")


def starting_again(error: LostStep, requests: Sequence[Request], running: Iterable[Request]) -> list[Request]:
    """The running requests that must start again: the lost step's, and all that use an extension that failed.

    A failed extension may have been constructed again, without the arguments of its requests.
    """
    ids = {request.id for request in requests}
    failed = error.extensions if isinstance(error, RequestFault) else 0
    return [request for request in running if request.id in ids or request.prepared.bits & failed]


def _is_at_fault(error: LostStep, request: Request) -> bool:
    if not isinstance(error, RequestFault):
        return True
    used = 0 if request.is_prefilling else request.prepared.used(request.num_output_tokens)
    return request.row in error.rows or used & error.extensions != 0
