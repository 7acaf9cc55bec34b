"""Hidden states for observers, of a model that is cut into stages, on their way to the first stage's host.

They travel with the residual stream: each stage sends the hidden states that it received and its own to the next stage,
and the last stage sends them all to the first, which keeps its own. Legend: T tokens of a micro-batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Stage
from hookline.core.step.message import Axis
from hookline.core.step.micro_batches import MicroBatch, joined
from hookline.core.util.arrays import VectorArray
from hookline.core.worker.results.layer_taps import LayerTaps
from hookline.core.worker.results.token_transfer import Rows, send_apart
from hookline.core.worker.stages.returned_tokens import ReturnedTokens, StageLink


@dataclass(frozen=True)
class StageStates:
    """The states of a step, by its micro-batches and by layer."""

    parts: Sequence[MicroBatch]
    states: Sequence[Mapping[int, Rows]]

    def wait(self) -> dict[int, VectorArray]:
        """Wait for them: (T, D) float32 of the whole step, the layers in ascending order."""
        return {
            layer: joined(self.parts, [one[layer].wait().view(np.float32) for one in self.states], Axis.TOKEN)
            for layer in sorted(self.states[0])
        }


class StageTaps:
    """One stage's part in passing on hidden states.

    own: taps of the stage's own layers; None if none of them is asked for. before: the layers whose states come from
    the stage before. behind: the layers of all stages but the first, whose states the last stage sends to it.
    """

    def __init__(
        self,
        stage: Stage,
        links: StageLink,
        own: LayerTaps | None,
        before: Sequence[int],
        behind: Sequence[int],
        hidden_size: int,
        device: torch.device,
    ) -> None:
        self._stage, self._links, self._own, self._before, self._behind = stage, links, own, before, behind
        self._hidden_size, self._device = hidden_size, device
        self._kept: list[dict[int, Tensor]] = []

    def begin_step(self) -> None:
        """Drop what is left of a step that failed half-way."""
        self._kept = []

    def end_part(self, num_tokens: int) -> None:
        """Take the states of a micro-batch that was just computed, and send them on."""
        states = {}
        for layer in self._before:
            states[layer] = self._empty(num_tokens)
            self._links.receive(states[layer])
        if self._own is not None:
            states |= self._own.taken()
        if self._stage.is_first or self._stage.is_last:
            self._kept.append(states)
            return
        for layer in sorted(states):
            self._links.send(states[layer])

    def end_step(self, parts: Sequence[MicroBatch], returned: ReturnedTokens | None) -> StageStates | None:
        """On the last stage, send the states of all micro-batches to the first; there, return them as they arrive."""
        kept, self._kept = self._kept, []
        if self._stage.is_last:
            for states in kept:
                for layer in sorted(states):
                    self._links.send_back(states[layer])
        if returned is None:
            return None
        found = []
        for part, states in zip(parts, kept, strict=True):
            own: dict[int, Rows] = {layer: send_apart(state_TD) for layer, state_TD in states.items()}
            found.append(own | {layer: returned.receive(self._empty(part.step.num_tokens)) for layer in self._behind})
        return StageStates(parts, found)

    def _empty(self, num_tokens: int) -> Tensor:
        return torch.empty(num_tokens, self._hidden_size, dtype=torch.float32, device=self._device)
