"""Runs one logits processor without an engine, through the same host and device halves as the engine does.

Legend: N rows, V vocabulary, R rows of the request table, L tokens of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import LogitsRows, Needs, ProcessorSpec, RequestFacts, SamplingBatch, TokenTexts
from hookline.core.plugin.registry import PROCESSOR, Entry, Origin
from hookline.core.plugin.step_extensions import HostExtension
from hookline.core.requests.extension_states import ExtensionStates
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.message import Step
from hookline.core.testing.checks import check
from hookline.core.util.arrays import ints
from hookline.core.worker.request_table import SampleRows
from hookline.core.worker.runner.step_extensions import RankExtensions

NUM_ROWS = 16
"""Rows of the request table; the row after them is the padding's."""
LOGPROB = -4.0
"""What `on_token` is told of every token that is asked with has_logprobs."""
MAX_MODEL_LEN = 64
"""Most tokens of a request."""


@dataclass(frozen=True)
class Asked:
    """What one request asks of the processor: its arguments (None: nothing), its tokens and its temperature.

    num_prompt_tokens: the first of the tokens, those of the prompt. stop_ids: as in RequestFacts.
    """

    arguments: Mapping[str, Any] | None
    tokens: Sequence[int] = (1, 2, 3)
    num_prompt_tokens: int = 2
    temperature: float = 1.0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    has_logprobs: bool = False
    """Whether `on_token` is told the tokens' log-probabilities, all of them LOGPROB."""


class ProcessorDriver:
    """A processor with rows for a few requests. Arguments that come from SamplingParams are given by those names."""

    def __init__(
        self,
        processor: Any,
        config: type,
        vocab_size: int,
        device: str = "cpu",
        tokenizer: TokenTexts | None = None,
    ) -> None:
        entry = Entry(PROCESSOR, "tested", "nowhere:Nothing", Origin("-", "-", "-", "-"), config, needs=Needs())
        stage = HostExtension(entry)
        stage.__dict__["cls"] = processor
        self.spec = ProcessorSpec(NUM_ROWS + 1, vocab_size, MAX_MODEL_LEN, torch.device(device))
        self.installed = InstalledExtensions([stage])
        self.installed.use_tokenizer(lambda: tokenizer)
        self.extensions = RankExtensions([stage], self.spec, lambda: tokenizer)
        self.asked: dict[int, Asked] = {}

    def admit(self, row: int, asked: Asked, followers: ExtensionStates | None = None) -> ExtensionStates | None:
        """Let a request take over a row; its output tokens are shown to a processor that follows them.

        followers: what an earlier call returned of the same request, which saw them then.
        """
        stage = self.installed.stages[0]
        params = SamplingParams()
        if asked.arguments is not None:
            extra = {stage.entry.name: asked.arguments}
            params = SamplingParams(**asked.arguments) if stage.from_params else SamplingParams(extra_args=extra)
        facts = RequestFacts(
            asked.num_prompt_tokens, asked.temperature, asked.stop_ids, self.spec.vocab_size, asked.has_logprobs
        )
        prepared = self.installed.prepare(params.resolved({}), facts)
        if followers is None and prepared.stateful:
            followers = ExtensionStates(prepared.stateful)
            for token_id in asked.tokens[asked.num_prompt_tokens :]:
                followers.see(token_id, LOGPROB if asked.has_logprobs else None)
        records = prepared.records if followers is None else followers.records
        values = records[0][1] if records else ints(())
        step = Step(
            extension_rows=ints([row]),
            extension_ids=ints([0]),
            extension_lens=ints([len(values)]),
            extension_values=values,
            known_rows=ints([row]),
            known_prompt_lens=ints([asked.num_prompt_tokens]),
            known_lens=ints([len(asked.tokens)]),
            known_tokens=ints(asked.tokens),
        )
        views = {name: torch.from_numpy(np.array(getattr(step, name))).to(self.spec.device) for name in _SENT}
        self.extensions.receive(step, views)
        self.asked[row] = asked
        return followers

    def leave_stale(self, token_ids: Sequence[int]) -> None:
        """Let earlier requests have left these tokens, over and over, wherever LogitsRows.tokens_RL is not valid.

        That is at and beyond the next draw's position in rows that use the processor, and everywhere in other rows.
        """
        tokens_RL = self.extensions.tokens_RL
        for row, tokens_L in enumerate(tokens_RL):
            asked = self.asked.get(row)
            stale_L = tokens_L if asked is None or asked.arguments is None else tokens_L[len(asked.tokens) :]
            stale_L.copy_(torch.tensor(list(islice(cycle(token_ids), len(stale_L))), dtype=tokens_RL.dtype))

    def process(self, logits_NV: Tensor, rows: Sequence[int]) -> Tensor:
        """The logits of one draw for each of these rows, in this order; rows never admitted count as padding."""
        rows_N = torch.tensor([row if row in self.asked else NUM_ROWS for row in rows], device=self.spec.device)
        asked = [self.asked.get(row, Asked(None, (0,))) for row in rows]
        params = SamplingBatch(
            torch.tensor([one.temperature for one in asked], device=self.spec.device),
            torch.zeros_like(rows_N),
            torch.tensor([len(one.tokens) for one in asked], device=self.spec.device),
        )
        one = self.extensions.extension(0)
        watched = _Watched(one.extension)
        one.use(watched)
        try:
            found_NV = self.extensions.process(logits_NV.clone(), 1, SampleRows(rows_N, None, params), MAX_MODEL_LEN)
        finally:
            one.use(watched.processor)
        check(not watched.written, f"process wrote to {', '.join(watched.written)}")
        return found_NV


class _Watched:
    """In place of a processor: hands on, and finds out what of its `rows` it writes to."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.written: list[str] = []

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        before = {name: tensor.clone() for name, tensor in _tensors(rows).items()}
        found_NV: Tensor = self.processor.process(logits_NV, rows)
        after = _tensors(rows)
        self.written = [name for name in before if name not in after or not _same(before[name], after[name])]
        return found_NV


def _tensors(rows: LogitsRows) -> dict[str, Tensor]:
    """Every tensor of `rows`, by how a processor names it."""
    sampling, columns = rows.sampling, rows.columns
    named = {
        "rows.rows_N": rows.rows_N,
        "rows.sampling.temperature_N": sampling.temperature_N,
        "rows.sampling.seed_N": sampling.seed_N,
        "rows.sampling.position_N": sampling.position_N,
        "rows.tokens_RL": rows.tokens_RL,
        "rows.num_prompt_tokens_N": rows.num_prompt_tokens_N,
        **{f"rows.columns[{name!r}]": column_N for name, column_N in columns.items()},
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _same(before: Tensor, after: Tensor) -> bool:
    """Equal everywhere; NaN, which may be a field's default, equals NaN."""
    return before.shape == after.shape and torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True)


_SENT = ("extension_values", "known_rows", "known_prompt_lens", "known_tokens")
