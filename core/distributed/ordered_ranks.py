"""Ranks whose sums of a row do not depend on the number of rows: each gathers all partial sums and adds them in order.

torch.distributed, exchanges and copies choose an algorithm, and with it the order of addition, by the number of rows.
Here there is one algorithm for all, in float32 and rounded once; it moves more bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from hookline.core.distributed.process_group import ProcessRanks, c10d
from hookline.core.distributed.ranks import LocalRanks


@dataclass(frozen=True)
class OrderedRanks(ProcessRanks):
    """ProcessRanks that add partial sums in the order of the ranks."""

    def _sum(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        self._run(lambda: self.group._allgather_base(parts, x.contiguous(), options))
        first, *others = parts.view(self.size, *x.shape)
        total = first.float()
        for part in others:
            total += part
        return x.copy_(total)


def in_order(ranks: LocalRanks) -> LocalRanks:
    """These ranks as OrderedRanks; a single rank, which has nothing to add, as it is."""
    if not isinstance(ranks, ProcessRanks):
        return ranks
    return OrderedRanks(**{one.name: getattr(ranks, one.name) for one in fields(ranks)})
