"""Ranks whose sums do not depend on how much is summed: every rank gathers all partial sums and adds them in order.

torch.distributed, exchanges and copies choose their way, and with it the order of a sum, by the number of rows. This
takes one way for all of them, in float32 and rounded once; it moves more bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from hookline.core.distributed.process_group import ProcessRanks, c10d
from hookline.core.distributed.ranks import LocalRanks


@dataclass(frozen=True)
class OrderedRanks(ProcessRanks):
    """ProcessRanks that add up in the order of the ranks."""

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
    """The same ranks, adding up in their order; a single one has nothing to add."""
    if not isinstance(ranks, ProcessRanks):
        return ranks
    return OrderedRanks(**{one.name: getattr(ranks, one.name) for one in fields(ranks)})
