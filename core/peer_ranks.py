"""Ranks whose small collectives go through the GPUs' view of each other's memory, by kernels that offer an exchange.

The large ones go through torch.distributed as before. Knows neither the memory's layout nor the kernels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from core.contracts import AttentionSpec, Exchange, Kernels
from core.parallel import Ranks
from core.peer_memory import MIN_SLOT_BYTES, PeerMemory, share_memory
from core.process_ranks import ProcessRanks

logger = logging.getLogger("hookline")
MAX_ROWS = 512
"""Most rows of a sum through the exchange: decodes and captured prefills, not the large prefills."""


@dataclass(frozen=True)
class PeerRanks(ProcessRanks):
    """ProcessRanks with an exchange."""

    exchange: Exchange | None = None
    peers: PeerMemory | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Ranks."""
        if self.exchange is not None and self.exchange.fits(x):
            return self.exchange.all_reduce(x)
        return super().all_reduce(x)

    def add_rms_norm(
        self, kernels: Kernels, partial_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See Ranks."""
        if self.exchange is not None and self.exchange.fits(partial_TD):
            return self.exchange.add_rms_norm(partial_TD, residual_TD, weight_D, eps)
        return super().add_rms_norm(kernels, partial_TD, residual_TD, weight_D, eps)

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See Ranks."""
        if self.exchange is not None:
            return self.exchange.best_tokens(scores_N, tokens_N)
        return super().best_tokens(scores_N, tokens_N)

    def close(self) -> None:
        """See Ranks."""
        super().close()
        if self.peers is not None:
            self.peers.close()


def with_exchange(ranks: Ranks, kernels: Kernels, spec: AttentionSpec, hidden_size: int) -> Ranks:
    """The same ranks with an exchange, if they are GPUs that reach each other and the kernels offer one."""
    offered: Any = getattr(kernels, "exchange", None)
    if not isinstance(ranks, ProcessRanks) or spec.device.type != "cuda" or offered is None:
        return ranks
    num_slots = -(-min(MAX_ROWS, spec.max_num_batched_tokens) // ranks.size) * ranks.size
    slot_bytes = max(MIN_SLOT_BYTES, hidden_size * spec.dtype.itemsize)
    peers = share_memory(ranks, num_slots, slot_bytes, spec.device)
    if peers is None:
        if ranks.rank == 0:
            logger.warning("the GPUs cannot read each other's memory, so nccl alone sums over the ranks")
        return ranks
    ranks.releases.append(peers.let_go)
    return PeerRanks(
        ranks.rank, ranks.size, ranks.group, ranks.pulse, ranks.releases, ranks.aside, offered(peers), peers
    )
