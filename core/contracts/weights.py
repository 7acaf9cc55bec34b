"""Where a checkpoint's tensors come from, and which parameter of a model each of them fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


class LosesFractions(TypeError):
    """A tensor of floats was to fill a view of integers, which would cut off the fractions."""


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """Where one checkpoint tensor goes on this rank.

    view: this rank's part of a parameter; None for a tensor that checkpoints may have and this model does not need.
    shape: of the whole tensor in the checkpoint. dim, start, stop, step: the rank reads every step-th index in [start,
    stop) of dimension dim; dim None reads it whole. transposed: the stored tensor has the view's last two dimensions
    exchanged. add: a number added to each element, e.g. 1 if a checkpoint stores a norm's weights minus 1. times: a
    number by which each is then multiplied, in the view's dtype. more: further parts of the same tensor, for other
    views. init: how random weights are drawn for it, with weights=random.
    tied_to: see `tied`.
    write, dtypes: see `converted`.
    """

    view: Tensor | None
    shape: tuple[int, ...] = ()
    dim: int | None = None
    start: int = 0
    stop: int = 0
    init: Init = "normal"
    step: int = 1
    transposed: bool = False
    add: float = 0.0
    times: float = 1.0
    more: tuple[WeightTarget, ...] = ()
    tied_to: Tensor | None = None
    write: Callable[[Any], None] | None = None
    dtypes: tuple[str, ...] = ()

    @classmethod
    def whole(cls, view: Tensor, *, init: Init = "normal", add: float = 0.0, times: float = 1.0) -> WeightTarget:
        """A tensor every rank holds whole."""
        return cls(view, tuple(view.shape), init=init, add=add, times=times)

    @classmethod
    def shard(cls, view: Tensor, dim: int, part: Part, *, init: Init = "normal") -> WeightTarget:
        """A tensor split along `dim`; `view` has this part's size there."""
        assert view.shape[dim] == part.size, (view.shape, dim, part)
        shape = (*view.shape[:dim], part.total, *view.shape[dim + 1 :])
        return cls(view, tuple(shape), dim, part.start, part.stop, init)

    @classmethod
    def ignored(cls) -> WeightTarget:
        """A tensor that checkpoints may hold and this model does not need.

        Under a name that ends with `*` it stands for all tensors whose names begin so.
        """
        return cls(None)

    @classmethod
    def tied(cls, weight: Tensor) -> WeightTarget:
        """An output head that shares the embedding's weight, as config.json says.

        weight: the embedding's parameter, of whose memory the embedding's target is a view. If the checkpoint stores
        the head without the embedding, the head fills the embedding. If it stores both with different values, core
        builds the model again with tie_word_embeddings=false and loads both.
        """
        return cls(None, tied_to=weight)

    @classmethod
    def converted(
        cls, view: Tensor, shape: Sequence[int], write: Callable[[Any], None], dtypes: Sequence[str] = ()
    ) -> WeightTarget:
        """A tensor that a function converts when it is loaded, e.g. a quantised one.

        view: the memory that it fills. shape: of the whole tensor; the stored one may have more or fewer sizes of 1 at
        its end. write: gets the whole tensor, or an object that is indexed like it, and writes this rank's part to the
        view; raises CheckpointError for impossible values. dtypes: safetensors' names of the dtypes that the tensor may
        have; empty means any float.
        """
        return cls(view, tuple(shape), write=write, dtypes=tuple(dtypes))

    @classmethod
    def joined(cls, targets: Sequence[WeightTarget], dim: int = 0) -> WeightTarget:
        """One checkpoint tensor that holds several, concatenated along `dim`, e.g. queries, keys and values.

        Each target is whole, or split along the same dimension.
        """
        sizes = [target.shape[dim] for target in targets]
        pieces = [
            target._within(dim, sum(sizes), offset=sum(sizes[:index]), step=1) for index, target in enumerate(targets)
        ]
        return replace(pieces[0], more=tuple(pieces[1:]))

    @classmethod
    def interleaved(cls, targets: Sequence[WeightTarget], dim: int) -> WeightTarget:
        """One checkpoint tensor that holds several of equal size, interleaved along `dim`: all elements 0, then all 1 …

        Each target is whole, or split along the same dimension.
        """
        sizes, count = [target.shape[dim] for target in targets], len(targets)
        assert len(set(sizes)) == 1, sizes
        pieces = [target._within(dim, sum(sizes), offset=index, step=count) for index, target in enumerate(targets)]
        return replace(pieces[0], more=tuple(pieces[1:]))

    def transpose(self) -> WeightTarget:
        """The target for a checkpoint that stores the last two dimensions exchanged. A vector's does not change."""
        rank = len(self.shape)
        if rank < 2:
            return self
        *front, first, second = self.shape
        turned = {rank - 2: rank - 1, rank - 1: rank - 2}
        dim = None if self.dim is None else turned.get(self.dim, self.dim)
        more = tuple(target.transpose() for target in self.more)
        return replace(self, shape=(*front, second, first), dim=dim, transposed=not self.transposed, more=more)

    @property
    def pieces(self) -> tuple[WeightTarget, ...]:
        """The target itself and `more` of it; none if the tensor is ignored."""
        return () if self.view is None else (self, *self.more)

    def cut(self, whole: Any) -> Any:
        """The rank's part of the whole tensor, or of an object that is indexed like it, in the shape of `view`.

        Cutting a tensor copies nothing. `more`, `add` and `times` are not applied.
        """
        if self.dim is None:
            found = whole[...]
        else:
            found = whole[(*[slice(None)] * self.dim, slice(self.start, self.stop))]
            if self.step > 1:
                found = found[(*[slice(None)] * self.dim, slice(None, None, self.step))]
        return found.mT if self.transposed else found

    def fill(self, whole: Any) -> None:
        """Write the result of `cut`, plus `add`, times `times`, to the view of every piece; or call `write`.

        Raises: LosesFractions for floats that would go into a view of integers.
        """
        if self.write is not None:
            self.write(whole)
            return
        for piece in self.pieces:
            assert piece.view is not None
            if piece.view.numel():
                found = piece.cut(whole)
                if found.is_floating_point() and not piece.view.is_floating_point():
                    raise LosesFractions(f"{found.dtype} is stored and {piece.view.dtype} is needed")
                piece.view.copy_(found)
                if piece.add:
                    piece.view.add_(piece.add)
                if piece.times != 1.0:
                    piece.view.mul_(piece.times)

    def _within(self, dim: int, total: int, *, offset: int, step: int) -> WeightTarget:
        """The target as part of a tensor of `total` along `dim`: its element i is that tensor's offset + i * step."""
        assert not self.more and self.write is None and self.dim in (None, dim) and self.step == 1, self
        start, stop = (0, self.shape[dim]) if self.dim is None else (self.start, self.stop)
        shape = (*self.shape[:dim], total, *self.shape[dim + 1 :])
        first = offset + start * step
        last = offset + (stop - 1) * step
        return replace(self, shape=shape, dim=dim, start=first, stop=max(first, last + 1), step=step)


@dataclass(frozen=True)
class MatrixPiece:
    """One linear's part of a rank's matrix: the matrix rows from `row` on, with all columns.

    name: of the linear, without `.weight`. rows, columns: this rank's part of the linear's outputs and inputs. A linear
    that holds several matrices in one tensor has a piece for each. expert: index of the expert whose matrix it is;
    None outside of experts.
    """

    name: str
    row: int
    rows: Part
    columns: Part
    expert: int | None = None


class Weight(Protocol):
    """The matrix (O, D) of a linear on one rank, and its products.

    A layer gets it from `Runtime.weights` when it is built, and names its tensors later, by `targets`.
    """

    prepared: Any
    """The quantised matrix in the layout of Kernels.prepare_weight, once it is loaded; None for a plain weight."""

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """Kernels.linear with this matrix: (T, D) -> (T, O)."""
        ...

    def linear_silu_mul(self, x_TD: Tensor, then: Any = None) -> Any:
        """Kernels.linear_silu_mul with this matrix (2F, D), gate then up: (T, D) -> (T, F).

        then: `prepared` of the only weight that the result is multiplied with; see Kernels.quantized_linear_silu_mul.
        """
        ...

    def linear_add_rms_norm(
        self, x_TD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor, eps: float,
        then: Any = None,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """Kernels.add_rms_norm of the sum over ranks of `linear` and the residual. May overwrite the residual.

        then: as for linear_silu_mul, for the norm.
        """
        ...

    def targets(self, pieces: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        """Checkpoint name of each tensor of these linears -> where it goes. Together the pieces are the whole matrix.

        Called at most once, before any product.
        """
        ...

    def plain(self) -> Tensor:
        """The matrix in the model's dtype (O, D), for a layer that builds its weight targets without `targets`.

        Called before `targets`, it makes the weight a plain one.
        """
        ...


class ExpertWeights(Protocol):
    """The matrices of a rank's experts: (X, 2F, D), gate then up, and (X, D, F)."""

    def mlp(self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor) -> Tensor:
        """Kernels.expert_mlp with these matrices: (T, D) -> (T, D)."""
        ...

    def mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks of `mlp` and the residual. May overwrite the residual."""
        ...

    def targets(self, gate_up: Sequence[MatrixPiece], down: Sequence[MatrixPiece]) -> dict[str, WeightTarget]:
        """As Weight.targets, for the pieces of both matrices of all experts."""
        ...


class CheckpointSource(Protocol):
    """A checkpoint that is not a folder of safetensors: the result of `OpensCheckpoint.open_checkpoint`.

    Small enough to be pickled: another process opens its files itself. A tensor is read only when `read` asks for it.
    """

    def config(self) -> dict[str, Any]:
        """The values of a config.json, `eos_token_id` among them."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, under the names that `weight_targets` uses."""
        ...

    def read(self, name: str) -> Any:
        """A whole tensor, on the CPU: floats of any dtype, or integers if its target's view holds integers.

        Or an object with its shape that is indexed like it, by ranges, as the targets' `write` and `cut` do.

        Called once for each tensor that is needed, one at a time; once more for an embedding and a head tied to it if
        both are stored.
        """
        ...

    def tokenizer(self) -> Any:
        """A transformers tokenizer; None if there is none."""
        ...


class OpensCheckpoint(Protocol):
    """For a model class whose weights may be in a form that core cannot read; a method besides Model's.

    A quantization may have it too, besides Quantization's methods: it is asked about a file whose suffix is one of its
    registered methods, or a folder with one such file and no safetensors. A tokenizer beside the file is used before
    the source's. The quantization gets `quantization_config` of the source's config in its StoredForm.
    """

    @classmethod
    def open_checkpoint(cls, config: Any) -> CheckpointSource | None:
        """The checkpoint that the option's config names; None: core opens it. With weights=random no tensor is read.

        Raises: CheckpointError with the fix, also for a file in its format that holds a model which it does not serve:
                with model=auto, core then asks the other model classes.
        """
        ...


class RenamesTensors(Protocol):
    """For a model whose checkpoints do not have the tensor names of `weight_targets`; a method besides Model's.

    If its runtime has `weights`, it passes the method to `runtime.weights.rename` before it builds layers, since a
    quantization knows linears by the checkpoint's names.
    """

    def tensor_name(self, stored: str) -> str | None:
        """The name in weight_targets of a tensor in the checkpoint's files; None if the model does not need it.

        When:   called once for each tensor, before any is read.
        """
        ...


class FitsTargets(Protocol):
    """For a model whose checkpoints hold the same weights in several forms; a method besides Model's."""

    def targets_for(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, WeightTarget]:
        """The targets for a folder with tensors of these shapes, by the model's names.

        When:   after `weight_targets`, whose result it replaces, and before a tensor is read.
        """
        ...
