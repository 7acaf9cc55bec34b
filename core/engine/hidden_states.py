"""Hands on the hidden states that steps keep for engine.taps and for drafters: to observers, or to the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.core.contracts import TappedStates
from hookline.core.engine.speculation import Speculation
from hookline.core.engine.step_builder import TokenOwners
from hookline.core.plugin.observers import Observers
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.step.executor import tapped_after


class HiddenStates:
    """The hidden states of committed steps and their one reader: the drafter, or observers if there is none."""

    def __init__(
        self, limits: EngineLimits, queue: RequestQueue, observers: Observers, speculation: Speculation | None
    ) -> None:
        self._names = {layer: tapped_after(layer) for layer in sorted(limits.taps)}
        self._queue, self._observers, self._speculation = queue, observers, speculation
        self.are_read = bool(limits.taps) and (speculation is not None or observers.hears("on_hidden_states"))
        """Whether anything reads them; if not, steps do not name the owners of their tokens."""

    def hand_on(self, owners: TokenOwners, apart: Mapping[str, Any]) -> None:
        """Show the states of a step whose tokens were kept. apart: see StepResult."""
        layers = {layer: apart[name] for layer, name in self._names.items()}
        if self._speculation is not None:
            self._speculation.show(self._queue.live, owners, layers, len(self._queue.running))
        else:
            self._observers.notify("on_hidden_states", states=TappedStates(*owners, layers))
