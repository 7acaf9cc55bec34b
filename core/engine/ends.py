"""Why requests end: with a token, by their limits, grammar, processors or watcher; or with a step that was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hookline.core.contracts import NO_TOKEN
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
from hookline.core.requests.request import Request


def end_with(request: Request, token_id: int) -> FinishReason | None:
    """Why a request ends with this token, after its processors and its watcher saw it; None if it goes on."""
    if token_id < 0:
        take_back(request)
        return FinishReason.ERROR
    reason = _end_by_limits(request, token_id)
    if request.constraint is not None:
        reason = request.constraint.end or reason
        if reason is FinishReason.ERROR:
            take_back(request)  # the token does not fit
            return reason
    if request.followers is not None and reason is None:
        reason = _end_by_followers(request, token_id)
    if request.watcher is None:
        return reason
    stop = request.watcher.see(token_id, reason)
    if stop is None or reason is FinishReason.ERROR:
        return reason
    request.stop_string = stop
    return FinishReason.STOP


def take_back(request: Request) -> None:
    """Make the newest token no part of a request's answer."""
    request.num_known_tokens -= 1
    if request.scores is not None:
        request.scores.drop_last()


def no_token(request: Request, token_id: int, names: Mapping[str, str]) -> PluginFault:
    """What a request ends with for which no token was drawn. names: of the plugins, by kind."""
    model, sampler = names.get("model", "the model"), names.get("sampler", "the sampler")
    if token_id == NO_TOKEN:
        kernels = names.get("kernels", "the kernels")
        told = f"{model} fails in logits: they are NaN, so that {sampler} draws no token; {kernels} may be at fault"
    else:
        told = f"{sampler} breaks its contract in sample: it drew token id {token_id}, which is outside the vocabulary"
    return PluginFault(f"request {request.id}: {told}")


def fault_of(request: Request) -> HooklineError | None:
    """The error that a request ends with: of its processors, or of its grammar's back end; None if there is none."""
    return request.fault if request.constraint is None else request.fault or request.constraint.fault


def stops_with(request: Request, token_id: int) -> bool:
    """Whether this token is a stop token of the request, which has reached its min_tokens."""
    return token_id in request.stop_ids and request.num_known_outputs >= request.params.min_tokens


def _end_by_limits(request: Request, token_id: int) -> FinishReason | None:
    if stops_with(request, token_id):
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_known_outputs >= request.max_tokens else None


def _end_by_followers(request: Request, token_id: int) -> FinishReason | None:
    assert request.followers is not None
    try:
        text = request.followers.see(token_id, None if request.scores is None else request.scores.last_logprob)
    except HooklineError as error:
        show_traceback(error)
        kind = PluginFault if isinstance(error, PluginError) else RequestError
        request.fault = kind(f"request {request.id}: {error}")
        return FinishReason.ERROR
    if text is None or request.num_known_outputs < request.params.min_tokens:
        return None
    request.stop_string = text
    return FinishReason.STOP


def concerned(error: LostStep, inside: Sequence[Request]) -> list[Request]:
    """The requests of a lost step that end: all, or of a RequestFault those with its rows or processors."""
    return [request for request in inside if _concerns(error, request)]


def end_of(request: Request, error: LostStep) -> HooklineError:
    """What a request of a lost step ends with."""
    if not isinstance(error, RequestFault):
        kind = PluginFault if isinstance(error, PluginError) else EngineError
        return kind(f"request {request.id}: the engine lost a step: {error}")
    return (RequestError if error.is_refusal else PluginFault)(f"request {request.id}: {error}")


def starting_again(error: LostStep, inside: Sequence[Request], running: Iterable[Request]) -> list[Request]:
    """The running requests that must start again: those of the lost step, and all that use a processor that failed.

    Such a processor may have been made anew, without the arguments of its requests.
    """
    ids = {request.id for request in inside}
    failed = error.processors if isinstance(error, RequestFault) else 0
    return [request for request in running if request.id in ids or request.prepared.bits & failed]


def _concerns(error: LostStep, request: Request) -> bool:
    if not isinstance(error, RequestFault):
        return True
    used = 0 if request.is_prefilling else request.prepared.used(request.num_output_tokens)
    return request.row in error.rows or used & error.processors != 0
