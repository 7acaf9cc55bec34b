"""Whom a lost step concerns: who ends by what failed in it, and who computes it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hookline.core.errors import LostStep, RequestFault
from hookline.core.requests.request import Request


def concerned(error: LostStep, inside: Sequence[Request]) -> list[Request]:
    """Those of a step's requests that end by what failed: all, or those of the rows or processors that are named."""
    return [request for request in inside if _concerns(error, request)]


def starting_again(error: LostStep, inside: Sequence[Request], running: Iterable[Request]) -> list[Request]:
    """The running requests that compute the step again, and those whose processor may have been made anew."""
    ids = {request.id for request in inside}
    failed = error.processors if isinstance(error, RequestFault) else 0
    return [request for request in running if request.id in ids or request.prepared.bits & failed]


def _concerns(error: LostStep, request: Request) -> bool:
    if not isinstance(error, RequestFault):
        return True
    used = 0 if request.is_prefilling else request.prepared.used(request.num_output_tokens)
    return request.row in error.rows or used & error.processors != 0
