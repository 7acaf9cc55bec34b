"""Runs one step extension without an engine and a model, through the same host and device halves as the engine does.

Legend: N rows of a step, K tokens of each of them, D hidden, V vocabulary, W numbers for the host, R rows of the
request table, L tokens of a request, X any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import ExtensionSpec, LayerRows, LogitsRows, Needs, RequestFacts, SamplingBatch, TokenTexts
from hookline.core.plugin.registry import EXTENSION, Entry, ExtensionOption, Origin
from hookline.core.plugin.step_extensions import HostExtension
from hookline.core.requests.extension_states import ExtensionStates
from hookline.core.requests.step_extensions import InstalledExtensions, Prepared
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.message import Step
from hookline.core.testing.checks import check
from hookline.core.testing.host_sync import no_host_sync
from hookline.core.util.arrays import ints
from hookline.core.worker.request_table import SampleRows
from hookline.core.worker.runner.step_extensions import RankExtensions

NUM_ROWS = 16
"""Rows of the request table; the row after them is the padding's."""
NUM_LAYERS, HIDDEN_SIZE = 4, 32
"""Sizes of the driver's model, whose layers halve the residual stream and rotate it by one column."""
LOGPROB = -4.0
"""The log-probability that `on_token` gets for each token of a request with has_logprobs."""
MAX_MODEL_LEN = 64
"""Most tokens of a request."""


@dataclass(frozen=True)
class Asked:
    """A request: its arguments for the extension (None: it does not use it), its tokens and its temperature.

    num_prompt_tokens: how many of the tokens are the prompt. stop_ids: as in RequestFacts.
    """

    arguments: Mapping[str, Any] | None
    tokens: Sequence[int] = (1, 2, 3)
    num_prompt_tokens: int = 2
    temperature: float = 1.0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    has_logprobs: bool = False
    """Whether `on_token` gets log-probabilities, all of them LOGPROB."""


@dataclass(frozen=True)
class Seen:
    """The results of a step for its rows."""

    hidden_NKD: Tensor
    """The residual stream behind the last layer."""
    logits_NV: Tensor
    """The logits from which tokens are sampled."""
    results_NW: Tensor | None
    """The extension's numbers for the host, in its result_dtype; None for a class without `after_draw`."""

    def rows(self, indices: Sequence[int]) -> Seen:
        """The results of these rows, in this order."""
        chosen = list(indices)
        results_NW = None if self.results_NW is None else self.results_NW[chosen]
        return Seen(self.hidden_NKD[chosen], self.logits_NV[chosen], results_NW)


class ExtensionDriver:
    """An extension with rows for a few requests. Arguments from SamplingParams are given under SamplingParams' names.

    kind: "extension" or "processor". arguments: the dataclass of a request's arguments. config: the engine's settings.
    """

    def __init__(
        self,
        extension: Any,
        arguments: type,
        vocab_size: int,
        device: str = "cpu",
        tokenizer: TokenTexts | None = None,
        *,
        kind: str = EXTENSION,
        config: Any = None,
    ) -> None:
        own = None if config is None else type(config)
        origin = Origin("-", "-", "-", "-")
        entry = Entry(kind, "tested", "nowhere:Nothing", origin, own, needs=Needs(), arguments=arguments)
        stage = HostExtension(entry, option=ExtensionOption(entry, config))
        stage.__dict__["cls"] = extension
        head_VD = torch.randn(vocab_size, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1)).to(device)
        self.spec = ExtensionSpec(
            num_rows=NUM_ROWS + 1,
            vocab_size=vocab_size,
            max_model_len=MAX_MODEL_LEN,
            device=torch.device(device),
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
            dtype=torch.float32,
            # Row by row, since the bits of a product may depend on how many rows it has.
            logits_of=lambda rows_XD: torch.stack([head_VD @ row_D.float() for row_D in rows_XD]),
        )
        self.installed = InstalledExtensions([stage])
        self.installed.use_tokenizer(lambda: tokenizer)
        self.extensions = RankExtensions([stage], self.spec, lambda: tokenizer)
        self.asked: dict[int, Asked] = {}

    @property
    def stage(self) -> HostExtension:
        """The extension's half on the host."""
        return self.installed.stages[0]

    @property
    def extension(self) -> Any:
        """The extension's object on the device."""
        return self.extensions.extension(0).extension

    def prepare(self, asked: Asked) -> Prepared:
        """Prepare a request as the host does on arrival."""
        stage, params = self.stage, SamplingParams()
        if asked.arguments is not None:
            extra = {stage.entry.name: asked.arguments}
            params = SamplingParams(**asked.arguments) if stage.from_params else SamplingParams(extra_args=extra)
        facts = RequestFacts(
            asked.num_prompt_tokens, asked.temperature, asked.stop_ids, self.spec.vocab_size, asked.has_logprobs
        )
        return self.installed.prepare(params.resolved({}), facts)

    def admit(self, row: int, asked: Asked, followers: ExtensionStates | None = None) -> ExtensionStates | None:
        """Let a request take over a row; an extension that keeps a state of it gets its output tokens.

        followers: the result of an earlier call for the same request, whose states have seen the tokens already.
        """
        prepared = self.prepare(asked)
        if followers is None and prepared.stateful:
            followers = ExtensionStates(prepared.stateful)
            for place in range(asked.num_prompt_tokens, len(asked.tokens)):
                token_id = asked.tokens[place]
                if self.stage.has_results:
                    self._load(row, replace(asked, tokens=asked.tokens[:place]), prepared, followers)
                    followers.add_result(self.stage.entry.name, self.values(row, token_id))
                followers.see(token_id, LOGPROB if asked.has_logprobs else None)
        self._load(row, asked, prepared, followers)
        return followers

    def _load(self, row: int, asked: Asked, prepared: Prepared, followers: ExtensionStates | None) -> None:
        records = followers.records if followers is not None and self.stage.is_follower else prepared.records
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

    def leave_stale(self, token_ids: Sequence[int]) -> None:
        """Fill all invalid places of LogitsRows.tokens_RL with these tokens, as if earlier requests had left them.

        Invalid are places at and beyond the next draw's position, and all places of rows that do not use the extension.
        """
        tokens_RL = self.extensions.tokens_RL
        for row, tokens_L in enumerate(tokens_RL):
            asked = self.asked.get(row)
            stale_L = tokens_L if asked is None or asked.arguments is None else tokens_L[len(asked.tokens) :]
            stale_L.copy_(torch.tensor(list(islice(cycle(token_ids), len(stale_L))), dtype=tokens_RL.dtype))

    def values(self, row: int, token_id: int) -> np.ndarray[Any, Any]:
        """(W,) numbers for the host about a draw of this token in a row."""
        results_NW = self.step([row], tokens_N=torch.tensor([token_id], device=self.spec.device)).results_NW
        assert results_NW is not None
        return results_NW[0].numpy()

    def step(
        self,
        rows: Sequence[int],
        logits_NV: Tensor | None = None,
        hidden_NKD: Tensor | None = None,
        tokens_N: Tensor | None = None,
        *,
        waits: bool = True,
    ) -> Seen:
        """Run a step with a draw for each of these rows, in this order; rows never admitted count as padding.

        logits_NV, hidden_NKD: zeros if left out. tokens_N: the sampled tokens; if left out, the likeliest ones by the
        extension's logits. waits: whether the extension may wait for the device.
        Raises: AssertionError if it writes to read-only arguments, or waits although it may not.
        """
        device, num_rows = self.spec.device, len(rows)
        rows_N = torch.tensor([row if row in self.asked else NUM_ROWS for row in rows], device=device)
        asked = [self.asked.get(row, Asked(None, (0,))) for row in rows]
        params = SamplingBatch(
            torch.tensor([one.temperature for one in asked], device=device),
            torch.zeros_like(rows_N),
            torch.tensor([len(one.tokens) for one in asked], device=device),
        )
        if logits_NV is None:
            logits_NV = torch.zeros(num_rows, self.spec.vocab_size, device=device)
        if hidden_NKD is None:
            hidden_NKD = torch.zeros(num_rows, 1, HIDDEN_SIZE, device=device)
        one = self.extensions.extension(0)
        watched = _Watched(one.extension, waits)
        one.use(watched)
        try:
            hidden_NKD, streams = self._through_layers(hidden_NKD, rows_N, params.position_N)
            sampled = SampleRows(rows_N, None, params, streams)
            logits_NV = self.extensions.process(logits_NV.clone(), 1, sampled, MAX_MODEL_LEN)
            tokens_N = logits_NV.argmax(1) if tokens_N is None else tokens_N
            results = self.extensions.results(tokens_N, 1, sampled, MAX_MODEL_LEN)
        finally:
            one.use(watched.extension)
        check(not watched.written, f"{watched.method} wrote to {', '.join(watched.written)}")
        if not results:
            return Seen(hidden_NKD, logits_NV, None)
        numbers_NW = self.extensions.split(results[0].cpu().numpy(), 1)[self.stage.entry.name]
        return Seen(hidden_NKD, logits_NV, torch.from_numpy(numbers_NW))

    def untouched(self, logits_NV: Tensor, hidden_NKD: Tensor) -> Seen:
        """The results of a step that runs no extension."""
        for _ in range(NUM_LAYERS):
            hidden_NKD = _layer(hidden_NKD)
        return Seen(hidden_NKD, logits_NV, None)

    def _through_layers(
        self, hidden_NKD: Tensor, rows_N: Tensor, position_N: Tensor
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        num_rows, num_tokens, _ = hidden_NKD.shape
        back_K = torch.arange(num_tokens - 1, -1, -1, device=self.spec.device) + 1
        positions_T = (position_N.unsqueeze(1) - back_K).clamp(min=0).flatten()
        last_N = torch.arange(num_rows, device=self.spec.device) * num_tokens + num_tokens - 1
        watch = self.extensions.watch(1, rows_N.repeat_interleave(num_tokens), positions_T, last_N)
        stream_TD = hidden_NKD.flatten(0, 1)
        for layer in range(NUM_LAYERS):
            stream_TD = _layer(stream_TD)
            if watch is not None and (changed_TD := watch(layer, stream_TD.clone)) is not None:
                stream_TD = changed_TD
        return stream_TD.view(hidden_NKD.shape), {} if watch is None else watch.streams


def _layer(stream_XD: Tensor) -> Tensor:
    return stream_XD.roll(1, dims=-1) / 2


class _Watched:
    """Wraps an extension: passes calls on, and notes the arguments that it writes to, and whether it waits."""

    def __init__(self, extension: Any, waits: bool) -> None:
        self.extension, self._waits = extension, waits
        self.written: list[str] = []
        self.method = ""

    def after_layer(self, layer: int, hidden_TD: Tensor, rows: LayerRows) -> Tensor:
        named = {"rows.rows_T": rows.rows_T, "rows.positions_T": rows.positions_T, **_columns(rows)}
        found_TD: Tensor = self._call("after_layer", lambda: named, layer, hidden_TD, rows)
        return found_TD

    def before_draw(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        found_NV: Tensor = self._call("before_draw", lambda: _tensors(rows), logits_NV, rows)
        return found_NV

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        found_NV: Tensor = self._call("process", lambda: _tensors(rows), logits_NV, rows)
        return found_NV

    def after_draw(self, tokens_N: Tensor, rows: LogitsRows) -> Tensor:
        named = {"tokens_N": tokens_N}
        found_NW: Tensor = self._call("after_draw", lambda: {**named, **_tensors(rows)}, tokens_N, rows)
        return found_NW

    def _call(self, method: str, tensors: Callable[[], Mapping[str, Tensor]], *given: Any) -> Any:
        before = {name: tensor.clone() for name, tensor in tensors().items()}
        with nullcontext() if self._waits else no_host_sync(method):
            found = getattr(self.extension, method)(*given)
        after = tensors()
        written = [name for name in before if name not in after or not _same(before[name], after[name])]
        if written and not self.written:
            self.method, self.written = method, written
        return found


def _columns(rows: LayerRows | LogitsRows) -> dict[str, Tensor]:
    return {f"rows.columns[{name!r}]": column_N for name, column_N in rows.columns.items()}


def _tensors(rows: LogitsRows) -> dict[str, Tensor]:
    """Every tensor of `rows`, by the expression with which an extension reads it."""
    sampling = rows.sampling
    named = {
        "rows.rows_N": rows.rows_N,
        "rows.sampling.temperature_N": sampling.temperature_N,
        "rows.sampling.seed_N": sampling.seed_N,
        "rows.sampling.position_N": sampling.position_N,
        "rows.tokens_RL": rows.tokens_RL,
        "rows.num_prompt_tokens_N": rows.num_prompt_tokens_N,
        **_columns(rows),
        **{f"rows.streams[{layer}]": stream_ND for layer, stream_ND in rows.streams.items()},
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _same(before: Tensor, after: Tensor) -> bool:
    """Equal everywhere; NaN, which may be a field's default, equals NaN."""
    return before.shape == after.shape and torch.allclose(before, after, rtol=0.0, atol=0.0, equal_nan=True)


_SENT = ("extension_values", "known_rows", "known_prompt_lens", "known_tokens")
