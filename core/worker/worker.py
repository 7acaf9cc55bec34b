"""One rank: launches steps, by a CUDA graph where one fits, collects their tokens, and measures the memory they take.

Computes steps and knows nothing of requests, policies or text. Launching never waits for the device; collecting does.
Legend: as in core/worker/request_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Batch, SamplingBatch
from hookline.core.step.captured import PromptShape
from hookline.core.step.executor import SizedExecutor
from hookline.core.step.message import Step
from hookline.core.util.arrays import IntArray
from hookline.core.worker.decode_graphs import DecodeGraphs, capture_graphs
from hookline.core.worker.device_clock import StepClock
from hookline.core.worker.model_runner import PLAIN, Extras, ModelRunner
from hookline.core.worker.prompt_graphs import PromptGraphs
from hookline.core.worker.request_table import DeviceStep, SampleRows
from hookline.core.worker.token_transfer import TokenTransfer, TransferredTokens


class Worker(SizedExecutor):
    """The executor of a single rank: a ModelRunner, its graphs, and the transfer of its tokens to the host.

    blaming: entered around each step, to say whose code failed in it.
    """

    def __init__(self, runner: ModelRunner, *, blaming: AbstractContextManager[None] | None = None) -> None:
        self.runner, self.table = runner, runner.table
        self.blaming = nullcontext() if blaming is None else blaming
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.transfer = TokenTransfer(self.table.padding_row, self.table.device)

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold; the scratch block is not counted."""
        return self.runner.num_blocks

    @torch.inference_mode()
    def profile_run(self, spec: AttentionSpec) -> None:
        """Compute the largest step the limits allow, into the scratch block: for measuring its memory.

        Then draw from each number of rows that the kernels compile products for by themselves.
        """
        num_chunks = -(-spec.max_num_batched_tokens // spec.max_model_len)
        lens = np.full(num_chunks, min(spec.max_model_len, spec.max_num_batched_tokens))
        lens[-1] = spec.max_num_batched_tokens - lens[:-1].sum()
        hidden_TD = self.runner.forward(self._padding_batch(lens))
        index_N = torch.zeros(spec.max_num_seqs, dtype=torch.int64, device=spec.device)
        self.runner.sample(hidden_TD.index_select(0, index_N), self._padding_sample_rows(index_N))
        del hidden_TD
        for count in self.runner.kernels.own_row_counts:
            few = self._padding_batch(np.minimum(lens[:1], 2 * count))
            index_N = torch.zeros(count, dtype=torch.int64, device=spec.device)
            self.runner.sample(self.runner.forward(few, index_N), self._padding_sample_rows(index_N))

    def _padding_batch(self, lens: IntArray) -> Batch:
        """Prompts of these lengths, all of the padding row."""
        step = Step(
            chunk_rows=np.full(len(lens), self.table.padding_row),
            chunk_starts=np.zeros(len(lens), dtype=np.int64),
            chunk_lens=lens,
            token_ids_T=np.zeros(lens.sum(), dtype=np.int64),
            max_context_len=int(lens.max()),
        )
        return self.table.batch(self.table.receive(step))

    def _padding_sample_rows(self, index_N: Tensor) -> SampleRows:
        """SampleRows of the padding row from these tokens, at no temperature of zero."""
        rows_N = torch.full_like(index_N, self.table.padding_row)
        params = SamplingBatch(self.table.temperature_R[rows_N] + 1, self.table.seed_R[rows_N], rows_N)
        return SampleRows(rows_N, index_N, params)

    @torch.inference_mode()
    def profile_graphs(self, spec: AttentionSpec, shapes: Sequence[PromptShape]) -> None:
        """Compute what the largest graphs hold, with padding rows alone; graphs share their memory."""
        rows_G = torch.full((spec.max_num_seqs,), self.table.padding_row, device=spec.device)
        DecodeGraphs(self.runner, (), spec.max_model_len).step(rows_G)
        prompts = PromptGraphs(self.runner, (), spec.max_model_len)
        largest = max(shapes, key=lambda shape: (shape.num_decodes, shape.num_tokens), default=None)
        for shape in {largest, shapes[-1]} if largest else ():
            prompts.step(prompts.inputs(Step(), shape).to(spec.device), shape)

    def capture(
        self, spec: AttentionSpec, sizes: Sequence[int], shapes: Sequence[PromptShape], *, shares_prefixes: bool
    ) -> None:
        """Capture decode steps of these numbers of rows, ascending, and steps with prompts of these shapes.

        `launch` then replays these CUDA graphs.
        """
        self.graphs = DecodeGraphs(self.runner, sizes, spec.max_model_len, shares_prefixes=shares_prefixes)
        self.prompt_graphs = PromptGraphs(self.runner, shapes, spec.max_model_len)
        capture_graphs(self.graphs, self.prompt_graphs)

    @torch.inference_mode()
    def launch(self, step: Step) -> TransferredTokens:
        """Start a step; its sampled tokens are on their way to the host."""
        tokens_N = self.compute(step)
        if self.runner.clock is not None:
            self.runner.clock.end()
        return self.transfer.send(tokens_N)

    def time_steps(self) -> StepClock:
        """See Executor."""
        clock = self.runner.clock = StepClock(self.table.device)
        return clock

    def compute(self, step: Step) -> Tensor:
        """The sampled tokens (N,) of a step or their scored rows, on the device; valid until the next step.

        Raises: PluginError naming the plugin whose code failed.
        """
        with self.blaming:
            return self._compute(step)

    def _compute(self, step: Step) -> Tensor:
        device_step = self.table.receive(step)
        if self.runner.pipeline is not None and (len(step.processor_rows) or len(step.known_rows)):
            self.runner.pipeline.receive(step, device_step.views)
        extras = Extras(step.processors, min(step.num_logprobs, self.runner.vocab_size))
        if self.graphs is not None and self.graphs.can_replay(step, extras):
            self.table.mirror(step)
            return self.graphs.launch(device_step.views["decode_rows"], extras, is_shared=step.shared_len > 0)
        if self.prompt_graphs is not None and (shape := self.prompt_graphs.shape(step)) is not None:
            tokens_N = self.prompt_graphs.launch(step, shape)
            self.table.mirror(step)
            return tokens_N
        self.runner.begin()
        batch = self.table.batch(device_step)
        if step.shared_len:
            batch.shared_lens_B = self.table.shared_len_R.index_select(0, device_step.views["decode_rows"])
        sampled = self.table.sample_rows(device_step, batch)
        results_N = self._sample_all(batch, sampled, device_step, extras)
        self.table.write_back(sampled, results_N if results_N.ndim == 1 else results_N[: len(sampled.rows_N), 0])
        self.table.mirror(step)
        return results_N

    def _sample_all(self, batch: Batch, sampled: SampleRows, device_step: DeviceStep, extras: Extras) -> Tensor:
        """What a step that no graph holds sends to the host: see Executor.collect."""
        step, tokens_N, runner = device_step.step, sampled.token_indices_N, self.runner
        scores_prompts = len(step.scored_chunks) > 0
        hidden_TD = hidden_ND = runner.forward(batch, None if scores_prompts else tokens_N)
        if scores_prompts and tokens_N is not None:
            hidden_ND = hidden_TD.index_select(0, tokens_N)
        mask = device_step.views if len(step.mask_rows) else None
        results_N = sampled.rows_N
        if len(sampled.rows_N) and (mask is not None or extras != PLAIN):
            results_N = runner.sample_extra(hidden_ND, sampled, extras, step.max_context_len, mask)
        elif len(sampled.rows_N):
            results_N = runner.sample(hidden_ND, sampled)
        if not scores_prompts:
            return results_N
        prompt_PX = runner.score_prompt(hidden_TD, step, extras.num_logprobs)
        return torch.cat([results_N, prompt_PX]) if results_N.ndim == 2 else prompt_PX

    def collect(self, handle: TransferredTokens) -> IntArray:
        """Wait for a launched step and return its tokens, or their scored rows."""
        return handle.wait()

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.table.device.type == "cuda":
            torch.cuda.synchronize(self.table.device)

    def close(self) -> None:
        """Drop the cache, the weights and what processors keep."""
        self.graphs = None
        self.prompt_graphs = None
        self.runner.close()
        if self.table.device.type == "cuda":
            torch.cuda.empty_cache()
