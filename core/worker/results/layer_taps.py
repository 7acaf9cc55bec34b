"""The hidden states that a step has after the layers of engine.taps, for observers. Legend: T tokens, D hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hookline.core.errors import StepFault
from hookline.core.util.arrays import VectorArray
from hookline.core.worker.results.token_transfer import TransferredTokens, send_apart


class LayerTaps:
    """`core.layers.taps.Tap` for these layers."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._layers = frozenset(layers)
        self._states: dict[int, Tensor] = {}

    def __call__(self, layer: int, stream: Callable[[], Tensor]) -> None:
        """Keep a copy of the stream after a layer, since later layers may write over it."""
        if layer in self._layers:
            self._states[layer] = stream().to(torch.float32, copy=True)

    def take(self) -> SentStates:
        """The states of the step that was just computed, on their way to the host.

        Raises: StepFault if the model never showed them.
        """
        return SentStates({layer: send_apart(state_TD) for layer, state_TD in self.taken().items()})

    def taken(self) -> dict[int, Tensor]:
        """The states of the step that was just computed, on the device, by layer. Raises: as `take` does."""
        states, self._states = self._states, {}
        if missing := sorted(self._layers.difference(states)):
            raise StepFault(
                f"engine.taps asks for layers {missing}, which the model does not show, since its forward does not use "
                "hookline.core.layers.tapped; leave engine.taps out"
            )
        return states


@dataclass(frozen=True)
class SentStates:
    """Hidden states on their way to the host, by layer."""

    parts: Mapping[int, TransferredTokens]

    def wait(self) -> dict[int, VectorArray]:
        """Wait for them: (T, D) float32 each, the layers in ascending order."""
        return {layer: self.parts[layer].wait().view("float32") for layer in sorted(self.parts)}
