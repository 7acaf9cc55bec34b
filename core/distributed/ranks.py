"""The rank group: this rank's number among the tensor-parallel ranks, and the few collectives that layers need.

With one rank every collective is the identity and nothing is initialised. The rows of a step may be cut into chunks:
while one chunk's product is summed over the ranks, the next chunk's is computed. Layers that compute each row by itself
may take the chunks one by one; attention needs all rows.
Legend: T tokens, N rows wanted, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hookline.core.contracts import Kernels

Value = TypeVar("Value")
ROW_TILE = 256
"""Chunks are multiples of this many rows, since matrix products are computed in tiles of as many."""
MOST_CHUNKS = 4
LEAST_ROWS = 4096
"""Fewer rows are not cut: small chunks cost as much in launches and slower products as hiding the sums saves
(docs/log)."""


@dataclass(frozen=True)
class LocalRanks:
    """A rank of a tensor-parallel group. This class itself is for a single rank, or for a rank not yet connected.

    group: a subclass' communication backend; None here. stage, num_stages: if the model is cut into stages, each stage
    has such a group. links: to the other stages, once they are connected.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    stage: int = field(default=0, kw_only=True)
    num_stages: int = field(default=1, kw_only=True)
    links: Any = field(default=None, kw_only=True)
    shares_host: bool = field(default=True, kw_only=True)
    """Whether all ranks are on one host, with their GPUs numbered as they are."""

    @classmethod
    def numbered(cls, number: int, tp: int, pp: int) -> LocalRanks:
        """The rank of this number among the tp * pp of an engine."""
        return cls(number % tp, tp, stage=number // tp, num_stages=pp)

    @property
    def number(self) -> int:
        """Among all ranks of the engine; rank 0 has the host's side."""
        return self.stage * self.size + self.rank

    @property
    def num_all(self) -> int:
        """All ranks of the engine."""
        return self.num_stages * self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return self._alone(x)

    def all_gather_last(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return self._alone(x)

    def smallest(self, value: int) -> int:
        """See Ranks."""
        return self._alone(value)

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See Ranks. One exchange, of 16 bytes a row."""
        if self.size == 1:
            return tokens_N
        pairs_N2 = torch.stack([scores_N.contiguous().view(torch.int32).long(), tokens_N], dim=1)
        pairs_NR2 = self.all_gather_last(pairs_N2).view(-1, self.size, 2)
        scores_NR = pairs_NR2[:, :, 0].to(torch.int32).view(torch.float32)
        return pairs_NR2[:, :, 1].gather(1, scores_NR.argmax(1, keepdim=True)).squeeze(1)

    def add_rms_norm(
        self, kernels: Kernels, partial_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See Ranks."""
        return kernels.add_rms_norm(self.all_reduce(partial_TD), residual_TD, weight_D, eps)

    def linear_add_rms_norm(
        self, kernels: Kernels, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor,
        norm_weight_O: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Ranks."""
        if self.size == 1:
            return kernels.linear_add_rms_norm(x_TD, weight_OD, bias_O, residual_TO, norm_weight_O, eps)
        partial_TO = kernels.linear(x_TD, weight_OD, bias_O)
        return self.add_rms_norm(kernels, partial_TO, residual_TO, norm_weight_O, eps)

    def num_chunks(self, num_rows: int) -> int:
        """See Ranks."""
        return 1

    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        """See Ranks."""
        return False

    def add_rms_norm_each(
        self, kernels: Kernels, partials: Iterable[Tensor], residual_chunks: list[Tensor], weight_D: Tensor, eps: float
    ) -> Iterator[Tensor]:
        """See Ranks."""
        for index, partial_TD in enumerate(partials):
            normed_TD, residual_chunks[index] = self.add_rms_norm(
                kernels, partial_TD, residual_chunks[index], weight_D, eps
            )
            yield normed_TD

    def residual_rows(self, residual_chunks: list[Tensor], rows_N: Tensor) -> Tensor:
        """See Ranks."""
        return whole(residual_chunks).index_select(0, rows_N)

    def abort(self) -> None:
        """Break off whatever this rank waits for; called from another thread."""

    def close(self) -> None:
        """Close the connections to other ranks and free their shared memory; a second call does nothing."""

    @property
    def is_free(self) -> bool:
        """Whether this rank's GPU is done after `close`. If it is not, freeing memory would block."""
        return True

    def _alone(self, value: Value) -> Value:
        assert self.size == 1, f"{type(self).__name__} cannot reach the other {self.size - 1} ranks"
        return value


def bytes_of_all(ranks: LocalRanks, mine: bytes, device: torch.device) -> list[bytes]:
    """Gather each rank's bytes, in order of rank; all ranks must give equally many."""
    mine_X = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    all_RX = ranks.all_gather_last(mine_X.unsqueeze(0)).view(ranks.size, len(mine)).cpu()
    return [bytes(one_X.tolist()) for one_X in all_RX]


def sensible_chunks(num_rows: int) -> int:
    """How many chunks to cut a step into, so that the sums of some run beside the products of others."""
    return 1 if num_rows < LEAST_ROWS else max(2, min(MOST_CHUNKS, num_rows // LEAST_ROWS))


def cut(x_TD: Tensor, num_chunks: int) -> list[Tensor]:
    """Views of the rows in this many nearly equal chunks; in fewer, but at least one, if there are too few rows."""
    num_rows = x_TD.shape[0]
    num_tiles = -(-num_rows // ROW_TILE)
    num_chunks = max(1, min(num_chunks, num_tiles))
    stops = [min(num_rows, -(-num_tiles * chunk // num_chunks) * ROW_TILE) for chunk in range(1, num_chunks + 1)]
    return [x_TD[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def cut_like(x_TD: Tensor, chunks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of the rows in pieces as long as these chunks."""
    return torch.split(x_TD, [len(chunk) for chunk in chunks])


def whole(chunks: Iterable[Tensor]) -> Tensor:
    """All chunks in one tensor; a single chunk is returned as it is."""
    parts = list(chunks)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


ALONE = LocalRanks()
"""The group of a single rank."""
