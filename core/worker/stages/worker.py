"""The worker of a pipeline stage: it cuts a step into micro-batches, and receives, computes and sends on each of them.

Every rank gets the same step and cuts it alike (core/step/micro_batches.py). A stage computes its layers of a
micro-batch while the next stage computes the micro-batch before. The last stage draws and sends the tokens to the
first. All stages keep the request table: lengths are counted everywhere, tokens only where they are read.
Legend: as in core/worker/request_table.py; D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec
from hookline.core.errors import EngineError, RequestFault
from hookline.core.step.captured import PromptShape, graph_sizes
from hookline.core.step.message import Step
from hookline.core.step.micro_batches import MicroBatch, cut
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs, capture_graphs
from hookline.core.worker.request_table import DeviceStep
from hookline.core.worker.results.token_transfer import Rows
from hookline.core.worker.runner.model_runner import PLAIN, Extras
from hookline.core.worker.stages.parts import ComputedPart, PartWorker
from hookline.core.worker.stages.returned_tokens import StepResults
from hookline.core.worker.startup.warm_up import eager_steps, graph_steps


class StageWorker(PartWorker):
    """`Worker` for a pipeline stage."""

    # ----------------------------------------------------------------------------------------------------- before steps

    @torch.inference_mode()
    def profile_run(self, spec: AttentionSpec) -> None:
        """See Worker; this stage computes its part alone, without receiving or sending."""
        stream_TD = self._stream(spec.max_num_batched_tokens)
        with self.runner.checking():
            hidden_TD = self._largest_forward(spec, None if stream_TD is None else stream_TD.zero_())
        if self.stage.is_last:
            self._profile_sampling(spec, hidden_TD)

    @torch.inference_mode()
    def profile_graphs(
        self, spec: AttentionSpec, shapes: Sequence[PromptShape], token_sizes: Sequence[int] = ()
    ) -> None:
        """See Worker."""
        graphs = self._make_graphs(spec, shares_prefixes=False)
        rows_G = torch.full((graphs.sizes[-1],), self.table.padding_row, device=spec.device)
        graphs.step(rows_G)

    def _make_graphs(self, spec: AttentionSpec, *, shares_prefixes: bool) -> DecodeGraphs:
        sizes = graph_sizes(-(-spec.max_num_seqs // self.stage.size))
        stream_GD = self._stream(sizes[-1])
        if stream_GD is not None:
            stream_GD.zero_()
        return DecodeGraphs(
            self.runner,
            sizes,
            spec.max_model_len,
            shares_prefixes=shares_prefixes,
            stage=self.stage,
            stream_GD=stream_GD,
        )

    def capture(
        self,
        spec: AttentionSpec,
        sizes: Sequence[int],
        shapes: Sequence[PromptShape],
        *,
        shares_prefixes: bool,
        token_sizes: Sequence[int] = (),
        at_once: bool = False,
    ) -> None:
        """See Worker: for micro-batches of decodes, each run once before; other micro-batches are computed eagerly."""
        self.graphs = self._make_graphs(spec, shares_prefixes=shares_prefixes)
        capture_graphs(self.graphs, None)

    @torch.inference_mode()
    def warm_up(self, spec: AttentionSpec, *, shares_prefixes: bool) -> None:
        """See Worker; this stage computes its part alone, without receiving or sending."""
        row = self.table.padding_row
        for step in eager_steps(spec, self.runner.kernels, row, shares_prefixes=shares_prefixes):
            self._warm_up_part(self.table.receive(step), None)
        for step in graph_steps(spec, self.graphs.sizes if self.graphs is not None else (), row):
            self._warm_up_part(self.table.receive(step), self.graphs)
        if self.stage.is_last:
            self._change_once(spec)

    def _draw_padding(self, step: Step, extras: Extras) -> None:
        """See Worker."""
        self._warm_up_part(self.table.receive(step), None, extras)

    def _warm_up_part(self, device_step: DeviceStep, graphs: DecodeGraphs | None, extras: Extras = PLAIN) -> None:
        one = self._forward(cut(device_step.step, 1)[0], device_step, graphs, is_alone=True)
        if self.stage.is_last:
            results_N = self._draw(one, extras)
            if len(results_N):
                self.transfer.send(results_N).wait()
        self.table.reset_padding()
        self.table.host_length_R[self.table.padding_row] = 1

    # ------------------------------------------------------------------------------------------------------ the steps

    def _sent(self, results_N: Tensor | None) -> StepResults | None:
        """See Worker; the first stage has posted receives for the results."""
        if self._results is not None and self.runner.clock is not None:
            self.runner.clock.end()
        return self._results

    def _compute(self, step: Step) -> None:
        parts, extras, rows = cut(step, self.stage.size), self.runner.extras(step), dict[str, Rows]()
        waits, may_fail = len(step.late_draws) > 0, step.num_plugin_reads > 0
        self._begin_step()
        if waits and self.stage.is_last:
            self.runner.late_rows.begin()
        computed = []
        for part, device_step in zip(parts, self._received(step, parts), strict=True):
            one = self._forward_and_send(part, device_step, extras, waits=waits or may_fail)
            if not may_fail:
                self._go_on(one, extras, waits=waits)
            self.links.end_part()
            computed.append(one)
        if may_fail:
            rows = self._reads.end_step([one.reads for one in computed], self.returned)
            for one in computed:
                self._go_on(one, extras, waits=waits)
        if waits:
            self._waiting = step, partial(self._finish_parts, computed, extras)
        else:
            self._expect(computed, extras)
        if len(step.reads) and not may_fail:
            shapes = self.runner.readers.shapes(step)
            rows = self._reads.end_step([one.reads for one in computed], self.returned, shapes)
        self._apart = {**rows, **self._returned_states(computed)}

    def _begin_step(self) -> None:
        """Drop the results of the earlier step, and write the tokens that have come back into the table."""
        self._results = None
        if self.returned is not None:
            self.returned.begin_step()

    def _received(self, step: Step, parts: Sequence[MicroBatch]) -> list[DeviceStep]:
        """The micro-batches on the device; their changes are in the request table and in the step extensions."""
        device_steps = [self.table.receive(part.step) for part in parts]
        if self.runner.extensions is not None and step.brings_to_extensions:
            # On all stages and before anything is sent: an error that ends one request is raised on every rank.
            for part, device_step in zip(parts, device_steps, strict=True):
                self.runner.extensions.receive(part.step, device_step.views)
        self.runner.begin()
        return device_steps

    def _go_on(self, one: ComputedPart, extras: Extras, *, waits: bool) -> None:
        """Finish a computed micro-batch, unless its draws wait, and mirror its lengths on the host."""
        if not waits:
            self._end_part(one, extras)
        self.table.mirror(one.part.step)

    def _finish_parts(self, computed: Sequence[ComputedPart], extras: Extras, num_rows: int) -> None:
        """The second half of a step with late draws: the last stage draws, and the other stages count the tokens."""
        if self.stage.is_last:
            self.runner.late_rows.send(num_rows)
        for one in computed:
            self._end_part(one, extras)
        self._expect(computed, extras)

    # ------------------------------------------------------------------------------------------------ a micro-batch

    def _forward_and_send(
        self, part: MicroBatch, device_step: DeviceStep, extras: Extras, *, waits: bool
    ) -> ComputedPart:
        """Compute a micro-batch up to its hidden states and send them to the next stage.

        waits: draws begin only after all micro-batches were computed, so the hidden states must last until then.
        """
        graphs = self.graphs
        if graphs is not None and not graphs.can_replay(part.step):
            graphs = None
        try:
            with self._checking_once(part.step, extras) if graphs is None else nullcontext():
                one = self._forward(part, device_step, graphs)
        except RequestFault as error:  # an extension failed in this stage's layers; other stages do not hear of it
            raise EngineError(str(error)) from error
        if not self.stage.is_last:
            self.links.send(one.hidden_ND.contiguous() if graphs is None else one.hidden_ND.clone())
        elif waits and graphs is not None:
            one = replace(one, hidden_ND=one.hidden_ND.clone(), graphs=None)  # the next replay writes over it
        return self._hand_on_streams(one)

    def _end_part(self, one: ComputedPart, extras: Extras) -> None:
        """Count the tokens that a micro-batch draws; on the last stage draw them, and send them to the first."""
        if not self.stage.is_last:
            if one.sampled is not None:
                self.table.lengthen(one.sampled)
            else:
                self.table.length_R.index_add_(0, one.rows_N, self._ones_R[: len(one.rows_N)])
            return
        try:
            results_NX = self._draw(one, extras)
        except RequestFault as error:  # the other stages went on, so its requests cannot end alone
            raise EngineError(str(error)) from error
        if len(results_NX):
            self.links.send_back(results_NX)

    def _expect(self, computed: Sequence[ComputedPart], extras: Extras) -> None:
        """On the first stage, post the receives for the results of the last stage's draws."""
        if self.returned is not None:
            num_columns = self.runner.num_columns(extras)
            parts, rows = [one.part for one in computed], [one.rows_N for one in computed]
            self._results = self.returned.expect(parts, rows, num_columns)

    def close(self) -> None:
        """See Worker."""
        self._results = self.returned = None
        super().close()
