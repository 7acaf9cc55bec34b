"""One rank on its device: it launches steps, as CUDA graphs where one fits the step, and collects their tokens.

Requests, policies and text stay with the engine; a worker is given steps and returns integers. Launching never waits
for the device; collecting does. Legend: as in core/worker/request_table.py.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Batch, SamplingBatch, StepShape
from hookline.core.errors import (
    PASSES,
    EngineError,
    HooklineError,
    LostStep,
    RequestFault,
    StepCapacityError,
    StepFault,
    is_out_of_memory,
    one_short_line,
)
from hookline.core.plugin.blame import Blaming
from hookline.core.step.captured import PromptShape
from hookline.core.step.executor import RankWorker, StepResult
from hookline.core.step.message import Step
from hookline.core.util.arrays import WordArray
from hookline.core.worker.device_clock import StepClock
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs, capture_graphs
from hookline.core.worker.graphs.laid_out_graphs import LaidOutGraphs
from hookline.core.worker.graphs.prompt_graphs import PromptGraphs
from hookline.core.worker.graphs.token_graphs import TokenGraphs
from hookline.core.worker.request_table import DeviceStep, SampleRows, on_device
from hookline.core.worker.results.prompt_readers import DeviceRows
from hookline.core.worker.results.token_transfer import Rows, TokenTransfer, send_apart
from hookline.core.worker.runner.model_runner import ALL_LATE, PLAIN, Extras, ModelRunner
from hookline.core.worker.runner.step_extensions import LayerWatch
from hookline.core.worker.startup.late_work import LateWork
from hookline.core.worker.startup.warm_up import draw_steps, eager_steps, graph_steps, padding_step

logger = logging.getLogger("hookline")


@dataclass
class Handle:
    """A launched step.

    tokens: None while its draws wait for late rows, and on ranks whose results are not collected. apart: see
    StepResult. kept: the part of `apart` that stays on the device. extras: the requirements of its draws. calls: timed
    calls of step extensions' methods, see CallClock.
    """

    tokens: Rows | None
    apart: Mapping[str, Rows] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Extras = PLAIN
    calls: list[Any] = field(default_factory=list)


OtherSteps = Callable[[DeviceStep], Tensor | None]
"""compute(step): the results of a step that it computes, valid until the next step; None for other steps."""


class Worker(RankWorker):
    """The executor of a single rank: a ModelRunner, its CUDA graphs, and the transfer of tokens to the host.

    is_host: whether this rank's host collects the results. blaming: finds the plugin whose code raised a step's error;
    None: no plugin is blamed.
    prepared: kinds of draws to make ready before the first step, besides plain draws. keeps_states: whether the hidden
    states of each step stay on the device, for a drafter in this process.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        is_host: bool = True,
        blaming: Blaming | None = None,
        prepared: Sequence[Extras] = (),
        keeps_states: bool = False,
    ) -> None:
        self.runner, self.table, self.is_host = runner, runner.table, is_host
        self._kept_names = frozenset(runner.apart) if keeps_states else frozenset[str]()
        self.prepared = prepared
        self.blaming = blaming
        self._checked: set[tuple[object, ...]] = set()
        """Kinds of eager steps whose results were checked: which of four sections are filled, and the Extras."""
        self.failure: str | None = None
        """Why no further step can be computed."""
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.token_graphs: TokenGraphs | None = None
        self.transfer = TokenTransfer(self.table.padding_row, self.table.device)
        self.late_compiles = LateWork()
        """Counts from `begin` on, when the worker is ready."""
        self._other_steps: OtherSteps | None = None
        """Computes the steps whose rows only the device knows; None if there are none."""
        self._waiting: tuple[Step, Callable[[int], Tensor | None]] | None = None
        """The step launched last, if its draws wait for late rows, and the function that draws with so many rows."""
        self._apart: Mapping[str, Rows] = {}
        """Arrays of the step computed last that belong to no draw, on the way to the host; see StepResult.apart."""
        self._on_device: Mapping[str, Tensor] = {}
        """The arrays among them that stay on the device."""

    @property
    def progress(self) -> int:
        """See Executor."""
        return self.runner.progress[0]

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold; the scratch block is not counted."""
        return self.runner.num_blocks

    @property
    def late_work(self) -> Mapping[str, int]:
        """See EngineView.late_work."""
        return self.late_compiles.counts

    @torch.inference_mode()
    def profile_run(self, spec: AttentionSpec) -> None:
        """Compute the largest step that the limits allow, so that its memory can be measured; writes to scratch.

        Hidden states that stay on the device are held until the step is committed, which is after the next one began.
        """
        held = [self._room_for_states(spec)]
        with self.runner.checking():  # it is the first forward, where mistakes in a new model's code show
            hidden_TD = self._largest_forward(spec)
        held.append(self._room_for_states(spec))
        self._profile_sampling(spec, hidden_TD)

    def _room_for_states(self, spec: AttentionSpec) -> Tensor | None:
        """As much memory as the hidden states of the largest step that stay on the device."""
        if not self._kept_names:
            return None
        assert self.runner.extensions is not None
        shape = len(self._kept_names), spec.max_num_batched_tokens, self.runner.extensions.spec.hidden_size
        return torch.empty(shape, dtype=torch.float32, device=spec.device)

    def _profile_sampling(self, spec: AttentionSpec, hidden_TD: Tensor) -> None:
        """Draw as many tokens as requests can run."""
        index_N = torch.zeros(spec.max_num_seqs, dtype=torch.int64, device=spec.device)
        self.runner.sample(hidden_TD.index_select(0, index_N), self._padding_sample_rows(index_N))

    def _largest_forward(self, spec: AttentionSpec, stream_TD: Tensor | None = None) -> Tensor:
        """The hidden states of as many prompt tokens as a step may have, all of the padding row."""
        num_chunks = -(-spec.max_num_batched_tokens // spec.max_model_len)
        lens = np.full(num_chunks, min(spec.max_model_len, spec.max_num_batched_tokens))
        lens[-1] = spec.max_num_batched_tokens - lens[:-1].sum()
        step = Step(
            chunk_rows=np.full(len(lens), self.table.padding_row),
            chunk_starts=np.zeros(len(lens), dtype=np.int64),
            chunk_lens=lens,
            token_ids_T=np.zeros(lens.sum(), dtype=np.int64),
            max_context_len=int(lens.max()),
        )
        batch = self.table.batch(self.table.receive(step))
        return self.runner.forward(batch, stream_TD=stream_TD, watch=self.runner.watch(step, batch, None))

    def _padding_sample_rows(self, index_N: Tensor) -> SampleRows:
        """SampleRows of the padding row that follow these tokens, with temperatures above 0."""
        rows_N = torch.full_like(index_N, self.table.padding_row)
        params = SamplingBatch(self.table.temperature_R[rows_N] + 1, self.table.seed_R[rows_N], rows_N)
        return SampleRows(rows_N, index_N, params)

    @torch.inference_mode()
    def profile_graphs(
        self, spec: AttentionSpec, shapes: Sequence[PromptShape], token_sizes: Sequence[int] = ()
    ) -> None:
        """Compute the steps of the largest graphs eagerly, with padding rows alone, to measure the graphs' memory.

        The largest graphs are enough, since all graphs share their memory.
        """
        rows_G = torch.full((spec.max_num_seqs,), self.table.padding_row, device=spec.device)
        DecodeGraphs(self.runner, (), spec.max_model_len).step(rows_G)
        prompts = PromptGraphs(self.runner, (), spec.max_model_len)
        alone = [shape for shape in shapes if not shape.num_decodes]
        largest = max(shapes, key=lambda shape: (shape.num_decodes, shape.num_tokens), default=None)
        for shape in {largest, alone[-1]} if largest else ():
            prompts.step(prompts.inputs(Step(), shape).to(spec.device), shape)
        tokens = TokenGraphs(self.runner, token_sizes[-1:], spec.max_model_len)
        for size in tokens.shapes:
            tokens.step(tokens.inputs(Step(), size).to(spec.device), size)

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
        """Capture decode steps of these numbers of rows, ascending, steps with prompts of these shapes, and steps of
        these numbers of tokens as rows, ascending.

        `launch` then replays these CUDA graphs. at_once: whether only the first of each kind runs before its capture.
        """
        self.graphs = DecodeGraphs(self.runner, sizes, spec.max_model_len, shares_prefixes=shares_prefixes)
        self.prompt_graphs = PromptGraphs(self.runner, shapes, spec.max_model_len)
        self.token_graphs = TokenGraphs(self.runner, token_sizes, spec.max_model_len) if token_sizes else None
        capture_graphs(self.graphs, self.prompt_graphs, self.prepared, tokens=self.token_graphs, at_once=at_once)

    @torch.inference_mode()
    def warm_up(self, spec: AttentionSpec, *, shares_prefixes: bool) -> None:
        """Compute each kind of step once, so that no request waits for a compiler or a loader; see warm_up.py."""
        row = self.table.padding_row
        for step in eager_steps(spec, self.runner.kernels, row, shares_prefixes=shares_prefixes):
            self._warm_up(self._compute_eagerly(self.table.receive(step), PLAIN))
        if self.graphs is not None:
            for step in graph_steps(spec, self.graphs.sizes, row):
                self.rehearse(step)
        for size in self.token_graphs.shapes if self.token_graphs is not None else ():
            self.rehearse(padding_step(spec, StepShape(num_tokens=size, context_len=1), row))
        self._change_once(spec)

    def _change_once(self, spec: AttentionSpec) -> None:
        """Change logits as a late row does."""
        logits_1V = torch.zeros(1, self.runner.vocab_size, dtype=spec.dtype, device=spec.device)
        self.runner.new_late_rows(1).change(logits_1V)

    @torch.inference_mode()
    def rehearse(self, step: Step) -> None:
        """Compute a step of padding rows, so that what it needs is ready; the table is left as it was."""
        self._warm_up(self._compute(step))

    def compute_by(self, compute: OtherSteps | None) -> None:
        """Have this function compute the steps that it can from now on."""
        self._other_steps = compute

    @torch.inference_mode()
    def prepare_draws(self, spec: AttentionSpec) -> None:
        """Draw once, eagerly, for each kind in `prepared`; kinds that fail are left out, with a warning."""
        self.prepared = [extras for extras in self.prepared if self._can_draw(spec, extras)]

    def _can_draw(self, spec: AttentionSpec, extras: Extras) -> bool:
        try:
            for step in draw_steps(spec, self.table.padding_row):
                self._draw_padding(step, extras)
        except RequestFault as error:
            logger.warning("draws are not made ready at the start: %s", error)
            return False
        return True

    def _draw_padding(self, step: Step, extras: Extras) -> None:
        """Compute a step of padding rows eagerly."""
        self._warm_up(self._compute_eagerly(self.table.receive(step), extras))

    def _warm_up(self, tokens_N: Tensor | None) -> None:
        """Wait for a step of padding rows, and leave the table as it was."""
        if tokens_N is not None and len(tokens_N):
            self.transfer.send(tokens_N).wait()
        self.table.reset_padding()
        self.table.host_length_R[self.table.padding_row] = 1

    @torch.inference_mode()
    def launch(self, step: Step) -> Handle:
        """Start a step; its sampled tokens are on their way to the host, or wait for late rows.

        Raises: StepFault naming the plugin whose code failed, or StepCapacityError; no result of the step is kept then.
        EngineError if an earlier step left the device unable to compute.
        """
        if self.failure is not None:
            raise EngineError(self.failure)
        self._waiting, self._apart, self._on_device = None, {}, {}
        with self._telling(step):
            results_N = self._compute(step)
            self.table.save_states(step)
        extras = self.runner.extras(step)
        calls = self._timed_calls() if step.extensions else []
        return Handle(self._sent(results_N), self._apart, self._on_device, extras, calls)

    def _timed_calls(self) -> list[Any]:
        """The calls of extensions' methods that were timed since the last time."""
        extensions = self.runner.extensions
        return [] if extensions is None or extensions.clock is None else extensions.clock.pop()

    @torch.inference_mode()
    def release(self, handle: Handle, num_rows: int) -> None:
        """See Executor. Raises: as `launch` does."""
        handle.tokens = self._sent(self._draw_late(num_rows))
        if handle.extras.extensions:
            handle.calls += self._timed_calls()

    def _sent(self, results_N: Tensor | None) -> Rows | None:
        """A step's results on their way to the host; None if it has not drawn yet, or if they are not collected."""
        if results_N is None or not self.is_host:
            return None
        if self.runner.clock is not None:
            self.runner.clock.end()
        return self.transfer.send(results_N)

    def late_rows(self, num_rows: int) -> WordArray:
        """See Executor; waits until the device has read the rows before."""
        return self.runner.late_rows.host_rows[:num_rows]

    def time_steps(self) -> StepClock:
        """See Executor."""
        clock = self.runner.clock = StepClock(self.table.device)
        if self.runner.extensions is not None:
            self.runner.extensions.time_calls()
        return clock

    @contextmanager
    def _telling(self, step: Step) -> Iterator[None]:
        """Around a step or a half of it: its errors say whose code failed, and how large the step was."""
        try:
            yield
        except PASSES:
            raise
        except BaseException as raised:
            blamed = None if self.blaming is None else self.blaming.blamed(raised)
            error, cause = (raised, raised.__cause__) if blamed is None else (blamed, raised)
            told = _told(self._sampler_fault(step) or error, step)
            self._check_device()
            if isinstance(told, LostStep) and self.failure is not None:
                told.end_engine()
            raise told from (cause if told is error or type(error) is StepFault else error)

    def _sampler_fault(self, step: Step) -> StepFault | None:
        """After a failed step: the sampler's fault, if it drew an input token outside the vocabulary, for which the
        model would be blamed. Draws are checked in first steps alone; a GPU computes nothing after such a step.
        """
        if self.table.device.type != "cpu":
            return None
        tokens_N = self.table.last_token_R[torch.from_numpy(step.decode_rows)]
        is_sharded = self.runner.ranks.size > 1 and self.runner.shards_vocabulary
        method = "sample_shard" if is_sharded else "sample"
        try:
            self.runner.checks.inside(
                "sampler", method, tokens_N, "token id", "the vocabulary", 0, self.runner.vocab_size
            )
        except StepFault as fault:
            return fault
        return None

    def _check_device(self) -> None:
        """After a failed step: free the memory that torch cached for it, and see whether the device still computes."""
        if self.table.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.table.device)
            torch.cuda.empty_cache()
        except RuntimeError as broken:
            self.failure = f"{one_short_line(broken)}; the engine has ended, since its GPU computes no further step"

    def _draw_late(self, num_rows: int) -> Tensor | None:
        """Draw the tokens of the step launched last, which waited, with the first `num_rows` of `late_rows`.

        Returns what `_compute` returns for other steps.
        """
        waiting, self._waiting = self._waiting, None
        assert waiting is not None, "no step waits for late rows"
        with self._telling(waiting[0]):
            return waiting[1](num_rows)

    def _begin_late(self, device_step: DeviceStep, extras: Extras) -> None:
        """Compute the first half of a step whose draws are late: up to its hidden states."""
        step, views, rows, graphs = device_step.step, device_step.views, self.runner.late_rows, self.graphs
        if graphs is not None and graphs.can_replay(step) and graphs.can_sample(step, extras):
            if extras.late != ALL_LATE:
                rows.begin()
            draws = graphs.begin(views["decode_rows"], step.decode_rows, extras, is_shared=step.shared_len > 0)
            self._waiting = step, partial(graphs.finish, draws, extras, step.num_sampled)
        else:
            rows.begin()
            computed = self._replayed_layers(device_step) or self._forward_step(device_step)
            self._waiting = step, partial(self._finish_late, device_step, extras, computed)
        rows.place(step.num_sampled, views["late_draws"])

    def _finish_late(
        self, device_step: DeviceStep, extras: Extras, computed: tuple[SampleRows, Tensor], num_rows: int
    ) -> Tensor:
        """The second half of a step that no graph draws for. computed: its draws and their hidden states."""
        self.runner.late_rows.send(num_rows)
        return self._compute_eagerly(device_step, extras, computed)

    def _compute(self, step: Step) -> Tensor | None:
        """The sampled tokens (N,) of a step or their scored rows, on the device; valid until the next step.

        None if they wait for late rows.
        """
        device_step = self.table.receive(step)
        if self.runner.extensions is not None and step.brings_to_extensions:
            self.runner.extensions.receive(step, device_step.views)
        extras = self.runner.extras(step)
        results_N = None if self._other_steps is None else self._other_steps(device_step)
        if len(step.late_draws):
            self._begin_late(device_step, extras)
        elif results_N is None and (results_N := self._replayed(device_step, extras)) is None:
            results_N = self._compute_eagerly(device_step, extras, self._replayed_layers(device_step))
        self.table.mirror(step)
        return results_N

    def _replayed(self, device_step: DeviceStep, extras: Extras) -> Tensor | None:
        """The results of a step whose layers and draws graphs compute; None for other steps."""
        step, graphs = device_step.step, self.graphs
        if graphs is not None and graphs.can_replay(step) and graphs.can_sample(step, extras):
            rows_D = device_step.views["decode_rows"]
            results_N = graphs.launch(rows_D, step.decode_rows, extras, is_shared=step.shared_len > 0)
        elif extras == PLAIN and not len(step.forbidden_draws) and (laid_out := self._laid_out(step)):
            results_N = laid_out[0].launch(step, laid_out[1])
            self._send_apart(laid_out[0].apart(step.num_tokens), are_rooms=True)
        else:
            return None
        return results_N

    def _replayed_layers(self, device_step: DeviceStep) -> tuple[SampleRows, Tensor] | None:
        """The draws of a step whose layers graphs compute, and their hidden states; None for other steps."""
        step, graphs = device_step.step, self.graphs
        if graphs is not None and graphs.can_replay(step):
            is_shared, rows_D = step.shared_len > 0, device_step.views["decode_rows"]
            return graphs.launch_layers(
                rows_D, step.decode_rows, step.extensions, is_shared=is_shared, all_greedy=step.all_greedy
            )
        if self.runner.sees_layers(step):
            return None
        laid_out = self._laid_out(step)
        if laid_out is None:
            return None
        replayed = laid_out[0].launch_layers(step, laid_out[1])
        self._send_apart(laid_out[0].apart(step.num_tokens), are_rooms=True)
        return replayed

    def _send_apart(self, rows: DeviceRows, *, are_rooms: bool = False) -> None:
        """Start copying a step's arrays that belong to no draw to the host, by name, unless they stay on the device.

        are_rooms: whether the next step overwrites these arrays.
        """
        if self.is_host:
            kept = {name: one for name, one in rows.items() if name in self._kept_names}
            self._on_device = {name: one.clone() for name, one in kept.items()} if are_rooms else kept
            self._apart = {name: send_apart(one) for name, one in rows.items() if name not in kept}

    def _laid_out(self, step: Step) -> tuple[LaidOutGraphs[Any], Any] | None:
        """The graphs with prompts, or of tokens as rows, that hold a step, and its shape; None if none do."""
        for graphs in (self.token_graphs, self.prompt_graphs):
            if graphs is not None and (shape := graphs.shape(step)) is not None:
                return graphs, shape
        return None

    def _compute_eagerly(
        self, device_step: DeviceStep, extras: Extras, computed: tuple[SampleRows, Tensor] | None = None
    ) -> Tensor:
        """Compute a step without graphs, or its draws alone. computed: its draws and their hidden states."""
        with self._checking_once(device_step.step, extras):
            sampled, hidden_TD = computed or self._forward_step(device_step)
            results_N = self._draw_all(hidden_TD, sampled, device_step, extras)
        self.runner.keep_tokens(sampled, results_N)
        return results_N

    @contextmanager
    def _checking_once(self, step: Step, extras: Extras) -> Iterator[None]:
        """Around eager work: the results of plugins are checked against their contracts once per kind of step."""
        sections = (step.decode_rows, step.chunk_rows, step.forbidden_draws, step.reads)
        kind: tuple[bool | Extras, ...] = (*(len(section) > 0 for section in sections), extras)
        if kind in self._checked:
            yield
            return
        with self.runner.checking():
            yield
        self._checked.add(kind)

    def _forward_step(self, device_step: DeviceStep) -> tuple[SampleRows, Tensor]:
        """The draws of a step that no graph holds, and their hidden states."""
        step = device_step.step
        self.runner.begin()
        batch = self.table.batch(device_step)
        sampled = self.table.sample_rows(device_step, batch)
        watch = self.runner.watch(step, batch, sampled.token_indices_N)
        hidden_ND, read = self._forward_and_read(step, batch, sampled, watch=watch)
        self._send_apart(read if watch is None else {**read, **watch.apart})
        return sampled if watch is None else replace(sampled, streams=watch.streams), hidden_ND

    def _forward_and_read(
        self,
        step: Step,
        batch: Batch,
        sampled: SampleRows,
        stream_TD: Tensor | None = None,
        watch: LayerWatch | None = None,
    ) -> tuple[Tensor, DeviceRows]:
        """The hidden states of a step's draws, and the rows of prompt readers. stream_TD, watch: see ModelRunner."""
        wanted_N, readers = sampled.token_indices_N, self.runner.readers
        if not len(step.reads):
            return self.runner.forward(batch, wanted_N, stream_TD, watch), {}
        assert wanted_N is not None, "a draw follows every token, and prompts are read"
        groups = readers.groups(step)
        if not readers.read_last(groups):
            hidden_TD = self.runner.forward(batch, stream_TD=stream_TD, watch=watch)
            return hidden_TD.index_select(0, wanted_N), readers.run(groups, hidden_TD, is_whole=True)
        tokens_P = on_device(np.concatenate([group.tokens for group in groups]), wanted_N.device)
        hidden_XD = self.runner.forward(batch, torch.cat([wanted_N, tokens_P]), stream_TD, watch)
        return hidden_XD[: len(wanted_N)], readers.run(groups, hidden_XD[len(wanted_N) :], is_whole=False)

    def _draw_all(
        self,
        hidden_ND: Tensor,
        sampled: SampleRows,
        device_step: DeviceStep,
        extras: Extras,
    ) -> Tensor:
        """Draw the tokens of an eager step; returns tokens (N,), or rows (N, X) that `ModelRunner.split` reads."""
        step = device_step.step
        forbidden = device_step.views if len(step.forbidden_draws) else None
        if not len(sampled.rows_N):
            return sampled.rows_N
        if forbidden is not None or extras != PLAIN:
            return self.runner.sample_extra(hidden_ND, sampled, extras, step.max_context_len, forbidden)
        return self.runner.sample(hidden_ND, sampled)

    def collect(self, handle: Handle) -> StepResult:
        """See Executor."""
        assert handle.tokens is not None, "the step's draws wait for late rows"
        tokens, extras = self.runner.split(handle.tokens.wait(), handle.extras)
        seconds_X2 = self.runner.call_seconds(handle.calls) if handle.extras.extensions else None
        apart = {name: rows.wait().view(np.float32) for name, rows in handle.apart.items()}
        return StepResult(tokens, extras, {**apart, **handle.kept}, seconds_X2)

    def has_arrived(self, handle: Handle) -> bool:
        """See RankWorker."""
        assert handle.tokens is not None, "the step's draws wait for late rows"
        return handle.tokens.has_arrived

    def synchronize(self) -> None:
        """See RankWorker."""
        if self.table.device.type == "cuda":
            torch.cuda.synchronize(self.table.device)

    def close(self) -> None:
        """Drop the cache, the weights, the graphs and the extensions' state; their memory is free when this returns."""
        self.late_compiles.end()
        self.graphs = self.prompt_graphs = self.token_graphs = self._other_steps = None
        self._waiting, self._apart, self._on_device = None, {}, {}
        if self.runner.ranks.num_all > 1 and self.table.device.type == "cuda":
            gc.collect()  # frees graphs in reference cycles, for which NCCL would wait
        try:
            self.runner.close()
        finally:
            if self.table.device.type == "cuda" and self.runner.ranks.is_free:
                gc.collect()  # frees tensors in reference cycles
                torch.cuda.empty_cache()


def _told(error: BaseException, step: Step) -> BaseException:
    """The error to raise for a step that failed, with the size of the step."""
    sizes = f"{len(step.decode_rows)} decodes and {len(step.token_ids_T)} prompt tokens"
    if is_out_of_memory(error) and not isinstance(error, HooklineError):
        return StepCapacityError(
            f"out of memory in a step of {sizes}: {one_short_line(error)}; lower engine.max_num_batched_tokens, "
            "engine.max_num_seqs or engine.memory_fraction"
        )
    return StepFault(f"{error}; the step had {sizes}") if type(error) is StepFault else error
