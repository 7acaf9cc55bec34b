"""The residual stream of a model: every block reads its norm and adds to it.

With it a layer reads like the paper's figure: norm, attention, add; norm, feed-forward, add. An addition is deferred
until the next norm, so that the sum over ranks, the addition and the norm can be one operation. Ranks may cut the rows
of a large step into chunks, to hide the sums of some behind the products of others.
Legend: T tokens, N rows wanted, D hidden, F features of a block's input.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Protocol

import torch
from torch import Tensor

from hookline.core.contracts import Runtime
from hookline.core.distributed.ranks import cut, cut_like, whole


class SummedBlock(Protocol):
    """A layer whose partial products the ranks add up, as `RowParallelLinear` and `GatedMLP`; for `Residual.add`."""

    def local(self, x_TF: Tensor, /) -> Tensor:
        """Partial sum of this rank, (T, D)."""
        ...

    def add_rms_norm(
        self, x_TF: Tensor, residual_TD: Tensor, norm_weight_D: Tensor, eps: float, /
    ) -> tuple[Tensor, Tensor]:
        """Kernels.add_rms_norm of the sum over ranks and the residual. May overwrite the residual."""
        ...


class _Reader:
    """The quantised matrix that alone multiplies a norm, as far as it is known before the norm is computed."""

    matrix: Any = None


class Residual:
    """The residual stream of one forward, the same on every rank.

    hidden_TD: its first value, the embedding's output; may be overwritten. eps: of every norm.
    in_chunks: whether ranks may cut the rows and sum them chunk by chunk; False where a block of all rows at once is
    much cheaper, as of experts.
    Device: no host sync.
    Raises: RuntimeError for a use of the stream before all chunks of its last norm were taken.
    """

    def __init__(self, hidden_TD: Tensor, eps: float, runtime: Runtime, *, in_chunks: bool = True) -> None:
        """Begin the stream of one forward; nothing is computed yet."""
        self._kernels, self._ranks, self._eps, self._in_chunks = runtime.kernels, runtime.ranks, eps, in_chunks
        self._chunks = cut(hidden_TD, self._ranks.num_chunks(len(hidden_TD)) if in_chunks else 1)
        self._knows_all_rows = True  # of ranks that sum chunk by chunk, each may know only the rows that it sums
        self._added: tuple[Tensor | Iterable[Tensor], SummedBlock] | None = None
        self._norms: Generator[Tensor] | None = None
        self._reader = _Reader()

    def norm(self, weight_D: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The normalised stream, (T, D), after carrying out the last addition; or the result of `then` applied to it.

        then: computes each row by itself, as a linear does. So it need not wait for the sums of other chunks' rows.
        """
        chunks = self.norm_each(weight_D)
        if then is not None:
            self._read(chunks, then)
        return whole(chunks if then is None else map(then, chunks))

    def norm_each(self, weight_D: Tensor) -> Iterator[Tensor]:
        """`norm` by chunks of the rows, each computed when it is asked for. To hand to `add`, mostly through `map`."""
        if self._added is None:
            self._know_all_rows()
            return iter([self._kernels.rms_norm(chunk_TD, weight_D, self._eps) for chunk_TD in self._chunks])
        self._reader = _Reader()
        self._norms, self._added = self._norms_of_sum(*self._added, weight_D, self._reader), None
        return self._norms

    def add(self, x: Tensor | Iterable[Tensor], through: SummedBlock | None = None) -> None:
        """Add x (T, D), the same on every rank; or the sum over the ranks of the block `through` applied to x (T, F).

        x: all rows, or chunks as `norm_each` gives them, each computed by itself.
        """
        if isinstance(x, Tensor):
            self._check_taken()
        self._add_now()
        if through is None:
            self._chunks = [chunk_TD + x_TD for x_TD, chunk_TD in self._with_chunks(x)]
        else:
            self._read(x, through)
            self._added = x, through

    def keep(self, rows_N: Tensor | None) -> None:
        """Continue with these rows alone, (N, D), or with all if None. Later additions have these rows, too.

        For the last layer, after attention: `wanted_rows` names the rows that matter from there on.
        """
        if rows_N is None:
            return
        if self._added is not None:
            x, through = self._added
            self._read(x, None)
            self._added = (x if isinstance(x, Tensor) else whole(x)).index_select(0, rows_N), through
        self._check_taken()
        self._chunks, self._knows_all_rows = [self._rows(rows_N)], True

    def stream(self) -> Tensor:
        """The stream after all additions, (T, D), up to date on every rank; later additions may overwrite it.

        The next norm cannot be fused with the addition then, so this is for observers, not for a model's layers.
        """
        self._add_now()
        self._know_all_rows()
        return whole(self._chunks)

    def replace(self, stream_TD: Tensor) -> None:
        """Continue with this stream, (T, D), the same on every rank, in place of what `stream` returned last."""
        self._chunks = list(cut_like(stream_TD, self._chunks))

    def _read(self, norms: object, block: object) -> None:
        """Note the block that alone reads the last norm, if `norms` is that norm, which is not computed yet."""
        if norms is self._norms:
            self._reader.matrix = getattr(block, "reads", None)

    def _norms_of_sum(
        self, x: Tensor | Iterable[Tensor], through: SummedBlock, weight_D: Tensor, reader: _Reader
    ) -> Generator[Tensor]:
        x_chunks = cut_like(x, self._chunks) if isinstance(x, Tensor) else x
        if len(self._chunks) > 1 or (self._in_chunks and self._ranks.keeps_own_rows(self._chunks[0])):
            self._knows_all_rows = False
            partials = map(through.local, x_chunks)
            yield from self._ranks.add_rms_norm_each(self._kernels, partials, self._chunks, weight_D, self._eps)
            return
        for x_TF in x_chunks:
            then = () if reader.matrix is None or not hasattr(through, "reads") else (reader.matrix,)
            normed_TD, self._chunks[0] = through.add_rms_norm(x_TF, self._chunks[0], weight_D, self._eps, *then)
            yield normed_TD

    def _add_now(self) -> None:
        """Carry out the addition that waits for a norm. Rows that are not up to date on this rank stay so."""
        if self._added is not None:
            (x, through), self._added = self._added, None
            pairs = self._with_chunks(x)
            self._chunks = [chunk_TD + self._ranks.all_reduce(through.local(x_TF)) for x_TF, chunk_TD in pairs]

    def _with_chunks(self, x: Tensor | Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of chunks: of x, and of the stream, which is up to date when all of x has been taken."""
        x_chunks = cut_like(x, self._chunks) if isinstance(x, Tensor) else list(x)
        self._check_taken()
        return zip(x_chunks, self._chunks, strict=True)

    def _know_all_rows(self) -> None:
        """Bring every row up to date on every rank."""
        self._check_taken()
        if not self._knows_all_rows:
            rows_T = torch.arange(sum(map(len, self._chunks)), device=self._chunks[0].device)
            self._chunks, self._knows_all_rows = list(cut_like(self._rows(rows_T), self._chunks)), True

    def _rows(self, rows_N: Tensor) -> Tensor:
        """Rows of the stream, up to date on every rank."""
        if self._in_chunks:
            return self._ranks.residual_rows(self._chunks, rows_N)
        return self._chunks[0].index_select(0, rows_N)

    def _check_taken(self) -> None:
        if self._norms is not None and getgeneratorstate(self._norms) != GEN_CLOSED:
            raise RuntimeError("the residual is used before all chunks of its last norm_each were taken")
