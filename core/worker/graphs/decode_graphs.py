"""Decode steps as CUDA graphs, from the request table back into the request table: the layers, then the draws.

A graph's only input is which rows decode; lengths, block tables, sampling parameters and tokens are gathered from the
table on the device. Rows beyond the step's own are the padding row, which writes to the scratch block. Layers have one
graph for each number of rows, whatever the draws ask for; draws have one for each kind, and draws that cannot be
captured follow the layers eagerly. With pipeline stages, a rank captures its own layers, and the last stage plain
draws; transfers between stages stay outside of graphs.
Legend: G rows of a graph, D hidden.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import WHOLE_MODEL, Batch, SamplingBatch, Stage
from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray, no_ints
from hookline.core.worker.graphs.cuda_graph import ExtraGraphs, GraphPool, HiddenRoom, Recorder
from hookline.core.worker.request_table import SampleRows
from hookline.core.worker.runner.model_runner import ALL_LATE, PLAIN, Extras, ModelRunner
from hookline.core.worker.startup.memory import GIB

if TYPE_CHECKING:
    from hookline.core.worker.graphs.prompt_graphs import PromptGraphs
    from hookline.core.worker.graphs.token_graphs import TokenGraphs

logger = logging.getLogger("hookline")


@dataclass
class _Layers:
    """The captured layers of a decode step: they compute hidden_GD of the rows in rows_G, whose draws are `sampled`.

    hidden_GD: in the HiddenRoom of all sizes. graphs: by whether some of the rows share a prefix.
    """

    rows_G: Tensor
    hidden_GD: Tensor
    sampled: SampleRows
    graphs: dict[bool, torch.cuda.CUDAGraph]
    rows: IntArray = field(default_factory=no_ints)
    """The rows that rows_G begins with, on the host; the rest of rows_G is padding."""


@dataclass(frozen=True)
class _Draws:
    """The captured draws that follow some layers, or a whole step. results_G: tokens, or scored rows."""

    graph: torch.cuda.CUDAGraph
    results_G: Tensor


@torch.inference_mode()
def capture_graphs(
    decodes: DecodeGraphs,
    prompts: PromptGraphs | None,
    prepared: Sequence[Extras] = (),
    *,
    tokens: TokenGraphs | None = None,
    at_once: bool = False,
) -> None:
    """Capture all graphs into one memory pool; log how long it took and how much memory.

    prompts: None if steps with prompts are computed eagerly. prepared: kinds of draws that decodes have graphs of,
    besides plain ones. tokens: None if there are none. at_once: see GraphPool.
    """
    device = decodes.runner.table.device
    started, before = time.perf_counter(), torch.cuda.memory_reserved(device)
    pool = GraphPool(captures_at_once=at_once)
    num_prompts = 0 if prompts is None else prompts.capture(pool)
    num_tokens = 0 if tokens is None else tokens.capture(pool)
    num_decodes = decodes.capture(pool, prepared)
    torch.cuda.synchronize(device)
    seconds, grown = time.perf_counter() - started, torch.cuda.memory_reserved(device) - before
    what = f"{num_decodes} graphs of decodes and {num_prompts} with prompts"
    what += f" and {num_tokens} of tokens as rows" if num_tokens else ""
    logger.info("captured %s in %.1f s, %.2f GiB", what, seconds, grown / GIB)


class DecodeGraphs:
    """Captured decode steps, by their numbers of rows.

    Graphs share their memory, so the results of layers are valid until any graph but their draws is replayed.
    stage: the part of the model that this rank computes. stream_GD: where the residual stream of the stage before is
    received; None on the first stage.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sizes: Sequence[int],
        max_model_len: int,
        *,
        shares_prefixes: bool = False,
        stage: Stage = WHOLE_MODEL,
        stream_GD: Tensor | None = None,
    ) -> None:
        self.runner, self.sizes, self.max_model_len = runner, list(sizes), max_model_len
        self.stage, self.stream_GD = stage, stream_GD
        self._layers: dict[int, _Layers] = {}
        self._plain_draws: dict[int, _Draws] = {}
        self._other_draws: ExtraGraphs[tuple[int, Extras], _Draws] = ExtraGraphs(runner)
        self._watched_layers: ExtraGraphs[tuple[int, bool, int], torch.cuda.CUDAGraph] = ExtraGraphs(runner)
        """Layers that step extensions see: by size, whether some rows share a prefix, and the extensions' bits."""
        self._stream_rooms: dict[int, Tensor] = {}
        """For each layer whose stream extensions read, room for as many rows as the largest graphs have."""
        self._single: _Draws | None = None
        """One graph of a whole plain step of one row, which is so short that a second launch would add 1 % to it."""
        self._room = HiddenRoom(max(self.sizes, default=0))
        self._shares = shares_prefixes
        self.recorder = Recorder(runner)

    def capture(self, pool: GraphPool | None, prepared: Sequence[Extras] = ()) -> int:
        """Capture every size, the largest first so that the others fit into its memory; returns how many.

        prepared: kinds of draws to capture besides plain ones.
        """
        self.recorder.use_pool(pool)
        prepared = list(filter(self._may_capture, prepared))
        self._other_draws.reserve(len(self.sizes) * len(prepared))
        for size in reversed(self.sizes):
            self._layers[size] = self._record_layers(size)
            if self.stage.is_last:
                self._plain_draws[size] = self._record_draws(size, PLAIN)
            for extras in prepared:
                self._draws_of(size, extras)
            if size == self.stage.size == 1:
                self._single = _Draws(*self.recorder.record(partial(self.step, self._layers[1].rows_G), "step"))
        return len(self._layers)

    def _record_layers(self, size: int) -> _Layers:
        rows_G = torch.full((size,), self.runner.table.padding_row, device=self.runner.table.device)
        graph, (hidden_GD, sampled) = self.recorder.record(partial(self.kept_layers, rows_G), "layers")
        layers = _Layers(rows_G, hidden_GD, sampled, {False: graph})
        if self._shares:
            layers.graphs[True], _ = self.recorder.record(partial(self.other_layers, layers, True), "shared layers")
        return layers

    def _layers_graph(self, size: int, extensions: int, *, is_shared: bool) -> torch.cuda.CUDAGraph:
        """The graph of the layers of this size that these extensions see, captured now if it never was."""
        bits, layers = self.layer_bits(extensions), self._layers[size]
        if not bits:
            return layers.graphs[is_shared]

        def _captured() -> torch.cuda.CUDAGraph:
            self._make_rooms(bits)
            self._leave_to_padding(layers)
            step = partial(self.other_layers, layers, is_shared, bits)
            is_alike = self.treats_sizes_alike(Extras(bits))
            return self.recorder.record(step, ("layers", is_shared, bits), sizes_alike=is_alike)[0]

        return self._watched_layers.get((size, is_shared, bits), _captured)

    def layer_bits(self, extensions: int) -> int:
        """The bits of the extensions among these that see layers."""
        if not extensions or self.runner.extensions is None:
            return 0
        return self.runner.extensions.layer_bits(extensions)

    def _make_rooms(self, extensions: int) -> None:
        """Allocate buffers for the streams that these extensions read, outside the graphs' memory, which is reused."""
        assert self.runner.extensions is not None
        like_GD = self._layers[self.sizes[-1]].hidden_GD
        for layer in self.runner.extensions.read_layers(extensions):
            if layer not in self._stream_rooms:
                self._stream_rooms[layer] = torch.zeros_like(like_GD)

    def streams(self, extensions: int, num_rows: int) -> dict[int, Tensor]:
        """The buffers, by layer, into which graphs copy the streams that these extensions read: this many rows."""
        if not self.layer_bits(extensions):
            return {}
        assert self.runner.extensions is not None
        self._make_rooms(extensions)
        return {layer: self._stream_rooms[layer][:num_rows] for layer in self.runner.extensions.read_layers(extensions)}

    def _record_draws(self, size: int, extras: Extras) -> _Draws:
        step = partial(self.draws, *self.behind_layers(size, extras), extras)
        return _Draws(*self.recorder.record(step, extras, sizes_alike=self.treats_sizes_alike(extras)))

    def _draws_of(self, size: int, extras: Extras) -> _Draws:
        """The draws of this kind, captured now if they never were."""
        if extras == PLAIN:
            return self._plain_draws[size]

        def _captured() -> _Draws:
            started = time.perf_counter()
            draws = self._record_draws(size, extras)
            seconds = time.perf_counter() - started
            logger.debug("captured draws of %d rows for %s in %.3f s", size, extras, seconds)
            return draws

        return self._other_draws.get((size, extras), _captured)

    def treats_sizes_alike(self, extras: Extras) -> bool:
        """Whether these draws compute the same for all numbers of rows."""
        extensions = self.runner.extensions
        if not extras.extensions:
            return not extras.late
        return extensions is not None and extensions.treats_sizes_alike(extras.extensions) and not extras.late

    def _may_capture(self, extras: Extras) -> bool:
        extensions = self.runner.extensions
        return not extras.extensions or (extensions is not None and extensions.is_graph_safe(extras.extensions))

    def can_replay(self, step: Step) -> bool:
        """Whether graphs compute the layers of this step: it has decodes alone, and all extensions that see its layers
        can be captured.
        """
        is_captured = bool(self.sizes) and not len(step.chunk_rows)
        return is_captured and (not step.extensions or self._may_capture(Extras(self.layer_bits(step.extensions))))

    def can_sample(self, step: Step, extras: Extras) -> bool:
        """Whether graphs also sample: no single token is forbidden, and all extensions can be captured."""
        return not len(step.forbidden_draws) and self._may_capture(extras)

    def size(self, num_rows: int) -> int:
        """The size of the smallest graphs that have room for this many rows."""
        return self.sizes[int(np.searchsorted(self.sizes, num_rows))]

    def launch(self, rows_D: Tensor, rows: IntArray, extras: Extras = PLAIN, *, is_shared: bool = False) -> Tensor:
        """Replay the smallest graphs that have room for these rows; returns their tokens, or their scored rows.

        They are valid until the next launch. rows: rows_D, on the host. extras: what the draws need besides plain
        sampling; a graph for it is captured when a step first needs it. is_shared: some rows share a prefix, as the
        table's shared_len_R says.
        """
        draws = self.begin(rows_D, rows, extras, is_shared=is_shared)
        draws.graph.replay()
        return draws.results_G[: len(rows)]

    def begin(self, rows_D: Tensor, rows: IntArray, extras: Extras, *, is_shared: bool) -> _Draws:
        """As `launch`, but the graph to replay next is returned: that of the draws, or of the whole step."""
        size = self.size(len(rows))
        draws = self._draws_of(size, extras)  # before the layers, since a capture draws for the padding row
        layers_graph = self._layers_graph(size, extras.extensions, is_shared=is_shared)  # likewise
        self._layers_for(size, rows_D, rows)
        self.runner.begin()
        if self._single is not None and size == 1 and extras == PLAIN and not is_shared:
            return self._single
        layers_graph.replay()
        return draws

    def finish(self, draws: _Draws, extras: Extras, num_draws: int, num_rows: int) -> Tensor:
        """Replay the draws that `begin` returned, with the first `num_rows` late rows; returns tokens as `launch`."""
        if extras.late != ALL_LATE:
            self.runner.late_rows.send(num_rows)
        draws.graph.replay()
        if extras.late == ALL_LATE:
            self.runner.late_rows.note_replay()
        return draws.results_G[:num_draws]

    def stream_of(self, num_rows: int) -> Tensor | None:
        """Where to receive the residual stream of this many rows; None on the first stage."""
        return None if self.stream_GD is None else self.stream_GD[:num_rows]

    def plain_draws(self, count: int) -> Tensor:
        """Replay plain draws after the layers of this many rows, which were replayed last; returns their tokens."""
        draws = self._plain_draws[self.size(count)]
        draws.graph.replay()
        return draws.results_G[:count]

    def launch_layers(
        self,
        rows_D: Tensor,
        rows: IntArray,
        extensions: int = 0,
        *,
        is_shared: bool = False,
        all_greedy: bool = False,
    ) -> tuple[SampleRows, Tensor]:
        """Replay the layers alone; returns the draws and their hidden states, valid until the next launch.

        extensions: bits of the extensions that run in the step.
        """
        self.runner.begin()
        layers, count = self.replay_layers(rows_D, rows, extensions, is_shared=is_shared), len(rows)
        params = layers.sampled.params
        of_rows_D = params.temperature_N[:count], params.seed_N[:count], params.position_N[:count]
        params = SamplingBatch(*of_rows_D, all_greedy=all_greedy)
        streams = self.streams(extensions, count)
        return SampleRows(layers.sampled.rows_N[:count], None, params, streams), layers.hidden_GD[:count]

    def replay_layers(self, rows_D: Tensor, rows: IntArray, extensions: int = 0, *, is_shared: bool) -> _Layers:
        """Replay the layers alone, for draws that were captured behind them; returns the layers of this size."""
        size = self.size(len(rows))
        graph = self._layers_graph(size, extensions, is_shared=is_shared)
        layers = self._layers_for(size, rows_D, rows)
        graph.replay()
        return layers

    def behind_layers(self, size: int, extras: Extras = PLAIN) -> tuple[Tensor, SampleRows]:
        """The hidden states and the draws that the layers of this size write, for draws that are captured behind them.

        A capture runs the draws, and other graphs may have written over both; so the draws become the padding row's,
        at position 1. The hidden states may be of any rows.
        """
        layers = self._layers[size]
        self._leave_to_padding(layers)
        params = layers.sampled.params
        for values_G in (params.temperature_N, params.seed_N, params.position_N):
            values_G.fill_(1)
        streams = self.streams(extras.extensions, size)
        return layers.hidden_GD, replace(layers.sampled, streams=streams) if streams else layers.sampled

    def _leave_to_padding(self, layers: _Layers) -> None:
        """Make the padding row the only input of these layers, as for a capture that runs them."""
        layers.rows_G.fill_(self.runner.table.padding_row)
        layers.rows = no_ints()

    def _layers_for(self, size: int, rows_D: Tensor, rows: IntArray) -> _Layers:
        """The layers of this size, with the rows that they compute next as their input."""
        layers = self._layers[size]
        if not np.array_equal(rows, layers.rows):
            layers.rows_G[: len(rows)].copy_(rows_D)
            layers.rows_G[len(rows) :].fill_(self.runner.table.padding_row)
            layers.rows = rows.copy()
        return layers

    def step(self, rows_G: Tensor) -> Tensor:
        """A decode step of these rows with plain draws, layers and draws together, as its graphs capture it.

        Returns its tokens; on a stage that draws nothing, the hidden states.
        """
        hidden_GD, sampled = self.layers(rows_G)
        return self.draws(hidden_GD, sampled, PLAIN) if self.stage.is_last else hidden_GD

    def layers(self, rows_G: Tensor, is_shared: bool = False, extensions: int = 0) -> tuple[Tensor, SampleRows]:
        """The first half of a decode step of these rows: hidden states, and the draws that follow them.

        extensions: bits of the extensions that see the layers.
        """
        batch, sampled = decode_step(self.runner, rows_G, self.max_model_len, is_shared=is_shared)
        # A copy of the stream, so that an ordinary launch lies between what prepares a step and its first layer, as the
        # embedding does on the first stage: kernels that start early count on it.
        stream_GD = None if self.stream_GD is None else self.stream_GD[: len(rows_G)].clone()
        if not extensions or self.runner.extensions is None:
            return self.runner.forward(batch, stream_TD=stream_GD), sampled
        watch = self.runner.extensions.watch(extensions, rows_G, batch.positions_T, None)
        hidden_GD = self.runner.forward(batch, stream_TD=stream_GD, watch=watch)
        return hidden_GD, sampled if watch is None else replace(sampled, streams=watch.streams)

    def kept_layers(self, rows_G: Tensor) -> tuple[Tensor, SampleRows]:
        """`layers`, with the hidden states copied to the buffer that captured draws read."""
        hidden_GD, sampled = self.layers(rows_G)
        return self._room.keep(hidden_GD), sampled

    def other_layers(self, layers: _Layers, is_shared: bool, extensions: int = 0) -> None:
        """`layers` with rows that share a prefix, or watching extensions; writes to the plain layers' buffers."""
        hidden_GD, sampled = self.layers(layers.rows_G, is_shared, extensions)
        self._room.keep(hidden_GD)
        for layer, stream_GD in sampled.streams.items():
            self._stream_rooms[layer][: len(stream_GD)].copy_(stream_GD)
        for name in ("temperature_N", "seed_N", "position_N"):
            getattr(layers.sampled.params, name).copy_(getattr(sampled.params, name))

    def draws(self, hidden_GD: Tensor, sampled: SampleRows, extras: Extras) -> Tensor:
        """The second half of a step: draw, and write the tokens into the table. Returns tokens (G,) or scored rows."""
        runner = self.runner
        if extras.late == ALL_LATE:
            runner.late_rows.fetch(len(hidden_GD))
        if extras == PLAIN:
            results_G = runner.sample(hidden_GD, sampled)
        else:
            results_G = runner.sample_extra(hidden_GD, sampled, extras, self.max_model_len)
        runner.keep_tokens(sampled, results_G)
        return results_G


def decode_step(
    runner: ModelRunner, rows_G: Tensor, max_context_len: int, *, is_shared: bool = False
) -> tuple[Batch, SampleRows]:
    """The batch of a pure decode step and its draws, made from the table on the device alone.

    is_shared: some rows share a prefix, as the table's shared_len_R says.
    """
    table, size = runner.table, rows_G.shape[0]
    given = runner.kernels.gather_decodes(rows_G, table.requests)
    batch = Batch(
        token_ids_T=given.token_ids_N,
        positions_T=given.position_N,
        slot_mapping_T=given.slot_mapping_N,
        query_starts_B1=table.starts[: size + 1],
        context_lens_B=given.context_lens_N,
        block_table_BM=given.block_table_NM,
        num_decodes=size,
        max_query_len=1,
        max_context_len=max_context_len,
        query_starts_host=np.arange(size + 1, dtype=np.int32),
    )
    batch = table.grouped(batch, rows_G, None)
    if is_shared:
        batch.shared_lens_B = table.shared_len_R.index_select(0, rows_G)
    return batch, SampleRows(rows_G, None, SamplingBatch(given.temperature_N, given.seed_N, given.draw_position_N))
