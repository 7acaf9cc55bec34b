"""Fields of an HTTP request in the access log besides path and status: token counts, times, the reason of a refusal.

The gate sets an `Access` for the task of each request; the code that serves the request fills it in.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hookline.core.errors import clipped
from hookline.core.outputs import Delta

_log = logging.getLogger("hookline.access")


@dataclass
class Access:
    """Of one HTTP request. num_prompt, num_cached: tokens of its prompts, known once a completion of each has ended.
    num_generated: tokens of its completions so far.
    """

    started_s: float = field(default_factory=time.monotonic)
    num_prompt: int | None = None
    num_cached: int = 0
    num_generated: int = 0
    first_token_s: float | None = None
    """Seconds from the request's arrival to the first token or the end of a completion."""
    reason: str | None = None
    """The error message sent to the client; it may quote the invalid value. None without an error."""

    def add(self, delta: Delta) -> None:
        """Count what was added to a completion; the prompt of several completions once."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.started_s
        self.num_generated += len(delta.token_ids)
        if delta.output is not None and delta.index == 0:
            self.num_prompt = (self.num_prompt or 0) + len(delta.output.prompt_token_ids)
            self.num_cached += delta.output.num_cached_tokens

    def fields(self) -> dict[str, Any]:
        """The known fields by their names in the log."""
        found: dict[str, Any] = {}
        if self.first_token_s is not None:
            if self.num_prompt is not None:
                found = {"prompt": self.num_prompt, "cached": self.num_cached}
            found |= {"output": self.num_generated, "first_token_s": round(self.first_token_s, 3)}
        if self.reason is not None:
            found["reason"] = self.reason
        return found

    def log(self, client: str, method: str, path: str, status: int | str, request_id: str) -> None:
        """Write the request's line to the access log: the client, the path, the outcome, its tokens and times, but no
        content; only the reason of an error may quote the value at fault.
        """
        seconds, path, further = time.monotonic() - self.started_s, clipped(path), self.fields()
        fields = {"client": client, "method": method, "path": path, "status": status, "seconds": round(seconds, 3)}
        words = "".join(f" {name}={json.dumps(value, ensure_ascii=False)}" for name, value in further.items())
        record = {**fields, **further, "request_id": request_id}
        parts = (client, method, path, status, seconds, words, request_id)
        _log.info("%s %s %s %s %.3f s%s %s", *parts, extra={"fields": record})


ACCESS: ContextVar[Access | None] = ContextVar("hookline_access", default=None)
"""Of the request that the running task answers; None outside of a server."""


def note_reason(reason: str) -> None:
    """Note why the running request gets an error."""
    access = ACCESS.get()
    if access is not None:
        access.reason = clipped(reason)
