"""A micro-batch on a pipeline stage: the stage receives its stream and computes its layers; the last stage draws.

Legend: as in core/worker/request_table.py; D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Stage
from hookline.core.errors import RequestFault
from hookline.core.plugin.blame import Blaming
from hookline.core.step.message import Axis
from hookline.core.step.micro_batches import MicroBatch
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from hookline.core.worker.request_table import DeviceStep, SampleRows, on_device
from hookline.core.worker.results.token_transfer import Rows, send_apart
from hookline.core.worker.runner.model_runner import PLAIN, Extras, ModelRunner
from hookline.core.worker.stages.reads import NOTHING_READ, PartReads, StageReads
from hookline.core.worker.stages.reads import Links as ReadLinks
from hookline.core.worker.stages.returned_tokens import ReturnedTokens, StepResults
from hookline.core.worker.worker import Worker

Key = TypeVar("Key", int, str)


class Links(ReadLinks, Protocol):
    """A rank's links to other stages; see `core.distributed.stage_links.StageLinks`."""

    def end_part(self) -> None:
        """Note, for the monitor of the ranks, that a micro-batch was computed."""
        ...


@dataclass(frozen=True)
class ComputedPart:
    """A micro-batch computed up to its hidden states: of its draws on the last stage, of all tokens on the others.

    sampled: None if a graph computed it, which needs only the rows that decode. graphs: the graphs that can replay the
    draws; None if draws are computed eagerly. reads: of its prompts, on the last stage. streams, apart: see LayerWatch;
    of the layers of this stage and of earlier stages.
    """

    part: MicroBatch
    device_step: DeviceStep
    sampled: SampleRows | None
    hidden_ND: Tensor
    graphs: DecodeGraphs | None
    reads: PartReads = NOTHING_READ
    streams: Mapping[int, Tensor] = field(default_factory=dict)
    apart: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rows_N(self) -> Tensor:
        """Each draw's row of the request table."""
        if self.sampled is not None:
            return self.sampled.rows_N
        rows_D: Tensor = self.device_step.views["decode_rows"]
        return rows_D


NOTHING_KEPT: Mapping[str, int] = {}


class PartWorker(Worker):
    """The `Worker` of a pipeline stage as far as single micro-batches go; `StageWorker` puts steps together from them.

    links: to the ranks of the other stages. hidden_size: D. kept: the layers, by name, whose streams every step keeps
    apart from its draws and that the first stage does not have.
    """

    def __init__(
        self,
        runner: ModelRunner,
        stage: Stage,
        links: Links,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        is_host: bool,
        blaming: Blaming | None = None,
        kept: Mapping[str, int] = NOTHING_KEPT,
        prepared: Sequence[Extras] = (),
    ) -> None:
        super().__init__(runner, is_host=is_host, blaming=blaming, prepared=prepared)
        self.stage, self.links, self._spec, self._hidden_size = stage, links, spec, hidden_size
        self._kept = kept
        self.returned = ReturnedTokens(self.table, links, is_host=is_host) if stage.is_first else None
        self._reads = StageReads(stage, links, spec.device)
        self._ones_R = torch.ones_like(self.table.length_R)
        self._results: StepResults | None = None
        """On the first stage: the results of the step drawn last."""

    def _stream(self, num_tokens: int) -> Tensor | None:
        """Room for a residual stream; None on the first stage, which begins with the embedding."""
        if self.stage.is_first:
            return None
        return self._rows(num_tokens, self._spec.dtype)

    def _forward(
        self, part: MicroBatch, device_step: DeviceStep, graphs: DecodeGraphs | None, *, is_alone: bool = False
    ) -> ComputedPart:
        """Compute the stage's layers. is_alone: other stages send nothing; zeros take the place of their stream."""
        step = part.step
        if self.returned is not None:
            self.returned.await_rows(step.decode_rows)
        stream_TD = self._stream(step.num_tokens) if graphs is None else graphs.stream_of(step.num_tokens)
        if stream_TD is not None:
            stream_TD.zero_() if is_alone else self.links.receive(stream_TD)
        if graphs is None:
            return self._forward_eagerly(part, device_step, stream_TD)
        is_shared, rows_D = step.shared_len > 0, device_step.views["decode_rows"]
        layers = graphs.replay_layers(rows_D, step.decode_rows, step.extensions, is_shared=is_shared)
        hidden_ND = layers.hidden_GD[: len(step.decode_rows)]
        streams = graphs.streams(step.extensions, len(step.decode_rows))
        own = {layer: stream_ND.clone() for layer, stream_ND in streams.items() if layer in self.own_layers}
        return ComputedPart(part, device_step, None, hidden_ND, graphs, streams=own)

    def _forward_eagerly(self, part: MicroBatch, device_step: DeviceStep, stream_TD: Tensor | None) -> ComputedPart:
        """Compute the layers of a micro-batch for which there is no graph."""
        step, batch = part.step, self.table.batch(device_step)
        sampled = self.table.sample_rows(device_step, batch)
        watch = self.runner.watch(step, batch, sampled.token_indices_N)
        # filled by the forward
        streams, apart = ({}, {}) if watch is None else (watch.streams, watch.apart)
        if not self.stage.is_last:
            hidden_TD = self.runner.forward(batch, None, stream_TD, watch)
            return ComputedPart(part, device_step, sampled, hidden_TD, None, streams=streams, apart=apart)
        try:
            hidden_ND, rows = self._forward_and_read(step, batch, sampled, stream_TD, watch)
            reads = PartReads(rows)
        except RequestFault as fault:
            if not step.num_plugin_reads:
                raise
            assert stream_TD is not None, "the last stage receives a stream"
            hidden_ND, reads = stream_TD[:0], PartReads(fault=fault)  # raised once the other stages are told of it
        return ComputedPart(part, device_step, sampled, hidden_ND, None, reads, streams, apart)

    def _hand_on_streams(self, one: ComputedPart) -> ComputedPart:
        """Receive the streams that are read after earlier stages' layers; send them on, or keep them on the last stage.

        Extensions read the streams of the draws' tokens; the streams of all tokens are kept apart for the host.
        """
        step, extensions, streams, apart = one.part.step, self.runner.extensions, one.streams, one.apart
        if not (step.extensions or self._kept):
            return one
        if step.extensions and step.num_sampled and extensions is not None:
            layers = {layer: layer for layer in extensions.read_layers(step.extensions)}
            streams = self._handed_on(streams, layers, step.num_sampled, self._spec.dtype)
        if self._kept and not self.stage.is_first:  # the first stage copies its own to its host
            apart = self._handed_on(apart, self._kept, step.num_tokens, torch.float32)
        return replace(one, streams=streams, apart=apart)

    def _handed_on(
        self, own: Mapping[Key, Tensor], layers: Mapping[Key, int], num_rows: int, dtype: torch.dtype
    ) -> dict[Key, Tensor]:
        """The streams after these layers, ascending, of this and earlier stages; sent on by all stages but the last."""
        streams = dict(own)
        for key, layer in layers.items():
            if layer < self.stage.first_layer:
                streams[key] = self._rows(num_rows, dtype)
                self.links.receive(streams[key])
        if not self.stage.is_last:
            for key in layers:
                if key in streams:
                    self.links.send(streams[key].contiguous())
        return streams

    def _returned_states(self, computed: Sequence[ComputedPart]) -> dict[str, Rows]:
        """The streams kept apart, for the first stage's host; the last stage sends it the other stages' streams."""
        if self.stage.is_last:
            for one in computed:
                for name in self._kept:
                    self.links.send_back(one.apart[name])
        if self.returned is None:
            return {}
        arrivals: list[dict[str, Rows]] = []
        for one in computed:
            own = {name: send_apart(state_TD) for name, state_TD in one.apart.items()}
            num_tokens = one.part.step.num_tokens
            come = {name: self.returned.receive(self._rows(num_tokens, torch.float32)) for name in self._kept}
            arrivals.append({**own, **come})
        parts = [one.part for one in computed]
        return {name: StepResults(parts, [one[name] for one in arrivals], Axis.TOKEN) for name in arrivals[0]}

    def _rows(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """An empty tensor for hidden states, (num_rows, D)."""
        return torch.empty(num_rows, self._hidden_size, dtype=dtype, device=self._spec.device)

    @property
    def own_layers(self) -> range:
        """The layers of this stage."""
        return range(0) if self.runner.extensions is None else self.runner.extensions.own_layers

    def _draw(self, one: ComputedPart, extras: Extras) -> Tensor:
        """Draw, and write the tokens into the table; returns a micro-batch's results as `Worker` does a step's."""
        step, views, rows_N = one.part.step, one.device_step.views, one.rows_N
        if one.graphs is not None and extras == PLAIN and not len(step.forbidden_draws):
            return one.graphs.plain_draws(len(rows_N)).clone()
        if extras.late:
            rows_K = on_device(one.part.places(Axis.LATE), self.table.device)
            self.runner.late_rows.place(step.num_sampled, views["late_draws"], rows_K)
        sampled = self.table.decode_draws(rows_N) if one.sampled is None else one.sampled
        if one.streams:
            sampled = replace(sampled, streams=one.streams)
        with self._checking_once(step, extras):
            results_NX = self._draw_all(one.hidden_ND, sampled, one.device_step, extras)
        self.runner.keep_tokens(sampled, results_NX)
        return results_NX
