"""Where a checkpoint's tensors come from, and where a model wants each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The half-open range [start, stop) of `total` rows (or heads, or columns) that one rank holds."""

    total: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Rows of this rank."""
        return self.stop - self.start

    def times(self, factor: int) -> Part:
        """The same part counted in units `factor` times smaller, e.g. heads -> rows of a weight."""
        return Part(self.total * factor, self.start * factor, self.stop * factor)


Init = Literal["normal", "ones", "zeros"]
"""How `random_weights` draws a tensor."""


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """Where one checkpoint tensor goes on this rank.

    view: this rank's part of a parameter; None if the tensor is known and not needed. shape: of the whole tensor in the
    checkpoint. dim, start, stop: the rank reads [start, stop) of dimension dim; dim None reads it whole.
    """

    view: Tensor | None
    shape: tuple[int, ...] = ()
    dim: int | None = None
    start: int = 0
    stop: int = 0
    init: Init = "normal"

    @classmethod
    def whole(cls, view: Tensor, *, init: Init = "normal") -> WeightTarget:
        """A tensor every rank holds whole."""
        return cls(view, tuple(view.shape), init=init)

    @classmethod
    def shard(cls, view: Tensor, dim: int, part: Part, *, init: Init = "normal") -> WeightTarget:
        """A tensor split along `dim`; `view` has this part's size there."""
        assert view.shape[dim] == part.size, (view.shape, dim, part)
        shape = (*view.shape[:dim], part.total, *view.shape[dim + 1 :])
        return cls(view, tuple(shape), dim, part.start, part.stop, init)

    @classmethod
    def ignored(cls) -> WeightTarget:
        """A tensor that checkpoints may hold and this model does not need, e.g. the head when it is tied."""
        return cls(None)

    def cut(self, whole: Any) -> Any:
        """The rank's slice of the whole tensor, or of anything indexed like one."""
        if self.dim is None:
            return whole[...]
        return whole[(*[slice(None)] * self.dim, slice(self.start, self.stop))]


class CheckpointSource(Protocol):
    """A checkpoint that is no folder of safetensors: what a model class's `open_checkpoint` returns.

    Small enough to be pickled: another process opens its files itself. Nothing is read before it is asked for.
    """

    def config(self) -> dict[str, Any]:
        """The values of a config.json, `eos_token_id` among them."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, under the names that `weight_targets` uses."""
        ...

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU, in any floating dtype. Called once for each that is needed, one at a time."""
        ...

    def tokenizer(self) -> Any:
        """A transformers tokenizer; None if there is none."""
        ...


class OpensCheckpoint(Protocol):
    """What a model class has besides Model's methods if its weights may come from elsewhere than core can read."""

    @classmethod
    def open_checkpoint(cls, config: Any) -> CheckpointSource | None:
        """The checkpoint that the option's config names; None leaves it to core. With weights=random no tensor is read.

        Raises: CheckpointError with what was tried and the fix.
        """
        ...


class RenamesTensors(Protocol):
    """What a model has besides Model's methods if a checkpoint may call its tensors otherwise than `weight_targets`."""

    def tensor_name(self, stored: str) -> str | None:
        """The name that weight_targets has for a tensor of the checkpoint's files; None if the model needs it not.

        When:   once for each tensor, before any is read.
        """
        ...
