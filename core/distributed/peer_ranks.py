"""Ranks whose GPUs read each other's memory, and use it for collectives.

Collectives of few rows go through kernels that offer an exchange, sums of many rows through copies beside the products,
and all others through torch.distributed, as in ProcessRanks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import MIN_SLOT_BYTES, AttentionSpec, Exchange, Kernels, PeerMemory, is_offered
from hookline.core.distributed.aborts import on_every_queue
from hookline.core.distributed.cuda_driver import Driver
from hookline.core.distributed.peer_copies import Layout, PeerCopies, SideStreams
from hookline.core.distributed.peer_memory import all_reach_each_other, share_blocks, share_memory
from hookline.core.distributed.process_group import ProcessRanks
from hookline.core.distributed.ranks import LEAST_ROWS, LocalRanks
from hookline.core.distributed.side_stream import SideStream
from hookline.core.distributed.signal_board import share_board
from hookline.core.errors import PluginError
from hookline.core.plugin.check_contract import methods_fault

logger = logging.getLogger("hookline")
MAX_ROWS = 512
"""Most rows of a sum through the exchange: enough for decodes and captured prefills, but not for large prefills."""


@dataclass(frozen=True)
class PeerRanks(ProcessRanks):
    """ProcessRanks with an exchange, with copies, or with both."""

    exchange: Exchange | None = None
    copies: PeerCopies | None = None

    def reached_exchange(self) -> None:
        """Count progress of the host alone: a mark on the device after every small sum would cost more than the sum."""
        if self.heartbeat is not None:
            self.heartbeat.advance()

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Ranks."""
        if self.exchange is not None and self.exchange.fits(x):
            self.reached_exchange()
            return self.exchange.all_reduce(x)
        return super().all_reduce(x)

    def add_rms_norm(
        self, kernels: Kernels, partial_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See Ranks."""
        if self.exchange is not None and self.exchange.fits(partial_TD):
            self.reached_exchange()
            return self.exchange.add_rms_norm(partial_TD, residual_TD, weight_D, eps)
        return super().add_rms_norm(kernels, partial_TD, residual_TD, weight_D, eps)

    def linear_add_rms_norm(
        self, kernels: Kernels, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor,
        norm_weight_O: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Ranks."""
        given = x_TD, weight_OD, bias_O, residual_TO, norm_weight_O, eps
        results = None if self.exchange is None else self.exchange.linear_add_rms_norm(*given)
        if results is None:
            return super().linear_add_rms_norm(kernels, *given)
        self.reached_exchange()
        return results

    def keeps_own_rows(self, residual_TD: Tensor) -> bool:
        """See Ranks."""
        return self.exchange is not None and self.exchange.keeps_own_rows(residual_TD)

    def add_rms_norm_each(
        self, kernels: Kernels, partials: Iterable[Tensor], residual_chunks: list[Tensor], weight_D: Tensor, eps: float
    ) -> Iterator[Tensor]:
        """See Ranks."""
        if len(residual_chunks) == 1 and self.keeps_own_rows(residual_chunks[0]):
            return (self._norm_of_own(kernels, one_TD, residual_chunks[0], weight_D, eps) for one_TD in partials)
        copies = self._copies_for(residual_chunks)
        if copies is None:
            return super().add_rms_norm_each(kernels, partials, residual_chunks, weight_D, eps)
        self.reached_collective()
        return copies.add_rms_norm_each(kernels, partials, residual_chunks, weight_D, eps)

    def residual_rows(self, residual_chunks: list[Tensor], rows_N: Tensor) -> Tensor:
        """See Ranks."""
        rows_ND = super().residual_rows(residual_chunks, rows_N)
        copies = self._copies_for(residual_chunks)
        if len(residual_chunks) == 1 and self.keeps_own_rows(residual_chunks[0]):
            is_own_N = rows_N % self.size == self.rank
        elif copies is not None:
            is_own_N = copies.is_own(residual_chunks).index_select(0, rows_N)
        else:
            return rows_ND
        return self.all_reduce(rows_ND.masked_fill_(~is_own_N.unsqueeze(1), 0))

    def _norm_of_own(
        self, kernels: Kernels, partial_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """The norm. The sum is written over the residual, of which only this rank's rows are valid."""
        exchange = self.exchange
        assert exchange is not None
        is_like = partial_TD.dtype == weight_D.dtype == residual_TD.dtype and weight_D.is_contiguous()
        if is_like and exchange.fits(partial_TD):
            self.reached_exchange()
            return exchange.add_rms_norm_own(partial_TD, residual_TD, weight_D, eps)
        whole_TD = self.residual_rows([residual_TD], torch.arange(len(residual_TD), device=residual_TD.device))
        normed_TD, sum_TD = self.add_rms_norm(kernels, partial_TD, whole_TD, weight_D, eps)
        residual_TD.copy_(sum_TD)
        return normed_TD

    def _copies_for(self, residual_chunks: list[Tensor]) -> PeerCopies | None:
        """The copies, if sums of such chunks go through them."""
        copies = None if len(residual_chunks) == 1 else self.copies
        return None if copies is None or not copies.fits(residual_chunks) or _is_capturing() else copies

    def best_tokens(self, scores_N: Tensor, tokens_N: Tensor) -> Tensor:
        """See Ranks."""
        if self.exchange is not None:
            self.reached_exchange()
            return self.exchange.best_tokens(scores_N, tokens_N)
        return super().best_tokens(scores_N, tokens_N)


def with_exchange(ranks: LocalRanks, kernels: Kernels, spec: AttentionSpec, hidden_size: int) -> LocalRanks:
    """The same ranks with an exchange, if they are GPUs that reach each other and the kernels offer one.

    Raises: CapacityError if memory for the exchanged rows is missing; PluginError if the exchange lacks a method.
    """
    if not isinstance(ranks, ProcessRanks) or spec.device.type != "cuda" or not is_offered(kernels.exchange):
        return ranks
    num_slots = min(MAX_ROWS, spec.max_num_batched_tokens)
    slot_bytes = max(MIN_SLOT_BYTES, -(-hidden_size * spec.dtype.itemsize // 16) * 16)
    reachable, driver = all_reach_each_other(ranks, spec.device), Driver()
    peers = share_memory(ranks, num_slots, slot_bytes, spec.device, driver) if reachable else None
    if peers is None:
        if ranks.rank == 0:
            logger.warning("the GPUs cannot read or signal in each other's memory, so nccl alone sums over the ranks")
        return ranks
    ranks.shared.append(peers.close)
    warm_up = partial(driver.signal, int(peers.addresses_R[ranks.rank]), 0)
    ranks.releases.add(on_every_queue(peers.let_go, warm_up, spec.device))
    return _extended(ranks, exchange=make_exchange(kernels, peers))


def make_exchange(kernels: Kernels, peers: PeerMemory) -> Exchange:
    """The kernels' exchange over this memory.

    Raises: PluginError if it does not keep its contract.
    """
    exchange = kernels.exchange(peers)
    fault = methods_fault(type(exchange), Exchange)
    if fault is not None:
        name = type(kernels).__name__
        raise PluginError(f"the exchange of {name} does not keep its contract: {fault}")
    return exchange


def with_copies(ranks: LocalRanks, spec: AttentionSpec, hidden_size: int) -> LocalRanks:
    """The same ranks with copies for sums of many rows, if they are GPUs that reach each other and steps are so large.

    Raises: CapacityError if there is no memory for the copied rows.
    """
    if not isinstance(ranks, ProcessRanks) or spec.device.type != "cuda":
        return ranks
    if spec.max_num_batched_tokens < LEAST_ROWS or not all_reach_each_other(ranks, spec.device):
        return ranks
    layout = Layout.of(ranks.size, spec.max_num_batched_tokens, hidden_size * spec.dtype.itemsize)
    blocks = share_blocks(ranks, layout.num_bytes, spec.device, Driver())
    if blocks is None:
        return ranks
    ranks.shared.append(blocks.close)
    board = share_board(ranks, layout.num_signals, spec.device, blocks.driver)
    if board is None:
        ranks.shared.pop()()
        if ranks.rank == 0:
            logger.warning("the GPUs' streams cannot signal each other in host memory, so nccl alone sums up many rows")
        return ranks
    ranks.shared.append(board.close)
    side_streams = SideStreams(*(SideStream(spec.device) for _ in range(3)))
    copies = PeerCopies(ranks, layout, blocks.addresses, blocks.memory(spec.device), board, side_streams)
    ranks.releases.add(copies.let_go, by_host=True)
    return _extended(ranks, copies=copies)


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: it would repeat the same signals, which the host has to count up."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _extended(ranks: ProcessRanks, **parts: Any) -> PeerRanks:
    """PeerRanks with the fields of these ranks, and with these parts."""
    return PeerRanks(**{one.name: getattr(ranks, one.name) for one in fields(ranks)} | parts)
