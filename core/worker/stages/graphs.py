"""A stage's part of decode micro-batches as CUDA graphs: its layers, and on the last stage the drawing.

Sending and receiving stay outside of graphs: a graph reads its stream from a buffer that was received into, and what it
wrote is copied before it is sent. Legend: G rows of a graph, D hidden.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Stage
from hookline.core.step.message import Step
from hookline.core.worker.graphs.cuda_graph import GraphPool, Recorder
from hookline.core.worker.graphs.decode_graphs import decode_step
from hookline.core.worker.runner.model_runner import ModelRunner
from hookline.core.worker.startup.memory import GIB

logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class _Graph:
    """The captured layers and their output. draw, tokens_G: None except on the last stage."""

    forward: torch.cuda.CUDAGraph
    rows_G: Tensor
    hidden_GD: Tensor
    draw: torch.cuda.CUDAGraph | None = None
    tokens_G: Tensor | None = None


class StageGraphs:
    """Captured micro-batches of decodes, smallest first.

    stream_GD: where the residual stream of the stage before is received; None on the first stage.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stage: Stage,
        sizes: Sequence[int],
        max_model_len: int,
        stream_GD: Tensor | None,
        *,
        shares_prefixes: bool = False,
    ) -> None:
        self.runner, self.stage, self.sizes, self.max_model_len = runner, stage, list(sizes), max_model_len
        self.stream_GD, self._shares = stream_GD, shares_prefixes
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._latest: _Graph | None = None
        self._recorder = Recorder(runner)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first so that the others fit into its memory."""
        device, self._recorder.pool = self.runner.table.device, GraphPool()
        started, before = time.perf_counter(), torch.cuda.memory_reserved(device)
        for size in reversed(self.sizes):
            for is_shared in (False, True) if self._shares else (False,):
                self._graphs[size, is_shared] = self._record(size, is_shared)
        torch.cuda.synchronize(device)
        seconds, grown = time.perf_counter() - started, torch.cuda.memory_reserved(device) - before
        logger.info(
            "captured %d graphs of decodes of stage %d in %.1f s, %.2f GiB",
            len(self._graphs), self.stage.index, seconds, grown / GIB,
        )  # fmt: skip

    def _record(self, size: int, is_shared: bool) -> _Graph:
        rows_G = torch.full((size,), self.runner.table.padding_row, device=self.runner.table.device)
        forward, hidden_GD = self._recorder.record(partial(self.forward_step, rows_G, is_shared), ("layers", is_shared))
        if not self.stage.is_last:
            return _Graph(forward, rows_G, hidden_GD)
        draw, tokens_G = self._recorder.record(partial(self.draw_step, rows_G, hidden_GD), "draws")
        return _Graph(forward, rows_G, hidden_GD, draw, tokens_G)

    def can_replay(self, step: Step) -> bool:
        """Whether a graph can compute this micro-batch: if it consists of decodes alone."""
        return not len(step.chunk_rows)

    def stream_of(self, num_rows: int) -> Tensor | None:
        """Where to receive the residual stream of this many rows; None on the first stage."""
        return None if self.stream_GD is None else self.stream_GD[:num_rows]

    def forward(self, rows_D: Tensor, *, is_shared: bool) -> Tensor:
        """Replay the layers for these rows, whose stream is in `stream_GD`; returns their hidden states.

        These are valid until the next replay.
        """
        count = rows_D.shape[0]
        graph = self._latest = self._graphs[self.sizes[int(np.searchsorted(self.sizes, count))], is_shared]
        graph.rows_G[:count].copy_(rows_D)
        graph.rows_G[count:].fill_(self.runner.table.padding_row)
        graph.forward.replay()
        return graph.hidden_GD[:count]

    def draw(self, count: int) -> Tensor:
        """Sample plainly from the hidden states that `forward` gave last; tokens are valid until the next replay."""
        graph = self._latest
        assert graph is not None and graph.draw is not None and graph.tokens_G is not None
        graph.draw.replay()
        return graph.tokens_G[:count]

    def forward_step(self, rows_G: Tensor, is_shared: bool = False) -> Tensor:
        """The layers of a decode step of these rows: what a graph of layers captures."""
        batch, _ = decode_step(self.runner, rows_G, self.max_model_len, is_shared=is_shared)
        # A copy, so that an ordinary launch lies between what prepares a step and its first layer, as the embedding
        # does on the first stage: kernels that start early count on it.
        stream_GD = None if self.stream_GD is None else self.stream_GD[: len(rows_G)].clone()
        return self.runner.forward(batch, stream_TD=stream_GD)

    def draw_step(self, rows_G: Tensor, hidden_GD: Tensor) -> Tensor:
        """Sample, and write the tokens into the table: what a graph of draws captures. Returns the tokens."""
        table = self.runner.table
        sampled = table.decode_draws(rows_G)
        tokens_G = self.runner.sample(hidden_GD, sampled)
        self.runner.keep_tokens(sampled, tokens_G)
        return tokens_G
