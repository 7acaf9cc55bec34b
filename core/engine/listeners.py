"""What an engine tells its observers. A hook that no observer implements costs one test of a flag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hookline.core.outputs import RequestOutput
from hookline.core.plugin.observers import Observers


class Listeners:
    """The observers of one engine; there may be none."""

    def __init__(self, observers: Observers | None) -> None:
        self.observers = observers
        hears = observers.hears if observers is not None else lambda hook: False
        self.hears_begin, self.hears_first, self.hears_gaps, self.hears_states = (
            hears(hook) for hook in ("on_request_begin", "on_first_token", "on_token_gaps", "on_hidden_states")
        )

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call this hook of every observer that implements it."""
        if self.observers is not None:
            self.observers.notify(hook, **arguments)

    def notify_ends(self, outputs: Iterable[RequestOutput]) -> None:
        """Call on_request_end for each of these requests."""
        if self.observers is not None:
            for output in outputs:
                self.observers.notify("on_request_end", output=output)
