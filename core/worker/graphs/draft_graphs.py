"""Steps with drafts as CUDA graphs: every token of the step is a row of its own, as in a decode.

The 1 + k tokens of a request lie in as many rows, which have the same block table and contexts one longer each. So
attention is cut along the contexts as that of decodes is, products are those of few rows, and one graph serves every k
and every mixture of rows with and without drafts of at most so many tokens. Since a row sees what the rows before it
write in the same step, all keys are written before any row attends (`Batch.repeats_requests`).
Legend: G tokens of a graph, rows and draws as well; D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Batch
from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray
from hookline.core.worker.graphs.cuda_graph import GraphPool, HiddenRoom, Recorder
from hookline.core.worker.graphs.prompt_graphs import LAST_DRAWN
from hookline.core.worker.request_table import RequestTable, SampleRows, slot_mapping
from hookline.core.worker.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class _Graphs:
    """The two halves of a step: forward computes hidden_GD of inputs_3G, and draw makes tokens_G of them."""

    inputs_3G: Tensor
    forward: torch.cuda.CUDAGraph
    hidden_GD: Tensor
    draw: torch.cuda.CUDAGraph
    tokens_G: Tensor


class DraftGraphs:
    """Captured steps with drafts, two graphs for each of these numbers of tokens, ascending: the hidden states, and
    plain draws. Other draws follow the first one eagerly.
    """

    def __init__(self, runner: ModelRunner, sizes: Sequence[int], max_model_len: int) -> None:
        self.runner, self.sizes, self.max_model_len = runner, list(sizes), max_model_len
        self._graphs: dict[int, _Graphs] = {}
        most = max(self.sizes, default=0)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=runner.table.device)
        self._room = HiddenRoom(most)
        self._recorder = Recorder(runner)

    def capture(self, pool: GraphPool) -> int:
        """Capture every size, the largest first so that the others fit into its memory; returns how many."""
        self._recorder.use_pool(pool)
        for size in reversed(self.sizes):
            inputs_3G = self.inputs(Step(), size).to(self.runner.table.device)
            forward_graph, hidden_GD = self._recorder.record(partial(self.kept_forward, inputs_3G), "layers")
            draw_graph, tokens_G = self._recorder.record(partial(self.draw, inputs_3G, hidden_GD), "draws")
            self._graphs[size] = _Graphs(inputs_3G, forward_graph, hidden_GD, draw_graph, tokens_G)
        return len(self._graphs)

    def size(self, step: Step) -> int | None:
        """The size of the graphs that fit this step; None if it has too many tokens, or one that no draw follows."""
        if not len(step.chunk_rows) or len(step.sampled_chunks) != len(step.token_ids_T):
            return None
        if len(step.scored_chunks) or len(step.pooled):
            return None
        return next((size for size in self.sizes if size >= step.num_tokens), None)

    def launch(self, step: Step, size: int) -> Tensor:
        """Replay the graphs of this size for a step that fits it; returns its tokens, valid until the next launch.

        To be called before `RequestTable.mirror` of this step.
        """
        graphs = self._replay_layers(step, size)
        graphs.draw.replay()
        return graphs.tokens_G[: step.num_sampled]

    def launch_layers(self, step: Step, size: int) -> tuple[SampleRows, Tensor]:
        """Replay the first half alone; returns the step's draws and their hidden states, valid until the next launch.

        To be called before `RequestTable.mirror` of this step.
        """
        graphs, count = self._replay_layers(step, size), step.num_sampled
        sampled = draft_draws(self.runner.table, graphs.inputs_3G[:, :count], all_greedy=step.all_greedy)
        return sampled, graphs.hidden_GD[:count]

    def _replay_layers(self, step: Step, size: int) -> _Graphs:
        graphs = self._graphs[size]
        graphs.inputs_3G.copy_(self.inputs(step, size).pin_memory(), non_blocking=True)
        self.runner.begin()
        graphs.forward.replay()
        return graphs

    def inputs(self, step: Step, size: int) -> Tensor:
        """A step as the input of the graphs of this size, on the host."""
        return torch.from_numpy(lay_out(step, size, self.runner.table))

    def step(self, inputs_3G: Tensor) -> Tensor:
        """One step: everything that its graphs capture. Returns its tokens."""
        return self.draw(inputs_3G, self.forward(inputs_3G))

    def forward(self, inputs_3G: Tensor) -> Tensor:
        """The first half of a step: the hidden states of all tokens."""
        starts_G1 = self._starts[: inputs_3G.shape[1] + 1]
        return self.runner.forward(draft_batch(self.runner.table, inputs_3G, starts_G1, self.max_model_len))

    def kept_forward(self, inputs_3G: Tensor) -> Tensor:
        """The same, with the hidden states where captured draws read them."""
        return self._room.keep(self.forward(inputs_3G))

    def draw(self, inputs_3G: Tensor, hidden_GD: Tensor) -> Tensor:
        """The second half: sample plainly, and write the tokens into the table. Returns them."""
        sampled = draft_draws(self.runner.table, inputs_3G)
        tokens_G = self.runner.sample(hidden_GD, sampled)
        self.runner.keep_tokens(sampled, tokens_G)
        return tokens_G


def lay_out(step: Step, size: int, table: RequestTable) -> IntArray:
    """The tokens of a step, their positions and their rows of the table, (3, size): decodes first, then the chunks.

    A token may be LAST_DRAWN. The rest is of the padding row, at its first position. To be called before
    `RequestTable.mirror` of this step.
    """
    decodes, lens = step.decode_rows, step.chunk_lens
    positions = np.arange(len(step.token_ids_T)) + np.repeat(step.chunk_starts - np.cumsum(lens) + lens, lens)
    inputs = np.zeros((3, size), dtype=np.int64)
    inputs[2] = table.padding_row
    inputs[:, : step.num_tokens] = (
        np.concatenate([np.full(len(decodes), LAST_DRAWN), step.token_ids_T]),
        np.concatenate([table.host_length_R[decodes] - 1, positions]),
        np.concatenate([decodes, step.chunk_rows.repeat(lens)]),
    )
    return inputs


def draft_batch(table: RequestTable, inputs_3G: Tensor, starts_G1: Tensor, max_context_len: int) -> Batch:
    """The batch of a captured step with drafts, made on the device alone."""
    token_ids_G, positions_G, rows_G = inputs_3G
    block_table_GM = table.group_tables[0].index_select(0, rows_G)
    last_G = table.last_token_R.index_select(0, rows_G)
    batch = Batch(
        token_ids_T=torch.where(token_ids_G == LAST_DRAWN, last_G, token_ids_G),
        positions_T=positions_G,
        slot_mapping_T=slot_mapping(block_table_GM, None, positions_G, table.block_size),
        query_starts_B1=starts_G1,
        context_lens_B=(positions_G + 1).to(torch.int32),
        block_table_BM=block_table_GM,
        num_decodes=len(rows_G),
        max_query_len=1,
        max_context_len=max_context_len,
        query_starts_host=np.arange(len(starts_G1), dtype=np.int32),
        repeats_requests=True,
    )
    return table.grouped(batch, rows_G, None)


def draft_draws(table: RequestTable, inputs_3N: Tensor, *, all_greedy: bool = False) -> SampleRows:
    """The draws behind these tokens. all_greedy: see SamplingBatch."""
    _, positions_N, rows_N = inputs_3N
    return SampleRows(rows_N, None, table.sampling(rows_N, positions_N + 1, all_greedy=all_greedy))
