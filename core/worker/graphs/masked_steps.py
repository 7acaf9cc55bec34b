"""Steps whose draws wait for masks: the model's part at once, and the drawing when the masks are there.

The host learns a token, works out what may follow it and fills the mask while the device computes the next step up to
its hidden states. Where graphs are captured, both halves of decodes are CUDA graphs, and the first is that of all
decodes.
Legend: as in core/worker/request_table.py; G rows of a graph, K draws that have masks.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray
from hookline.core.worker.graphs.cuda_graph import ExtraGraphs
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.request_table import DeviceStep, SampleRows
from hookline.core.worker.runner.model_runner import Extras, ModelRunner
from hookline.core.worker.runner.token_masks import TokenMasks

logger = logging.getLogger("hookline")


@dataclass(frozen=True)
class WaitingStep:
    """A step that was computed up to its hidden states, and whose draws wait for masks.

    hidden_TD: of all its tokens if prompt tokens are scored, else of the draws. draws: captured ones, if there are any;
    they know the hidden states, and sampled and hidden_TD are None.
    """

    device_step: DeviceStep
    extras: Extras
    sampled: SampleRows | None = None
    hidden_TD: Tensor | None = None
    draws: MaskedDraws | None = None


@dataclass
class MaskedDraws:
    """Draws with masks that follow the layers of a decode step, captured for G rows. index_G: the mask of each row.

    fetches: whether every row has a mask; the graph then copies them itself. num_masked: how many rows index_G was last
    written for, if it fetches.
    """

    decodes: DecodeGraphs
    graph: torch.cuda.CUDAGraph
    index_G: Tensor
    results_G: Tensor
    fetches: bool
    num_masked: int = 0

    def begin(
        self,
        rows_D: Tensor,
        rows: IntArray,
        masks: TokenMasks,
        masked_draws_K: Tensor,
        extensions: int = 0,
        *,
        is_shared: bool,
    ) -> None:
        """Compute the hidden states of these rows, and say which of them will have masks.

        rows, extensions, is_shared: as for `DecodeGraphs.replay_layers`.
        """
        if not self.fetches:
            masks.begin()
        self.decodes.runner.begin()
        self.decodes.replay_layers(rows_D, rows, extensions, is_shared=is_shared)
        if not self.fetches or len(masked_draws_K) != self.num_masked:  # else it is written already
            masks.write_index(self.index_G, len(rows_D), masked_draws_K)  # behind the draws before, which read it
            self.num_masked = len(masked_draws_K)

    def finish(self, num_draws: int, num_masks: int, masks: TokenMasks) -> Tensor:
        """Draw by the first `num_masks` masks; returns the tokens, or scored rows, valid until the next step."""
        if not self.fetches:
            masks.send(num_masks)
        self.graph.replay()
        if self.fetches:
            masks.note_replay()
        return self.results_G[:num_draws]


class MaskedDecodes:
    """Draws with masks for captured decodes, each kind captured when a step first needs it."""

    def __init__(self, runner: ModelRunner, masks: TokenMasks, decodes: DecodeGraphs) -> None:
        self.runner, self.masks, self.decodes = runner, masks, decodes
        self._graphs: ExtraGraphs[tuple[int, Extras, bool], MaskedDraws] = ExtraGraphs(runner)

    def graphs(self, step: Step, extras: Extras) -> MaskedDraws:
        """The smallest graphs with room for the rows of this step; the draws' is captured now if there is none yet."""
        num_rows = len(step.decode_rows)
        key = (self.decodes.size(num_rows), extras, len(step.masked_draws) == num_rows)
        return self._graphs.get(key, lambda: self._record(*key))

    def _record(self, size: int, extras: Extras, fetches: bool) -> MaskedDraws:
        started = time.perf_counter()
        index_G = torch.full((size,), self.masks.unmasked_row, device=self.runner.table.device)
        draw = partial(self.draw, *self.decodes.behind_layers(size, extras), index_G, extras, fetches=fetches)
        graph, results_G = self.decodes.recorder.record(draw, ("masked", extras, fetches), sizes_alike=False)
        seconds = time.perf_counter() - started
        logger.debug("captured draws of %d rows with masks for %s in %.3f s", size, extras, seconds)
        return MaskedDraws(self.decodes, graph, index_G, results_G, fetches)

    def draw(
        self, hidden_GD: Tensor, sampled: SampleRows, index_G: Tensor, extras: Extras, *, fetches: bool = False
    ) -> Tensor:
        """Draw with masks, and write the tokens into the table. Returns what goes to the host.

        fetches: whether masks of all rows are copied from the host's buffer first.
        """
        if fetches:
            self.masks.fetch(len(index_G))
        forbid = partial(self.masks.forbid, index_N=index_G)
        max_len = self.decodes.max_model_len
        results_G = self.runner.sample_extra(hidden_GD, sampled, extras, max_len, forbid=forbid)
        self.runner.keep_tokens(sampled, results_G)
        return results_G
