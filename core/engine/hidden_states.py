"""Hands on the hidden states that steps keep for engine.taps and for decodings that read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.core.contracts import TappedStates
from hookline.core.engine.step_builder import Decoding, TokenOwners
from hookline.core.plugin.observers import Observers
from hookline.core.requests.admission import EngineLimits
from hookline.core.step.executor import tapped_after


class HiddenStates:
    """The hidden states of committed steps and their one reader: the engine's decoding, or observers."""

    def __init__(self, limits: EngineLimits, observers: Observers, decoding: Decoding) -> None:
        self._names = {layer: tapped_after(layer) for layer in sorted(limits.taps)}
        self._observers, self._decoding = observers, decoding
        self.are_read = bool(limits.taps) and (decoding.reads_states or observers.hears("on_hidden_states"))
        """Whether anything reads them; if not, steps do not name the owners of their tokens."""

    def hand_on(self, owners: TokenOwners, apart: Mapping[str, Any]) -> None:
        """Show the states of a step whose tokens were kept. apart: see StepResult."""
        layers = {layer: apart[name] for layer, name in self._names.items()}
        if self._decoding.reads_states:
            self._decoding.show(owners, layers)
        else:
            self._observers.notify("on_hidden_states", states=TappedStates(*owners, layers))
