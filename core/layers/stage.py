"""The layers of a model that are a rank's, their ends, and taps of the residual stream between them.

A model is cut into stages of consecutive layers for pipeline parallelism: the first stage has the embedding, the last
one the final norm and the head, and between stages travels the residual stream. With one stage all of it is the plain
model. Taps show the stream after a layer to observers and step extensions that asked for it.
Legend: T tokens of a step, N rows wanted, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar, overload

from torch import Tensor

from hookline.core.contracts import Runtime, WeightTarget
from hookline.core.layers.residual import Residual
from hookline.core.layers.weights import empty_parameter


class LayerWithWeights(Protocol):
    """A layer with targets for its checkpoint tensors."""

    def weight_targets(self) -> dict[str, WeightTarget]:
        """See Model."""
        ...


Layer = TypeVar("Layer", bound=LayerWithWeights)
"""A model's own class of layers."""
Kept = TypeVar("Kept")
"""The type of a model's layers."""
Tap = Callable[[int, Callable[[], Tensor]], Tensor | None]
"""tap(index, stream): called after each layer; stream() is the residual stream at that point. Returns the stream that
the next layer continues with, or None for that one."""


@dataclass(frozen=True, kw_only=True)
class StageEnds:
    """The part of core's `attend` that `stage_input` and `tapped` read, for classes of `attend` to extend.

    stream_TD: the residual stream of the stage before; None if the model begins with its embedding. tap: None unless
    the stream is read or changed between layers.
    """

    stream_TD: Tensor | None = None
    tap: Tap | None = None

    def with_ends(self, stream_TD: Tensor | None, tap: Tap | None) -> Self:
        """The same with this stream and this tap."""
        return replace(self, stream_TD=stream_TD, tap=tap)


class StageLayers(Sequence[Layer], Generic[Layer]):
    """The layers of this rank's stage, in order. indices: the layers' numbers in the whole model.

    make: builds the layer of an index.
    """

    def __init__(self, make: Callable[[int], Layer], num_layers: int, runtime: Runtime) -> None:
        """Build the layers of runtime.stage, out of num_layers."""
        self._num_layers, self.indices = num_layers, runtime.stage.layers(num_layers)
        self._layers = [make(index) for index in self.indices]

    def __len__(self) -> int:
        """How many layers this rank has."""
        return len(self._layers)

    def __iter__(self) -> Iterator[Layer]:
        """The rank's layers, first one first."""
        return iter(self._layers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | list[Layer]:
        """Counted from this rank's first layer."""
        return self._layers[index]

    def targets(self, name: str) -> dict[str, WeightTarget]:
        """`name.INDEX.*` -> the weights of this stage's layers; tensors of other layers are not read."""
        found = {
            f"{name}.{index}.*": WeightTarget.ignored()
            for index in range(self._num_layers)
            if index not in self.indices
        }
        for layer in self._layers:
            found |= layer.weight_targets()
        return found


def stage_input(embed: Callable[[Tensor], Tensor], token_ids_T: Tensor, attend: Any) -> Tensor:
    """The input of a stage, (T, D): the tokens' embeddings, or the residual stream of the stage before."""
    stream_TD: Tensor | None = getattr(attend, "stream_TD", None)
    return embed(token_ids_T) if stream_TD is None else stream_TD


class FinalNorm:
    """The end of a stage: the model's final norm on the last one, and the residual stream as it is on the others.

    Shapes: the stream, or hidden_TD (T, D) where a model has none -> (T, D), or (N, D) of the rows that were kept.
    """

    def __init__(self, hidden_size: int, eps: float, runtime: Runtime) -> None:
        """Allocate the weight, uninitialised, on runtime.device; nothing but on the last stage."""
        self._kernels, self._eps, self._is_last = runtime.kernels, eps, runtime.stage.is_last
        self.weight_D = empty_parameter(runtime, hidden_size if self._is_last else 0)

    def __call__(self, stream: Residual | Tensor) -> Tensor:
        """Normalise the stream on the last stage; return it unchanged on the others."""
        if isinstance(stream, Tensor):
            return self._kernels.rms_norm(stream, self.weight_D, self._eps) if self._is_last else stream
        return stream.norm(self.weight_D) if self._is_last else stream.stream()

    def targets(self, name: str, *, add: float = 0.0) -> dict[str, WeightTarget]:
        """`name.weight`; add: see WeightTarget."""
        target = WeightTarget.whole(self.weight_D, init="ones", add=add) if self._is_last else WeightTarget.ignored()
        return {f"{name}.weight": target}


def tapped(layers: Sequence[Kept], residual: Residual, attend: Any) -> Sequence[Kept] | Iterator[Kept]:
    """A model's layers, to be iterated over in order; the residual stream after each is shown to its readers.

    Observers read it; step extensions may change it. For a model's forward: `for layer in tapped(self.layers, residual,
    attend)`. Core's `attend` knows whether anything reads the stream; if not, these are the layers themselves, and
    captured graphs hold nothing more.
    """
    tap: Tap | None = getattr(attend, "tap", None)
    return layers if tap is None else _each(layers, residual, tap)


def tapped_stream(layer: int, stream_TD: Tensor, attend: Any) -> Tensor | None:
    """Show the stream after a layer, of a model that has no Residual; the stream to continue with if it was changed.

    layer: counted over the whole model. Returns None if the stream is unchanged: at once if nothing reads it.
    Device: as `tapped`.
    """
    tap: Tap | None = getattr(attend, "tap", None)
    return None if tap is None else tap(layer, lambda: stream_TD)


def _each(layers: Sequence[Kept], residual: Residual, tap: Tap) -> Iterator[Kept]:
    for index, layer in zip(getattr(layers, "indices", range(len(layers))), layers, strict=True):
        yield layer
        if (stream_TD := tap(index, residual.stream)) is not None:
            residual.replace(stream_TD)
