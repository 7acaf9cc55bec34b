"""Small pure prefill steps as CUDA graphs, one for each of a few token counts: their eager launches outlast the work.

A graph's only input is one array of integers that the host lays out from the step; block tables and sampling parameters
are gathered from the request table on the device, and tokens and lengths go back into it. Tokens beyond the step's own
are the queries of one more row, the padding row, which writes to the scratch block.
Legend: T tokens of a graph, B rows of a graph (the last one is padding), N = B - 1 draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core.batch import Batch
from core.contracts import AttentionSpec
from core.graph_sizes import MAX_ROWS, TOKEN_COUNTS
from core.graphs import record
from core.state import Draws, RequestTable, slot_mapping
from core.step import IntArray, Step

if TYPE_CHECKING:
    from core.worker import Worker


def prefill_sizes(spec: AttentionSpec) -> list[int]:
    """Token counts to capture: those that a step can have, and that the padding row's block table covers."""
    most = min(spec.max_num_batched_tokens, spec.max_model_len)
    return [size for size in TOKEN_COUNTS if size <= most]


@dataclass(frozen=True)
class Inputs:
    """The input of a graph, all int64. Rows beyond the step's have no queries; draws beyond its own are padding's.

    token_rows_T: which of the B rows a token belongs to. table_rows_B, draw_rows_N: rows of the request table.
    draw_tokens_N: which of the T tokens a draw follows.
    """

    token_ids_T: Any
    positions_T: Any
    token_rows_T: Any
    query_starts_B1: Any
    context_lens_B: Any
    table_rows_B: Any
    draw_rows_N: Any
    draw_tokens_N: Any
    draw_positions_N: Any

    @classmethod
    def of(cls, inputs_X: Tensor, num_tokens: int, num_rows: int) -> Inputs:
        """Views of the flat array."""
        num_draws = num_rows - 1
        lengths = [*[num_tokens] * 3, num_rows + 1, *[num_rows] * 2, *[num_draws] * 3]
        return cls(*torch.split(inputs_X, lengths))

    def flat(self) -> IntArray:
        """All of them in one array."""
        return np.concatenate([getattr(self, one.name) for one in fields(self)])


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs_X: Tensor
    tokens_N: Tensor


class PrefillGraphs:
    """Captured prefill steps of a worker, of these token counts, smallest first."""

    def __init__(self, worker: Worker, sizes: Sequence[int], spec: AttentionSpec) -> None:
        self.worker, self.sizes, self.max_model_len = worker, list(sizes), spec.max_model_len
        self.num_rows = min(MAX_ROWS, spec.max_num_seqs) + 1
        self._graphs: dict[int, _Graph] = {}

    def capture(self, pool: Any) -> int:
        """Capture every size, the largest first so that the others fit into its memory; returns how many."""
        for size in reversed(self.sizes):
            inputs_X = self.inputs(Step(), size).to(self.worker.table.device)
            graph, tokens_N = record(partial(self.step, inputs_X, size), pool, inputs_X.device)
            self._graphs[size] = _Graph(graph, inputs_X, tokens_N)
        return len(self._graphs)

    def hold(self, step: Step) -> bool:
        """Whether a graph fits this step: chunks alone, few and short enough, and plainly drawn."""
        return (
            0 < len(step.token_ids_T) <= max(self.sizes, default=0)
            and len(step.chunk_rows) < self.num_rows
            and not len(step.decode_rows)
            and not len(step.mask_rows)
            and not step.processors
            and step.num_logprobs < 0
        )

    def launch(self, step: Step) -> Tensor:
        """Replay the smallest graph that holds this step; returns its tokens, valid until the next launch."""
        size = self.sizes[np.searchsorted(self.sizes, len(step.token_ids_T))]
        graph = self._graphs[size]
        graph.inputs_X.copy_(self.inputs(step, size).pin_memory(), non_blocking=True)
        self.worker.begin()
        graph.graph.replay()
        return graph.tokens_N[: len(step.sampled_chunks)]

    def inputs(self, step: Step, num_tokens: int) -> Tensor:
        """A step as the input of the graph of `num_tokens`, on the host."""
        return torch.from_numpy(lay_out(step, num_tokens, self.num_rows, self.worker.table.padding_row).flat())

    def step(self, inputs_X: Tensor, num_tokens: int) -> Tensor:
        """One prefill step: everything a graph holds."""
        worker, table = self.worker, self.worker.table
        inputs = Inputs.of(inputs_X, num_tokens, self.num_rows)
        drawn = prefill_draws(table, inputs)
        hidden_ND = worker.forward(prefill_batch(table, inputs, self.max_model_len), drawn.token_indices_N)
        tokens_N = worker.draw(hidden_ND, drawn)
        table.write_back(drawn, tokens_N)
        table.reset_padding()
        return tokens_N


def lay_out(step: Step, num_tokens: int, num_rows: int, padding_row: int) -> Inputs:
    """A step's chunks as the first of `num_rows` rows; the tokens that are missing to num_tokens form the last one."""
    count, sampled = len(step.chunk_rows), step.sampled_chunks
    lens_B, past_B = (np.zeros(num_rows, dtype=np.int64) for _ in range(2))
    lens_B[:count], past_B[:count] = step.chunk_lens, step.chunk_starts
    lens_B[-1] = num_tokens - len(step.token_ids_T)
    starts_B1 = np.concatenate([[0], np.cumsum(lens_B)])
    contexts_B = np.maximum(past_B + lens_B, 1)
    token_rows_T = np.repeat(np.arange(num_rows), lens_B)
    return Inputs(
        token_ids_T=_filled(num_tokens, 0, step.token_ids_T),
        positions_T=np.arange(num_tokens) + (past_B - starts_B1[:-1])[token_rows_T],
        token_rows_T=token_rows_T,
        query_starts_B1=starts_B1,
        context_lens_B=contexts_B,
        table_rows_B=_filled(num_rows, padding_row, step.chunk_rows),
        draw_rows_N=_filled(num_rows - 1, padding_row, step.chunk_rows[sampled]),
        draw_tokens_N=_filled(num_rows - 1, 0, starts_B1[sampled + 1] - 1),
        draw_positions_N=_filled(num_rows - 1, 1, contexts_B[sampled]),
    )


def _filled(size: int, padding: int, values: IntArray) -> IntArray:
    """The values, then padding up to this size."""
    filled = np.full(size, padding, dtype=np.int64)
    filled[: len(values)] = values
    return filled


def prefill_batch(table: RequestTable, inputs: Inputs, max_context_len: int) -> Batch:
    """The batch of a captured prefill step, made on the device alone."""
    block_table_BM = table.block_table_RM.index_select(0, inputs.table_rows_B)
    return Batch(
        token_ids_T=inputs.token_ids_T,
        positions_T=inputs.positions_T,
        slot_mapping_T=slot_mapping(block_table_BM, inputs.token_rows_T, inputs.positions_T, table.block_size),
        query_starts_B1=inputs.query_starts_B1.to(torch.int32),
        context_lens_B=inputs.context_lens_B.to(torch.int32),
        block_table_BM=block_table_BM,
        num_decodes=0,
        max_query_len=inputs.token_ids_T.shape[0],
        max_context_len=max_context_len,
        query_starts_host=None,
    )


def prefill_draws(table: RequestTable, inputs: Inputs) -> Draws:
    """The draws of a captured prefill step."""
    params = table.sampling(inputs.draw_rows_N, inputs.draw_positions_N)
    return Draws(inputs.draw_rows_N, inputs.draw_tokens_N, params)
