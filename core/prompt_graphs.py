"""Small steps with prompts as CUDA graphs, one for each of a few shapes: their eager launches outlast the work.

A graph's only input is one array of integers that the host lays out from the step; block tables and sampling parameters
are gathered from the request table on the device, and tokens and lengths go back into it. Tokens beyond the step's own
are the queries of one more row, the padding row, which writes to the scratch block. Of a mixed step the first decodes
are decodes to the kernels too, as many as the graph has; the rest of them are chunks of one token.
Legend: T tokens of a graph that are no decodes, B rows of these (the last one is padding), N = B - 1 draws from them,
G decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from core.batch import Batch
from core.graph_sizes import PromptShape, holding_shape
from core.graphs import record
from core.state import Draws, RequestTable, slot_mapping
from core.step import IntArray, Step

if TYPE_CHECKING:
    from core.worker import Worker


LAST_DRAWN = -1
"""Stands for a token that only the device knows: the last one of its row."""


@dataclass(frozen=True)
class Inputs:
    """The input of a graph, all int64. Rows beyond the step's have no queries; draws beyond its own are padding's.

    decode_rows_G, table_rows_B, draw_rows_N: rows of the request table. token_ids_T may be LAST_DRAWN. token_rows_T:
    which of the B rows a token belongs to. draw_tokens_N: which of the T tokens a draw follows.
    """

    decode_rows_G: Any
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
    def of(cls, inputs_X: Tensor, shape: PromptShape) -> Inputs:
        """Views of the flat array."""
        num_rows, num_draws = shape.num_rows + 1, shape.num_rows
        num_tokens = [shape.num_tokens - shape.num_decodes] * 3
        lengths = [shape.num_decodes, *num_tokens, num_rows + 1, *[num_rows] * 2, *[num_draws] * 3]
        return cls(*torch.split(inputs_X, lengths))

    def flat(self) -> IntArray:
        """All of them in one array."""
        return np.concatenate([getattr(self, one.name) for one in fields(self)])


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs_X: Tensor
    tokens_N: Tensor


class PromptGraphs:
    """Captured steps with prompts of a worker, of these shapes: of steps that several hold, the first takes them."""

    def __init__(self, worker: Worker, shapes: Sequence[PromptShape], max_model_len: int) -> None:
        self.worker, self.shapes, self.max_model_len = worker, list(shapes), max_model_len
        self._graphs: dict[PromptShape, _Graph] = {}

    def capture(self, pool: Any) -> int:
        """Capture every shape, the largest first so that the others fit into its memory; returns how many."""
        for shape in reversed(self.shapes):
            inputs_X = self.inputs(Step(), shape).to(self.worker.table.device)
            graph, tokens_N = record(partial(self.step, inputs_X, shape), pool, inputs_X.device)
            self._graphs[shape] = _Graph(graph, inputs_X, tokens_N)
        return len(self._graphs)

    def shape(self, step: Step) -> PromptShape | None:
        """The shape of the graph that can be this step, if any: prompts few and short enough, and plainly drawn."""
        if not len(step.chunk_rows) or len(step.mask_rows) or step.processors or step.num_logprobs >= 0:
            return None
        return holding_shape(self.shapes, len(step.decode_rows), len(step.token_ids_T), len(step.chunk_rows))

    def launch(self, step: Step, shape: PromptShape) -> Tensor:
        """Replay a graph that holds this step; returns its tokens, valid until the next launch.

        The table must not mirror the step yet.
        """
        graph = self._graphs[shape]
        graph.inputs_X.copy_(self.inputs(step, shape).pin_memory(), non_blocking=True)
        self.worker.begin()
        graph.graph.replay()
        return graph.tokens_N[: step.num_sampled]

    def inputs(self, step: Step, shape: PromptShape) -> Tensor:
        """A step as the input of the graph of this shape, on the host."""
        table = self.worker.table
        step = with_few_decodes(step, shape.num_decodes, table)
        return torch.from_numpy(lay_out(step, shape, table.padding_row).flat())

    def step(self, inputs_X: Tensor, shape: PromptShape) -> Tensor:
        """One step with prompts: everything a graph holds."""
        worker, table = self.worker, self.worker.table
        inputs = Inputs.of(inputs_X, shape)
        batch = prompt_batch(table, inputs, self.max_model_len)
        drawn = prompt_draws(table, inputs, batch)
        hidden_ND = worker.forward(batch, drawn.token_indices_N)
        tokens_N = worker.draw(hidden_ND, drawn)
        table.write_back(drawn, tokens_N)
        table.reset_padding()
        return tokens_N


def with_few_decodes(step: Step, num_decodes: int, table: RequestTable) -> Step:
    """The same step with at most so many decodes; those left over are its first chunks."""
    left_over = step.decode_rows[num_decodes:]
    if not len(left_over):
        return step
    count, ones = len(left_over), np.ones(len(left_over), dtype=np.int64)
    return replace(
        step,
        decode_rows=step.decode_rows[:num_decodes],
        chunk_rows=np.concatenate([left_over, step.chunk_rows]),
        chunk_starts=np.concatenate([table.host_length_R[left_over] - 1, step.chunk_starts]),
        chunk_lens=np.concatenate([ones, step.chunk_lens]),
        token_ids_T=np.concatenate([LAST_DRAWN * ones, step.token_ids_T]),
        sampled_chunks=np.concatenate([np.arange(count), step.sampled_chunks + count]),
    )


def lay_out(step: Step, shape: PromptShape, padding_row: int) -> Inputs:
    """A step's chunks as the first of the shape's rows; the tokens that are missing form the last one.

    Decodes are as many as the shape has, or none of a step that is empty.
    """
    count, sampled, num_rows = len(step.chunk_rows), step.sampled_chunks, shape.num_rows + 1
    num_tokens = shape.num_tokens - shape.num_decodes
    lens_B, past_B = (np.zeros(num_rows, dtype=np.int64) for _ in range(2))
    lens_B[:count], past_B[:count] = step.chunk_lens, step.chunk_starts
    lens_B[-1] = num_tokens - len(step.token_ids_T)
    starts_B1 = np.concatenate([[0], np.cumsum(lens_B)])
    contexts_B = np.maximum(past_B + lens_B, 1)
    token_rows_T = np.repeat(np.arange(num_rows), lens_B)
    return Inputs(
        decode_rows_G=_filled(shape.num_decodes, padding_row, step.decode_rows),
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


def prompt_batch(table: RequestTable, inputs: Inputs, max_context_len: int) -> Batch:
    """The batch of a captured step with prompts, made on the device alone."""
    num_decodes = len(inputs.decode_rows_G)
    decodes_G = torch.arange(num_decodes, device=table.device)
    rows_B = torch.cat([inputs.decode_rows_G, inputs.table_rows_B])
    block_table_BM = table.block_table_RM.index_select(0, rows_B)
    newest_G, positions_G, context_G = table.newest(inputs.decode_rows_G)
    positions_T = torch.cat([positions_G, inputs.positions_T])
    last_T = table.last_token_R.index_select(0, inputs.table_rows_B.index_select(0, inputs.token_rows_T))
    token_ids_T = torch.where(inputs.token_ids_T == LAST_DRAWN, last_T, inputs.token_ids_T)
    batch_rows_T = torch.cat([decodes_G, inputs.token_rows_T + num_decodes])
    return Batch(
        token_ids_T=torch.cat([newest_G, token_ids_T]),
        positions_T=positions_T,
        slot_mapping_T=slot_mapping(block_table_BM, batch_rows_T, positions_T, table.block_size),
        query_starts_B1=torch.cat([decodes_G, inputs.query_starts_B1 + num_decodes]).to(torch.int32),
        context_lens_B=torch.cat([context_G, inputs.context_lens_B.to(torch.int32)]),
        block_table_BM=block_table_BM,
        num_decodes=num_decodes,
        max_query_len=inputs.token_ids_T.shape[0],
        max_context_len=max_context_len,
        query_starts_host=None,
    )


def prompt_draws(table: RequestTable, inputs: Inputs, batch: Batch) -> Draws:
    """The draws of a captured step with prompts: those of its decodes, then those of chunks."""
    count = batch.num_decodes
    rows_N = torch.cat([inputs.decode_rows_G, inputs.draw_rows_N])
    tokens_N = torch.cat([torch.arange(count, device=table.device), inputs.draw_tokens_N + count])
    positions_N = torch.cat([batch.context_lens_B[:count].long(), inputs.draw_positions_N])
    return Draws(rows_N, tokens_N, table.sampling(rows_N, positions_N))
