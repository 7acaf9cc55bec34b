"""Small steps with prompts as CUDA graphs, one for each of a few shapes: launching them kernel by kernel takes longer
than computing them.

A graph's only input is one array of integers that the host lays out from the step; block tables, sampling parameters
and the newest tokens are gathered from the request table on the device, and tokens and lengths go back into it. Tokens
beyond the step's own are the queries of one more row, the padding row, which writes to the scratch block. In a mixed
step, kernels compute as many decodes as the shape has; further decodes are chunks of one token, and padding rows take
the places of missing decodes.
Legend: T tokens of a graph, B rows (the last one is padding), N = B - 1 draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Batch
from hookline.core.step.captured import PromptShape, holding_shape
from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray
from hookline.core.worker.graphs.laid_out_graphs import LAST_DRAWN, LaidOutGraphs
from hookline.core.worker.request_table import RequestTable, SampleRows, slot_mapping
from hookline.core.worker.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Inputs:
    """The input of a graph, all int64: decodes, then chunks, then rows that have no queries and draws for padding.

    token_ids_T may be LAST_DRAWN. token_rows_T: which of the B rows a token belongs to. table_rows_B, sample_rows_N:
    rows of the request table. sample_tokens_N: which of the T tokens a draw follows.
    """

    token_ids_T: Any
    positions_T: Any
    token_rows_T: Any
    sample_positions_N: Any
    sample_rows_N: Any
    sample_tokens_N: Any
    context_lens_B: Any
    table_rows_B: Any
    query_starts_B1: Any

    @classmethod
    def of(cls, inputs_X: Tensor, shape: PromptShape) -> Inputs:
        """The inputs as views of one flat array; see `flat`."""
        num_tokens, num_draws = shape.num_tokens, shape.num_decodes + shape.num_rows
        lengths = [*[num_tokens] * 3, *[num_draws] * 3, *[num_draws + 1] * 2, num_draws + 2]
        return cls(*torch.split(inputs_X, lengths))

    def flat(self) -> IntArray:
        """All fields in one array, one after the other."""
        return np.concatenate([getattr(self, one.name) for one in fields(self)])


class PromptGraphs(LaidOutGraphs[PromptShape]):
    """Captured steps with prompts, by their shapes."""

    def __init__(self, runner: ModelRunner, shapes: Sequence[PromptShape], max_model_len: int) -> None:
        max_draws = max((shape.num_decodes + shape.num_rows for shape in shapes), default=0)
        super().__init__(runner, shapes, max_model_len, max_draws)

    def shape(self, step: Step) -> PromptShape | None:
        """See LaidOutGraphs: none if prompts are too many or too long, if hidden states of prompt tokens are asked for,
        or if a row draws several tokens.
        """
        if not len(step.chunk_rows) or len(step.reads) or step.draws_several:
            return None
        return holding_shape(self.shapes, len(step.decode_rows), len(step.token_ids_T), len(step.chunk_rows))

    def kind(self, shape: PromptShape) -> bool:
        """See LaidOutGraphs: whether the shape has decodes."""
        return shape.num_decodes > 0

    def inputs(self, step: Step, shape: PromptShape) -> Tensor:
        """See LaidOutGraphs."""
        return torch.from_numpy(lay_out(step, shape, self.runner.table).flat())

    def forward(self, inputs_X: Tensor, shape: PromptShape) -> Tensor:
        """See LaidOutGraphs."""
        inputs = Inputs.of(inputs_X, shape)
        batch = prompt_batch(self.runner.table, inputs, shape.num_decodes, self.max_model_len)
        return self.runner.forward(batch, inputs.sample_tokens_N)

    def draws(
        self, inputs_X: Tensor, shape: PromptShape, count: int | None = None, *, all_greedy: bool = False
    ) -> SampleRows:
        """See LaidOutGraphs: the draws of decodes, then of chunks, then of padding rows."""
        return prompt_sample_rows(self.runner.table, Inputs.of(inputs_X, shape), count, all_greedy=all_greedy)


def lay_out(step: Step, shape: PromptShape, table: RequestTable) -> Inputs:
    """A step's decodes and chunks as the first rows of the shape; padding tokens form the last row.

    Decodes beyond the shape's number are chunks of one token; decodes that the step lacks are the padding row's, and
    nothing is drawn for them. To be called before `RequestTable.mirror` of this step.
    """
    num_draws, padding_row = shape.num_decodes + shape.num_rows, table.padding_row
    decode_rows = _filled(max(shape.num_decodes, len(step.decode_rows)), padding_row, step.decode_rows)
    count = len(decode_rows)
    rows = np.concatenate([decode_rows, step.chunk_rows])
    token_ids = np.concatenate([np.full(count, LAST_DRAWN), step.token_ids_T])
    sampled = np.concatenate([np.arange(len(step.decode_rows)), step.sampled_chunks + count])
    lens_B = _filled(num_draws + 1, 0, np.concatenate([np.ones(count, dtype=np.int64), step.chunk_lens]))
    lens_B[-1] = shape.num_tokens - len(token_ids)
    past_B = _filled(num_draws + 1, 0, np.concatenate([table.host_length_R[decode_rows] - 1, step.chunk_starts]))
    starts_B1 = np.concatenate([[0], np.cumsum(lens_B)])
    contexts_B = np.maximum(past_B + lens_B, 1)
    token_rows_T = np.repeat(np.arange(num_draws + 1), lens_B)
    return Inputs(
        token_ids_T=_filled(shape.num_tokens, 0, token_ids),
        positions_T=np.arange(shape.num_tokens) + (past_B - starts_B1[:-1])[token_rows_T],
        token_rows_T=token_rows_T,
        sample_positions_N=_filled(num_draws, 1, contexts_B[sampled]),
        sample_rows_N=_filled(num_draws, padding_row, rows[sampled]),
        sample_tokens_N=_filled(num_draws, 0, starts_B1[sampled + 1] - 1),
        context_lens_B=contexts_B,
        table_rows_B=_filled(num_draws + 1, padding_row, rows),
        query_starts_B1=starts_B1,
    )


def _filled(size: int, padding: int, values: IntArray) -> IntArray:
    """The values, then padding up to this size."""
    filled = np.full(size, padding, dtype=np.int64)
    filled[: len(values)] = values
    return filled


def prompt_batch(table: RequestTable, inputs: Inputs, num_decodes: int, max_context_len: int) -> Batch:
    """The batch of a captured step with prompts, made on the device alone."""
    block_table_BM = table.group_tables[0].index_select(0, inputs.table_rows_B)
    last_T = table.last_token_R.index_select(0, inputs.table_rows_B.index_select(0, inputs.token_rows_T))
    batch = Batch(
        token_ids_T=torch.where(inputs.token_ids_T == LAST_DRAWN, last_T, inputs.token_ids_T),
        positions_T=inputs.positions_T,
        slot_mapping_T=slot_mapping(block_table_BM, inputs.token_rows_T, inputs.positions_T, table.block_size),
        query_starts_B1=inputs.query_starts_B1.to(torch.int32),
        context_lens_B=inputs.context_lens_B.to(torch.int32),
        block_table_BM=block_table_BM,
        num_decodes=num_decodes,
        max_query_len=inputs.token_ids_T.shape[0] - num_decodes,
        max_context_len=max_context_len,
        query_starts_host=None,
    )
    return table.grouped(batch, inputs.table_rows_B, inputs.token_rows_T)


def prompt_sample_rows(
    table: RequestTable, inputs: Inputs, count: int | None = None, *, all_greedy: bool = False
) -> SampleRows:
    """The draws of a captured step with prompts: of its decodes, then of its chunks, then of padding rows.

    count: only the first so many draws; None: all. all_greedy: see SamplingBatch.
    """
    rows_N, positions_N = inputs.sample_rows_N[:count], inputs.sample_positions_N[:count]
    params = table.sampling(rows_N, positions_N, all_greedy=all_greedy)
    return SampleRows(rows_N, inputs.sample_tokens_N[:count], params)
