"""Steps as CUDA graphs in which every token is a row of its own, as in a decode: steps whose decodes compute several
tokens, and if steps keep the hidden states of all their tokens, steps of decodes alone, too.

The n tokens of a request are n rows with the same block table and contexts one longer each. So attention is split along
the contexts as for decodes, matrix products have few rows, and one graph serves every n and every mixture of requests
of at most so many tokens. Since a row sees the keys that rows before it write in the same step, all keys are written
before any row attends (`Batch.repeats_requests`).
Legend: G tokens of a graph, rows and draws as well; D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Batch
from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray
from hookline.core.worker.graphs.cuda_graph import HiddenRoom
from hookline.core.worker.graphs.laid_out_graphs import LAST_DRAWN, LaidOutGraphs
from hookline.core.worker.request_table import RequestTable, SampleRows
from hookline.core.worker.runner.model_runner import ModelRunner


class TokenGraphs(LaidOutGraphs[int]):
    """Captured steps, by their numbers of tokens; a draw follows every token."""

    def __init__(self, runner: ModelRunner, sizes: Sequence[int], max_model_len: int) -> None:
        most = max(sizes, default=0)
        super().__init__(runner, sizes, max_model_len, most)
        self._apart = {name: HiddenRoom(most) for name in runner.apart}
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=runner.table.device)

    def shape(self, step: Step) -> int | None:
        """See LaidOutGraphs: none for a step with a token that no draw follows, nor for decodes alone, unless hidden
        states of all tokens are kept.
        """
        if not (len(step.chunk_rows) or self._apart) or len(step.sampled_chunks) != len(step.token_ids_T):
            return None
        if len(step.reads):
            return None
        return self.size(step.num_tokens)

    def size(self, num_tokens: int) -> int | None:
        """The smallest size that has room for so many tokens; None if there is none."""
        return next((size for size in self.shapes if size >= num_tokens), None)

    def inputs(self, step: Step, size: int) -> Tensor:
        """See LaidOutGraphs."""
        return torch.from_numpy(lay_out(step, size, self.runner.table))

    def forward(self, inputs_3G: Tensor, size: int) -> Tensor:
        """See LaidOutGraphs: the hidden states of all tokens."""
        batch = token_batch(self.runner, inputs_3G, self._starts[: size + 1], self.max_model_len)
        watch = self.runner.captured_watch(inputs_3G[2], batch)
        hidden_GD = self.runner.forward(batch, watch=watch)
        if watch is not None:
            for name, room in self._apart.items():
                room.keep(watch.apart[name])
        return hidden_GD

    def apart(self, num_tokens: int) -> dict[str, Tensor]:
        """See LaidOutGraphs."""
        return {name: room.kept(num_tokens) for name, room in self._apart.items()}

    def draws(self, inputs_3G: Tensor, size: int, count: int | None = None, *, all_greedy: bool = False) -> SampleRows:
        """See LaidOutGraphs."""
        _, positions_N, rows_N = inputs_3G[:, :count]
        return SampleRows(rows_N, None, self.runner.table.sampling(rows_N, positions_N + 1, all_greedy=all_greedy))


def lay_out(step: Step, size: int, table: RequestTable) -> IntArray:
    """The tokens of a step, their positions and their rows of the table, (3, size): decodes first, then the chunks.

    A token may be LAST_DRAWN. Missing tokens are the padding row's, at position 0. To be called before
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


def token_batch(runner: ModelRunner, inputs_3G: Tensor, starts_G1: Tensor, max_context_len: int) -> Batch:
    """The batch of a captured step, made on the device alone."""
    given = runner.kernels.gather_tokens(inputs_3G, runner.table.requests)
    batch = Batch(
        token_ids_T=given.token_ids_N,
        positions_T=given.position_N,
        slot_mapping_T=given.slot_mapping_N,
        query_starts_B1=starts_G1,
        context_lens_B=given.context_lens_N,
        block_table_BM=given.block_table_NM,
        num_decodes=inputs_3G.shape[1],
        max_query_len=1,
        max_context_len=max_context_len,
        query_starts_host=np.arange(len(starts_G1), dtype=np.int32),
        repeats_requests=True,
    )
    return runner.table.grouped(batch, inputs_3G[2], None)
