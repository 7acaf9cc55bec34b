"""Why a request ends with a token: its own limits, its grammar, its processors, or whoever watches its text."""

from __future__ import annotations

from hookline.core.errors import HooklineError, show_traceback
from hookline.core.outputs import FinishReason
from hookline.core.requests.request import Request


def end_with(request: Request, token_id: int) -> FinishReason | None:
    """Why a request ends with this token, after its processors and its watcher saw it; None if it goes on."""
    reason = _end_by_limits(request, token_id)
    if request.constraint is not None:
        reason = request.constraint.end or reason
        if reason is FinishReason.ERROR:
            request.num_known_tokens -= 1  # the token that does not fit is not part of the answer
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


def fault_of(request: Request) -> str | None:
    """The error that a request ends with, if its processors, its grammar or the plugin behind that caused one."""
    return request.fault if request.constraint is None else request.fault or request.constraint.fault


def stops_with(request: Request, token_id: int) -> bool:
    """Whether this token is one that ends the request, and may."""
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
        request.fault = f"request {request.id}: {error}"
        return FinishReason.ERROR
    if text is None or request.num_known_outputs < request.params.min_tokens:
        return None
    request.stop_string = text
    return FinishReason.STOP
