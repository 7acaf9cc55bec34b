"""A rank's half of the logits processors: their per-row arguments on the device, and the logits they change.

Steps name processors by index; `core.requests.logits_processing` decides on the host which ones a step runs. Nothing is
allocated before a request uses a processor.
Legend: R rows of the request table, N rows of a step, V vocabulary, L tokens of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import LogitsRows, ProcessorSpec, SamplingBatch, TokenTexts
from hookline.core.errors import RequestError, RequestFault
from hookline.core.plugin.blame import breach, failure
from hookline.core.plugin.processors import ProcessorStage
from hookline.core.step.message import Step
from hookline.core.util.raising import Raising
from hookline.core.worker.request_table import on_device
from hookline.core.worker.step_checks import form_fault

DURING = " during a step"
"""Follows the method's name in errors of processors, whose methods are also called before steps."""


class Processor:
    """One processor on a rank: its object and its columns, floats_FR float32 and ints_IR int64."""

    def __init__(self, stage: ProcessorStage, index: int, spec: ProcessorSpec) -> None:
        self.stage, self.index = stage, index
        self.processor: Any = stage.cls(spec)
        self.float_names = [name for name, kind in stage.columns.items() if kind is float]
        self.int_names = [name for name, kind in stage.columns.items() if kind is int]
        self.defaults_C = on_device(np.array(stage.column_values(stage.defaults), dtype=np.int64), spec.device)
        columns_CR = self.defaults_C.unsqueeze(1).repeat(1, spec.num_rows)
        self.floats_FR = _floats(columns_CR[: len(self.float_names)])
        self.ints_IR = columns_CR[len(self.float_names) :].contiguous()

    def load(self, row: int, values_X: Tensor) -> None:
        """Store the arguments of the request that owns the row from now on; without values, the defaults."""
        num_floats, num_columns = len(self.float_names), len(self.defaults_C)
        if num_columns:
            given_C = values_X[:num_columns] if len(values_X) else self.defaults_C
            self.floats_FR[:, row] = _floats(given_C[:num_floats])
            self.ints_IR[:, row] = given_C[num_floats:]
        self.processor.load(row, values_X[num_columns:])

    def columns(self, rows_N: Tensor) -> dict[str, Tensor]:
        """The columns of some rows, by the names of their fields."""
        found: dict[str, Tensor] = {}
        for names, table_CR in ((self.float_names, self.floats_FR), (self.int_names, self.ints_IR)):
            if names:
                found.update(zip(names, table_CR.index_select(1, rows_N).unbind(0), strict=True))
        return found


class Pipeline:
    """The processors of a rank in the order they run, and the tokens of the rows that some of them read."""

    def __init__(
        self,
        stages: Sequence[ProcessorStage],
        spec: ProcessorSpec,
        load_tokenizer: Callable[[], TokenTexts | None] = lambda: None,
    ) -> None:
        self.stages, self.spec, self._load_tokenizer = stages, spec, load_tokenizer
        self._processors: dict[int, Processor] = {}
        self.generation = 0
        """Changes when a processor is made anew: graphs that captured the old one must not be replayed."""

    @cached_property
    def _tokenizer(self) -> TokenTexts | None:
        return self._load_tokenizer()

    @cached_property
    def tokens_RL(self) -> Tensor:
        """int32 tokens of each row, prompt first; allocated when a request first needs it."""
        shape = (self.spec.num_rows, self.spec.max_model_len + 1)
        return torch.zeros(shape, dtype=torch.int32, device=self.spec.device)

    @cached_property
    def num_prompt_tokens_R(self) -> Tensor:
        """int64 prompt lengths of the rows of tokens_RL."""
        return torch.zeros(self.spec.num_rows, dtype=torch.int64, device=self.spec.device)

    def processor(self, index: int, rows: Sequence[int] = ()) -> Processor:
        """The processor of this index, made on first use; that never happens inside a graph's capture.

        rows: of the requests that end if it cannot be made; without any, all that use it end.
        Raises: RequestFault if it cannot be made.
        """
        if index not in self._processors:
            with self._raising(index, "__init__", rows):
                stage = self.stages[index]
                spec = replace(self.spec, tokenizer=self._tokenizer) if stage.reads_texts else self.spec
                self._processors[index] = Processor(stage, index, spec)
        return self._processors[index]

    def _raising(self, index: int, method: str, rows: Sequence[int] = ()) -> Raising:
        """Around a processor's method: its errors end the requests in these rows, or all that use it."""
        entry, processors = self.stages[index].entry, 0 if rows else 1 << index

        def fault(error: BaseException) -> RequestFault:
            is_refusal = isinstance(error, RequestError)
            told = f"{entry} refuses: {error}" if is_refusal else failure(entry, method, error, DURING)
            return RequestFault(told, rows=rows, processors=processors, is_refusal=is_refusal)

        return Raising(fault)

    def running(self, processors: int) -> list[Processor]:
        """The processors whose bits are set, in the order they run."""
        return [self.processor(index) for index in range(len(self.stages)) if processors >> index & 1]

    def reads_tokens(self, processors: int) -> bool:
        """Whether any of the processors whose bits are set reads its rows' tokens."""
        return any(one.stage.reads_tokens for one in self.running(processors))

    def is_graph_safe(self, processors: int) -> bool:
        """Whether all processors whose bits are set may be captured in a CUDA graph."""
        return all(one.stage.entry.needs.graph_safe for one in self.running(processors))

    def treats_sizes_alike(self, processors: int) -> bool:
        """Whether none of the processors whose bits are set makes something for a number of rows."""
        return all(one.stage.entry.needs.sizes_alike for one in self.running(processors))

    def receive(self, step: Step, views: Any) -> None:
        """Store the arguments and known tokens that a step brings. views: the step's sections on the device."""
        starts = np.concatenate([[0], np.cumsum(step.processor_lens)])
        for place, (row, index) in enumerate(zip(step.processor_rows, step.processor_ids, strict=True)):
            self._load(int(row), int(index), views["processor_values"][starts[place] : starts[place + 1]])
        if len(step.known_rows):
            self.num_prompt_tokens_R[views["known_rows"]] = views["known_prompt_lens"]
            pieces = views["known_tokens"].to(torch.int32).split(step.known_lens.tolist())
            for row, piece in zip(step.known_rows.tolist(), pieces, strict=True):
                self.tokens_RL[row, : len(piece)] = piece

    def _load(self, row: int, index: int, values_X: Tensor) -> None:
        if not len(values_X) and index not in self._processors:
            return  # a new one holds nothing that was to be forgotten
        processor = self.processor(index, [row])
        try:
            with self._raising(index, "load", [row] * bool(len(values_X))):
                processor.load(row, values_X)
        except BaseException:
            if not len(values_X):  # it does not forget the row's last owner, so it is made anew, and all its users end
                del self._processors[index]
                self.generation += 1
            raise

    def process(
        self,
        logits_NV: Tensor,
        processors: int,
        rows_N: Tensor,
        params: SamplingBatch,
        max_num_tokens: int,
        *,
        is_checking: bool = False,
    ) -> Tensor:
        """Logits (N, V) float32 as the processors leave them; may overwrite its input.

        is_checking: whether to look for NaN in what they return, which waits for the device.

        Raises: RequestFault naming the processor that failed.
        """
        for one in self.running(processors):
            reads = one.stage.reads_tokens
            rows = LogitsRows(
                rows_N=rows_N,
                columns=one.columns(rows_N),
                sampling=params,
                tokens_RL=self.tokens_RL if reads else None,
                num_prompt_tokens_N=self.num_prompt_tokens_R.index_select(0, rows_N) if reads else None,
                max_num_tokens=max_num_tokens,
            )
            form, was_nan = logits_NV.shape, is_checking and bool(logits_NV.isnan().any())
            with self._raising(one.index, "process"):
                logits_NV = one.processor.process(logits_NV, rows)
            fault = form_fault(logits_NV, form, [torch.float32])
            if is_checking and not fault and not was_nan and bool(logits_NV.isnan().any()):
                fault = "it made a logit NaN"
            if fault:
                what = breach(one.stage.entry, "process", fault, DURING)
                raise RequestFault(what, processors=1 << one.index)
        return logits_NV

    def write_back(self, processors: int, rows_N: Tensor, params: SamplingBatch, tokens_N: Tensor) -> None:
        """Store the sampled tokens where processors of the next draw read them. Device: no host sync; graph-safe."""
        if self.reads_tokens(processors):
            kept_N = torch.empty_like(tokens_N, dtype=torch.int32)  # any token will do in place of NO_TOKEN
            self.tokens_RL[rows_N, params.position_N] = torch.remainder(tokens_N, self.spec.vocab_size, out=kept_N)


def _floats(bits: Tensor) -> Tensor:
    """float32 values from their bits in int64."""
    return bits.to(torch.int32).contiguous().view(torch.float32)
