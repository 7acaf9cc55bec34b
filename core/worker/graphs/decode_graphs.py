"""Decode steps as CUDA graphs: one launch for the whole step, from the request table back into the request table.

A graph's only input is which rows decode; lengths, block tables, sampling parameters and tokens are gathered from the
table on the device. Rows beyond the step's own are the padding row, which writes to the scratch block.
Legend: G rows of a graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Batch, SamplingBatch
from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray, no_ints
from hookline.core.worker.graphs.cuda_graph import ExtraGraphs, GraphPool, record
from hookline.core.worker.request_table import SampleRows
from hookline.core.worker.runner.model_runner import PLAIN, Extras, ModelRunner
from hookline.core.worker.startup.memory import GIB

if TYPE_CHECKING:
    from hookline.core.worker.graphs.prompt_graphs import PromptGraphs

logger = logging.getLogger("hookline")


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    rows_G: Tensor
    tokens_G: Tensor
    rows: IntArray = field(default_factory=no_ints)
    """What rows_G begins with, on the host; the rest is padding."""


@torch.inference_mode()
def capture_graphs(decodes: DecodeGraphs, prompts: PromptGraphs, *, at_once: bool = False) -> None:
    """Capture all graphs into one memory pool; log how long it took and how much memory. at_once: see GraphPool."""
    device = decodes.runner.table.device
    started, before = time.perf_counter(), torch.cuda.memory_reserved(device)
    pool = GraphPool(captures_at_once=at_once)
    num_prompts, num_decodes = prompts.capture(pool), decodes.capture(pool)
    torch.cuda.synchronize(device)
    seconds, grown = time.perf_counter() - started, torch.cuda.memory_reserved(device) - before
    what = f"{num_decodes} graphs of decodes and {num_prompts} with prompts"
    logger.info("captured %s in %.1f s, %.2f GiB", what, seconds, grown / GIB)


class DecodeGraphs:
    """Captured decode steps, smallest first."""

    def __init__(
        self, runner: ModelRunner, sizes: Sequence[int], max_model_len: int, *, shares_prefixes: bool = False
    ) -> None:
        self.runner, self.sizes, self.max_model_len = runner, list(sizes), max_model_len
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._extra_graphs: ExtraGraphs[tuple[int, bool, Extras], _Graph] = ExtraGraphs(runner)
        self._kinds: set[tuple[bool, Extras]] = set()
        """Kinds of graphs for which the plugins' results were checked, before the first capture of the kind."""
        self._shares = shares_prefixes
        self.pool: GraphPool | None = None

    def capture(self, pool: GraphPool | None) -> int:
        """Capture every size, the largest first so that the others fit into its memory; returns how many."""
        self.pool = pool
        for size in reversed(self.sizes):
            for is_shared in (False, True) if self._shares else (False,):
                self._graphs[size, is_shared] = self._record(size, is_shared, PLAIN)
        return len(self._graphs)

    def _record_extra(self, size: int, is_shared: bool, extras: Extras) -> _Graph:
        """Capture a graph for draws that need more than plain sampling."""
        started = time.perf_counter()
        graph = self._record(size, is_shared, extras)
        seconds = time.perf_counter() - started
        logger.info("captured a decode graph of %d rows for %s in %.1f s", size, extras, seconds)
        return graph

    def _record(self, size: int, is_shared: bool, extras: Extras) -> _Graph:
        device = self.runner.table.device
        rows_G = torch.full((size,), self.runner.table.padding_row, device=device)
        is_looked_at = (is_shared, extras) in self._kinds
        self._kinds.add((is_shared, extras))
        checking = nullcontext() if is_looked_at else self.runner.checking()  # sizes are not kinds
        step = partial(self.step, rows_G, is_shared, extras)
        is_known = is_looked_at and extras == PLAIN  # processors do not say whether they make something for a size
        graph, tokens_G = record(step, self.pool, device, checking, is_known=is_known)
        return _Graph(graph, rows_G, tokens_G)

    def can_replay(self, step: Step, extras: Extras) -> bool:
        """Whether a graph fits this step: decodes alone, no token forbidden, and processors that may be captured."""
        if len(step.chunk_rows) or len(step.mask_rows):
            return False
        pipeline = self.runner.pipeline
        return not extras.processors or (pipeline is not None and pipeline.is_graph_safe(extras.processors))

    def launch(self, rows_D: Tensor, rows: IntArray, extras: Extras = PLAIN, *, is_shared: bool = False) -> Tensor:
        """Replay the smallest graph that has room for these rows; returns their tokens, or their scored rows.

        They are valid until the next launch. rows: rows_D, on the host. extras: what the draws need besides plain
        sampling; a graph for it is captured when a step first needs it. is_shared: some rows share a prefix, as the
        table's shared_len_R says.
        """
        count = rows_D.shape[0]
        size = self.sizes[int(np.searchsorted(self.sizes, count))]
        if extras == PLAIN:
            graph = self._graphs[size, is_shared]
        else:
            key = (size, is_shared, extras)
            graph = self._extra_graphs.get(key, lambda: self._record_extra(*key))
        if not np.array_equal(rows, graph.rows):
            graph.rows_G[:count].copy_(rows_D)
            graph.rows_G[count:].fill_(self.runner.table.padding_row)
            graph.rows = rows.copy()
        self.runner.begin()
        graph.graph.replay()
        return graph.tokens_G[:count]

    def step(self, rows_G: Tensor, is_shared: bool = False, extras: Extras = PLAIN) -> Tensor:
        """One decode step of these rows: everything that a graph captures. Returns what goes to the host."""
        runner = self.runner
        batch, sampled = decode_step(runner, rows_G, self.max_model_len, is_shared=is_shared)
        hidden_GD = runner.forward(batch)
        if extras == PLAIN:
            results_G = runner.sample(hidden_GD, sampled)
        else:
            results_G = runner.sample_extra(hidden_GD, sampled, extras, self.max_model_len)
        runner.keep_tokens(sampled, results_G)
        return results_G


def decode_step(
    runner: ModelRunner, rows_G: Tensor, max_context_len: int, *, is_shared: bool = False
) -> tuple[Batch, SampleRows]:
    """The batch of a pure decode step and its draws, made from the table on the device alone.

    is_shared: some rows share a prefix, as the table's shared_len_R says.
    """
    table, size = runner.table, rows_G.shape[0]
    given = runner.kernels.gather_decodes(rows_G, table.requests)
    batch = Batch(
        token_ids_T=given.token_ids_N,
        positions_T=given.position_N,
        slot_mapping_T=given.slot_mapping_N,
        query_starts_B1=table.starts[: size + 1],
        context_lens_B=given.context_lens_N,
        block_table_BM=given.block_table_NM,
        num_decodes=size,
        max_query_len=1,
        max_context_len=max_context_len,
        query_starts_host=np.arange(size + 1, dtype=np.int32),
    )
    batch = table.grouped(batch, rows_G, None)
    if is_shared:
        batch.shared_lens_B = table.shared_len_R.index_select(0, rows_G)
    return batch, SampleRows(rows_G, None, SamplingBatch(given.temperature_N, given.seed_N, given.draw_position_N))
