"""Taps of the residual stream: what it holds after a layer, for observers and step extensions that asked for it.

Legend: T tokens of a step, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from hookline.core.layers.residual import Residual

Layer = TypeVar("Layer")
"""Whatever the model keeps its layers as."""
Tap = Callable[[int, Callable[[], Tensor]], Tensor | None]
"""tap(index, stream): called after each layer; stream() is the residual stream at that point. Returns the stream that
the next layer continues with, or None for that one."""


def tapped(layers: Sequence[Layer], residual: Residual, attend: Any) -> Sequence[Layer] | Iterator[Layer]:
    """A model's layers, to be iterated over in order, with the stream after each one shown to those that asked.

    Observers see it; step extensions may change it. For a model's forward: `for layer in tapped(self.layers, residual,
    attend)`. Whether the stream was asked for is in core's `attend`; if it was not, these are the layers themselves,
    and captured graphs hold nothing more.
    """
    tap: Tap | None = getattr(attend, "tap", None)
    return layers if tap is None else _each(layers, residual, tap)


def tapped_stream(layer: int, stream_TD: Tensor, attend: Any) -> Tensor | None:
    """Show the stream after a layer, of a model that has no Residual; the stream to continue with if it was changed.

    layer: counted over the whole model. Returns None if the stream is as it was: at once if nobody asked for it.
    Device: as `tapped`.
    """
    tap: Tap | None = getattr(attend, "tap", None)
    return None if tap is None else tap(layer, lambda: stream_TD)


def _each(layers: Sequence[Layer], residual: Residual, tap: Tap) -> Iterator[Layer]:
    for index, layer in zip(getattr(layers, "indices", range(len(layers))), layers, strict=True):
        yield layer
        if (stream_TD := tap(index, residual.stream)) is not None:
            residual.replace(stream_TD)
