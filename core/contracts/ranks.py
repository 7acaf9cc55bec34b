"""The rank group as a model or a layer sees it: its own rank, and the collectives it may call.

Legend: T tokens, N rows, D hidden, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from hookline.core.contracts.kernels import Kernels


class Ranks(Protocol):
    """One rank of a tensor-parallel group of any size; with one rank every collective is the identity.

    All ranks call the same methods in the same order. Device: no host sync but in `smallest`.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x. All ranks get the same bits."""
        ...

    def all_gather_last(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension: (..., D) -> (..., D * size)."""
        ...

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on the host."""
        ...

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """For each row, the token of the rank with the highest score; in a tie, of the lowest rank. NaN is highest.

        Shapes: scores_N (N,) float32, tokens_N (N,) int64; returns (N,) int64.
        """
        ...

    def add_rms_norm(
        self, kernels: Kernels, partial_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks. May overwrite both inputs."""
        ...

    def linear_add_rms_norm(
        self, kernels: Kernels, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor,
        norm_weight_O: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Kernels.add_rms_norm of the sum over ranks of `linear`, in fewer launches where kernels or ranks can.

        May overwrite the residual.
        """
        ...

    def num_chunks(self, num_rows: int) -> int:
        """How many chunks to cut this many rows into for `add_rms_norm_each`; the same on every rank."""
        ...

    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        """Whether `add_rms_norm_each` keeps only some rows of a residual in one chunk up to date on each rank."""
        ...

    def add_rms_norm_each(
        self, kernels: Kernels, partials: Iterable[Tensor], residual_chunks: list[Tensor], weight_D: Tensor, eps: float
    ) -> Iterator[Tensor]:
        """`add_rms_norm` of each chunk of rows; ranks may reduce a chunk while the caller computes other chunks.

        Replaces each chunk of the residual. A rank may keep up to date only the rows that it will add to, so pass the
        chunks to nothing but the next call and `residual_rows`. All partials may be consumed before the first norm is
        yielded. Consume every norm, and finish with each before the next call computes its partial of the same chunk.
        """
        ...

    def residual_rows(self, residual_chunks: list[Tensor], rows_N: Tensor) -> Tensor:
        """Rows (N, D) of a residual that went through `add_rms_norm_each`, up to date on every rank.

        All norms of that call must have been consumed. The rows are counted over all chunks.
        """
        ...
