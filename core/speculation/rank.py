"""Drafts that the device makes itself, from the tokens that it has drawn: the rank's half of `Step.drafting_rows`.

A step lays out the newest token of each row and its drafts as graphs of tokens as rows read them, and is computed by
these graphs. Then tokens and lengths of the rows become those that are kept: the next step needs nothing from the host.
Legend: B rows of the step, K drafts of each, G tokens of a graph, S rows that the host shows tokens of, T these tokens.
"""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Drafter, DraftingRows, is_offered
from hookline.core.errors import show_traceback
from hookline.core.plugin.blame import breach, failure
from hookline.core.step.captured import MOST_ROW_TOKENS
from hookline.core.step.message import Step
from hookline.core.util.arrays import no_ints
from hookline.core.worker.form_checks import form_fault
from hookline.core.worker.graphs.token_graphs import TokenGraphs
from hookline.core.worker.request_table import DeviceStep
from hookline.core.worker.worker import Worker

logger = logging.getLogger("hookline")
NO_DRAFT = -1
"""In the place of a draft that is missing."""


@torch.inference_mode()
def draft_on_device(worker: Worker, drafter: Drafter, name: str) -> bool:
    """Have a rank compute steps with drafting rows from now on, for which the drafter guesses by `propose_on_device`.

    Returns whether it does: if its steps are graphs, and no hidden states are kept, whose owners the host would not
    know. The drafter drafts for each number of drafts now, so that kernels are ready. name: of the drafter, for errors.
    """
    graphs, row = worker.token_graphs, worker.table.padding_row
    if graphs is None or worker.runner.apart or not is_offered(type(drafter).propose_on_device):
        return False
    drafts, most = DeviceDrafts(drafter, name, graphs), graphs.shapes[-1]
    worker.compute_by(drafts.launch)
    for num_drafts in range(1, min(drafter.k, MOST_ROW_TOKENS - 1, most - 1) + 1):
        for count in {1, min(row, most // (1 + num_drafts))}:
            worker.rehearse(Step(drafting_rows=np.full(count, row), num_drafts=num_drafts))
    if drafts.is_failing:
        worker.compute_by(None)
    return not drafts.is_failing


class DeviceDrafts:
    """The tokens of a rank's rows, and the drafter that guesses what follows them. name: of the drafter, for errors.
    graphs: compute the steps.
    """

    def __init__(self, drafter: Drafter, name: str, graphs: TokenGraphs) -> None:
        self._drafter, self._name, self._graphs, runner = drafter, name, graphs, graphs.runner
        self._table, self._kernels = runner.table, runner.kernels
        num_rows, device = len(self._table.length_R), self._table.device
        self._drafting = DraftingRows(
            torch.zeros((num_rows, graphs.max_model_len + 1), dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.float32, device=device),
            runner.vocab_size,
            drafter.pretended_length,
        )
        self._rows, self._rows_B = no_ints(), torch.zeros(0, dtype=torch.int64, device=device)
        self.is_failing = False
        """Whether the drafter failed."""

    def launch(self, device_step: DeviceStep) -> Tensor | None:
        """Compute a step with drafting rows; returns (B * (3 + K),) int64 as StepResult.tokens says, which stay valid.
        None for other steps.

        Device: no host sync.
        """
        step = device_step.step
        if not len(step.drafting_rows):
            return None
        self._receive(step, device_step)
        size = self._graphs.size(step.num_tokens)
        assert size is not None, "no graph has so many tokens"
        inputs_3G, drawn_G = self._graphs.launch_made(partial(self._lay_out, step.num_drafts), size)
        return self._kernels.keep_drafts(
            self._rows_B, inputs_3G, drawn_G, step.num_drafts, self._drafting, self._table.requests
        )

    def _lay_out(self, num_drafts: int, inputs_3G: Tensor) -> None:
        drafts_BK = self._guess(num_drafts)
        self._kernels.lay_out_drafts(self._rows_B, drafts_BK, self._drafting, self._table.requests, inputs_3G)

    def _receive(self, step: Step, device_step: DeviceStep) -> None:
        """Take in which rows draft, if they are others than in the step before, and what the host shows of them."""
        if not np.array_equal(step.drafting_rows, self._rows):
            self._rows, rows_B = step.drafting_rows.copy(), device_step.views["drafting_rows"]
            self._rows_B = rows_B.clone()  # at an address like any other, so that kernels have no further variants
        if not len(step.shown_rows):
            return
        views, table, num_tokens = device_step.views, self._table, len(step.shown_tokens)
        rows_S, starts_S, lens_S, tokens_T = (views[f"shown_{name}"] for name in ("rows", "starts", "lens", "tokens"))
        ends_S = lens_S.cumsum(0)
        self._drafting.limit_R[rows_S] = views["shown_limits"]
        table.length_R[rows_S] = (starts_S + lens_S).to(torch.int32)
        table.last_token_R[rows_S] = tokens_T.index_select(0, ends_S - 1)
        places_T = torch.arange(num_tokens, device=table.device)
        offsets_T = torch.repeat_interleave(starts_S + lens_S - ends_S, lens_S, output_size=num_tokens)
        rows_T = torch.repeat_interleave(rows_S, lens_S, output_size=num_tokens)
        self._drafting.tokens_RL[rows_T, places_T + offsets_T] = tokens_T.to(torch.int32)

    def _guess(self, num_drafts: int) -> Tensor:
        """The drafter's drafts (B, K); none if it fails."""
        lengths_B = self._table.length_R.index_select(0, self._rows_B)
        shape, error = (len(self._rows_B), num_drafts), None
        try:
            drafts_BK = self._drafter.propose_on_device(self._drafting.tokens_RL, self._rows_B, lengths_B, num_drafts)
            fault = form_fault(drafts_BK, shape, (torch.int64,))
            if not fault and drafts_BK.device != self._rows_B.device:
                fault = f"it returned a tensor on {drafts_BK.device}, not on {self._rows_B.device}"
            if not fault:
                return drafts_BK.contiguous()
            told = breach(self._name, "propose_on_device", fault)
        except Exception as raised:
            told, error = failure(self._name, "propose_on_device", raised), raised
        if not self.is_failing:
            self.is_failing = True
            logger.warning("%s; the requests go on without its drafts, and their tokens stay the same", told)
            if error is not None:
                show_traceback(error)
        return self._rows_B.new_full(shape, NO_DRAFT)
