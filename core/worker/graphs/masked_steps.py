"""Steps whose draws wait for masks: the model's part at once, and the drawing when the masks are there.

The host learns a token, works out what may follow it and fills the mask while the device computes the next step up to
its hidden states. Of decodes, both halves are CUDA graphs where graphs are captured.
Legend: as in core/worker/request_table.py; G rows of a graph, K draws that have masks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray, no_ints
from hookline.core.worker.graphs.cuda_graph import ExtraGraphs, GraphPool, record
from hookline.core.worker.graphs.decode_graphs import decode_step
from hookline.core.worker.request_table import DeviceStep, SampleRows
from hookline.core.worker.runner.model_runner import Extras, ModelRunner
from hookline.core.worker.runner.token_masks import TokenMasks

logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class WaitingStep:
    """A step that was computed up to its hidden states, and whose draws wait for masks.

    hidden_TD: of all its tokens if prompt tokens are scored, else of the draws. graphs: those that compute the step,
    if there are any; they keep the hidden states, and sampled and hidden_TD are None.
    """

    device_step: DeviceStep
    extras: Extras
    sampled: SampleRows | None = None
    hidden_TD: Tensor | None = None
    graphs: MaskedGraphs | None = None


@dataclass
class MaskedGraphs:
    """The two halves of a decode step, captured for G rows. index_G: the mask of each row.

    fetches: whether every row has a mask; the second half then copies them itself. rows: those that rows_G was last
    written for. num_masked: how many rows index_G was last written for, if it fetches.
    """

    forward: torch.cuda.CUDAGraph
    draw: torch.cuda.CUDAGraph
    rows_G: Tensor
    index_G: Tensor
    tokens_G: Tensor
    fetches: bool
    rows: IntArray = field(default_factory=no_ints)
    num_masked: int = 0

    def begin(
        self, rows_D: Tensor, rows: IntArray, padding_row: int, masks: TokenMasks, masked_draws_K: Tensor
    ) -> None:
        """Compute the hidden states of these rows, and say which of them will have masks. rows: rows_D, on the host."""
        if not np.array_equal(rows, self.rows):
            self.rows_G[: len(rows_D)].copy_(rows_D)
            self.rows_G[len(rows_D) :].fill_(padding_row)
            self.rows = rows.copy()
        if not self.fetches:
            masks.begin()
        self.forward.replay()
        if not self.fetches or len(masked_draws_K) != self.num_masked:  # else it is written already
            masks.write_index(self.index_G, len(rows_D), masked_draws_K)  # behind the draws before, which read it
            self.num_masked = len(masked_draws_K)

    def finish(self, num_draws: int, num_masks: int, masks: TokenMasks) -> Tensor:
        """Draw by the first `num_masks` masks; returns the tokens, or scored rows, valid until the next step."""
        if not self.fetches:
            masks.send(num_masks)
        self.draw.replay()
        return self.tokens_G[:num_draws]


class MaskedDecodes:
    """Pairs of graphs for decode steps with masks, captured when a step first needs one."""

    def __init__(self, runner: ModelRunner, masks: TokenMasks, sizes: Sequence[int], max_model_len: int) -> None:
        self.runner, self.masks, self.sizes, self.max_model_len = runner, masks, list(sizes), max_model_len
        self._graphs: ExtraGraphs[tuple[int, bool, Extras, bool], MaskedGraphs] = ExtraGraphs(runner)

    def graphs(self, step: Step, extras: Extras, pool: GraphPool | None) -> MaskedGraphs:
        """The smallest pair of graphs with room for the rows of this step, captured now if there is none yet."""
        num_rows = len(step.decode_rows)
        size = self.sizes[int(np.searchsorted(self.sizes, num_rows))]
        key = (size, step.shared_len > 0, extras, len(step.masked_draws) == num_rows)
        return self._graphs.get(key, lambda: self._record(*key, pool))

    def _record(
        self, size: int, is_shared: bool, extras: Extras, fetches: bool, pool: GraphPool | None
    ) -> MaskedGraphs:
        started, table = time.perf_counter(), self.runner.table
        rows_G = torch.full((size,), table.padding_row, device=table.device)
        index_G = torch.full((size,), self.masks.unmasked_row, device=table.device)
        checking = self.runner.checking
        forward, hidden_GD = record(partial(self.forward, rows_G, is_shared), pool, table.device, checking())
        draw_ = partial(self.draw, rows_G, hidden_GD, index_G, extras, fetches=fetches)
        draw, tokens_G = record(draw_, pool, table.device, checking())
        seconds = time.perf_counter() - started
        logger.info("captured a masked decode step of %d rows for %s in %.1f s", size, extras, seconds)
        return MaskedGraphs(forward, draw, rows_G, index_G, tokens_G, fetches)

    def forward(self, rows_G: Tensor, is_shared: bool = False) -> Tensor:
        """The first half: the hidden states of a decode step of these rows."""
        batch, _ = decode_step(self.runner, rows_G, self.max_model_len, is_shared=is_shared)
        return self.runner.forward(batch)

    def draw(
        self, rows_G: Tensor, hidden_GD: Tensor, index_G: Tensor, extras: Extras, *, fetches: bool = False
    ) -> Tensor:
        """The second half: draw, and write the tokens into the table. Returns what goes to the host.

        fetches: whether masks of all rows are copied from the host's buffer first.
        """
        table = self.runner.table
        if fetches:
            self.masks.fetch(len(rows_G))
        sampled = table.decode_draws(rows_G)
        forbid = partial(self.masks.forbid, index_N=index_G)
        results_G = self.runner.sample_extra(hidden_GD, sampled, extras, self.max_model_len, forbid=forbid)
        self.runner.keep_tokens(sampled, results_G)
        return results_G
