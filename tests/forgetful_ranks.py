"""Ranks as threads that know of a residual only the rows they add up, as real ones do where that is faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Kernels
from hookline.core.distributed.peer_copies import own_rows
from hookline.core.testing.model_suite.thread_ranks import ThreadRanks


@dataclass(frozen=True)
class ForgetfulRanks(ThreadRanks):
    """As sums by copies or by rows leave it: of a residual a rank knows only the rows it adds up, others: NaN."""

    def num_chunks(self, num_rows: int) -> int:
        return 3

    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        return True

    def linear_add_rms_norm(self, *arguments: Any) -> Any:
        raise AssertionError("asks for a residual that is known whole")

    def add_rms_norm_each(
        self, kernels: Kernels, partials: Iterable[Tensor], residual_chunks: list[Tensor], weight_D: Tensor, eps: float
    ) -> Iterator[Tensor]:
        for index, partial_TD in enumerate(partials):
            own = own_rows(len(partial_TD), self.rank, self.size)
            residual_TD = self.all_reduce(self._own_alone(residual_chunks[index], own, 0.0))
            normed_TD, sum_TD = kernels.add_rms_norm(self.all_reduce(partial_TD), residual_TD, weight_D, eps)
            residual_chunks[index] = self._own_alone(sum_TD, own, torch.nan)
            yield normed_TD

    def residual_rows(self, residual_chunks: list[Tensor], rows_N: Tensor) -> Tensor:
        slices = [own_rows(len(chunk_TD), self.rank, self.size) for chunk_TD in residual_chunks]
        known = [self._own_alone(*chunk, 0.0) for chunk in zip(residual_chunks, slices, strict=True)]
        return self.all_reduce(super().residual_rows(known, rows_N))

    def _own_alone(self, x_TD: Tensor, own: slice, other: float) -> Tensor:
        alone_TD = torch.full_like(x_TD, other)
        alone_TD[own] = x_TD[own]
        return alone_TD


class ForgetfulWholes(ForgetfulRanks):
    """The same of a residual in one piece."""

    def num_chunks(self, num_rows: int) -> int:
        return 1
