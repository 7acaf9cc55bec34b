"""Taps of the residual stream: what it holds after a layer, for observers that asked for it.

Legend: T tokens of a step, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from hookline.core.layers.residual import Residual

Layer = TypeVar("Layer")
"""Whatever the model keeps its layers as."""
Tap = Callable[[int, Callable[[], Tensor]], None]
"""tap(index, stream): called after each layer; stream() is the residual stream at that point."""


def tapped(layers: Sequence[Layer], residual: Residual, attend: Any) -> Sequence[Layer] | Iterator[Layer]:
    """A model's layers, to be iterated over in order, with the stream after each one shown to observers that asked.

    For a model's forward: `for layer in tapped(self.layers, residual, attend)`. Whether hidden states were asked for is
    in core's `attend`; if they were not, these are the layers themselves, and captured graphs hold nothing more.
    """
    tap: Tap | None = getattr(attend, "tap", None)
    return layers if tap is None else _each(layers, residual, tap)


def _each(layers: Sequence[Layer], residual: Residual, tap: Tap) -> Iterator[Layer]:
    for index, layer in zip(getattr(layers, "indices", range(len(layers))), layers, strict=True):
        yield layer
        tap(index, residual.stream)
