"""From a batch to tokens: the model's forward, its logits, and the sampling of tokens from them.

`core.worker.worker` and the CUDA graphs compute with a `ModelRunner`, which itself is the same with and without graphs.
Legend: T tokens of a step, D hidden, N draws, V vocabulary, X integers of a scored token
(core/worker/results/scores.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Batch, Kernels, Model, Sampler, SamplingBatch, is_offered
from hookline.core.contracts.sampler import FORBIDDEN
from hookline.core.distributed.ranks import ALONE, LocalRanks
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.requests.scores import DRAW_SCORES
from hookline.core.step.captured import TOKEN_ROWS
from hookline.core.step.message import Step
from hookline.core.util.arrays import Array, IntArray
from hookline.core.worker.device_clock import StepClock
from hookline.core.worker.request_table import RequestTable, SampleRows
from hookline.core.worker.results.prompt_readers import PromptReaders
from hookline.core.worker.results.scores import prompt_scorers, scored, scored_alone
from hookline.core.worker.runner.attention import GroupedAttention, PagedAttention, grouped_attention
from hookline.core.worker.runner.late_rows import LateKind, LateRows
from hookline.core.worker.runner.step_extensions import LayerWatch, RankExtensions
from hookline.core.worker.runner.wrapped_attention import CheckedAttention, LayerScale, ScaledAttention
from hookline.core.worker.startup.memory import release
from hookline.core.worker.step_checks import StepChecks

_UNCHECKED: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Extras:
    """The requirements of a step's draws beyond plain sampling; each CUDA graph of draws is captured for one value.

    extensions: bits of the step extensions that run. num_logprobs: alternatives to score for each drawn token; 0
    scores the token alone, -1 nothing. late: whether draws wait for late rows, see NOT_LATE.
    """

    extensions: int = 0
    num_logprobs: int = -1
    late: int = 0


PLAIN = Extras()
NOT_LATE, SOME_LATE, ALL_LATE = range(3)
"""Which draws of a step are late. If all are, a graph of the draws copies the rows itself."""


class ModelRunner:
    """Runs the model on one rank: with its kernels and sampler, its request table and its part of the KV cache.

    kv_cache: (2, layers, blocks + 1, block_size, K, E), or (1, ...) of keys alone; the last block is scratch. groups:
    if the layers' caches differ, how layers share blocks; the second dimension of kv_cache then counts the places of a
    block (see core/kv_cache/groups.py). first_layer: the first of the model's layers that this rank has; 0 without
    stages. cache_scales: by layer index, for layers whose keys and values are stored divided by a scale. late: the
    kind of late rows; None if no draw waits for any. clock: set when steps are timed.
    """

    progress: list[int]
    """A list of one number, which changes with each layer, so that another thread sees a step's progress."""
    groups: CacheGroups | None = None
    """Set if the layers' caches differ."""
    is_checking = False
    """Whether the results of plugins are checked in this step; see `checking`."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        sampler: Sampler,
        table: RequestTable,
        kv_cache: Tensor,
        *,
        ranks: LocalRanks = ALONE,
        vocab_size: int,
        shards_vocabulary: bool = False,
        extensions: RankExtensions | None = None,
        checks: StepChecks | None = None,
        groups: CacheGroups | None = None,
        batch_invariant: bool = False,
        first_layer: int = 0,
        cache_scales: Mapping[int, LayerScale] | None = None,
        late: LateKind | None = None,
    ) -> None:
        self.progress = [0]
        self.batch_invariant = batch_invariant
        if not table.is_plain:
            self.groups = groups
        self.checks = StepChecks() if checks is None else checks
        self.model, self.kernels, self.sampler, self.table, self.ranks = model, kernels, sampler, table, ranks
        self.kv_layers = list(kv_cache.unbind(1))
        if first_layer and self.groups is None:
            self.kv_layers = [kv_cache[:, 0, :0]] * first_layer + self.kv_layers  # in place of other stages' layers
        self.num_blocks = kv_cache.shape[2] - 1
        """Blocks that requests can hold; the scratch block is not counted."""
        self.cache_scales, self.late = cache_scales, late
        self.vocab_size = vocab_size
        self.shards_vocabulary = shards_vocabulary
        self.extensions = extensions
        self.clock: StepClock | None = None
        self._scores_by_sampler = is_offered(sampler.score)
        self.readers = PromptReaders()
        """The readers of prompts' hidden states."""
        self.readers.add(prompt_scorers(self.whole_logits, self.score, vocab_size))

    def extras(self, step: Step) -> Extras:
        """The requirements of a step's draws beyond plain sampling."""
        num_late = len(step.late_draws)
        if not step.extensions and step.num_logprobs < 0 and not num_late:
            return PLAIN
        late = NOT_LATE if not num_late else ALL_LATE if num_late == step.num_sampled else SOME_LATE
        return Extras(step.extensions, min(step.num_logprobs, self.vocab_size), late)

    @property
    def late_width(self) -> int:
        """32-bit words of a late row; 0 if no draw waits for any."""
        return 0 if self.late is None else self.late.width

    @cached_property
    def late_rows(self) -> LateRows:
        """The buffers of the late rows of a step; allocated when a step first needs them."""
        return self.new_late_rows(max(self.table.padding_row, TOKEN_ROWS[-1]))  # a row may have several draws

    def new_late_rows(self, num_rows: int) -> LateRows:
        """Room for so many late rows."""
        assert self.late is not None, "a draw waits for late rows, and the runner knows none"
        return self.late.make(num_rows)

    def close(self) -> None:
        """Free the cache, states, weights, the kernels' scratch and the extensions' state, even if still referred to.

        The traceback of a step that failed refers to views of the cache for as long as the error is kept.
        """
        self.extensions = self.late = None
        self.readers.clear()
        try:
            self.ranks.close()
        finally:
            states = self.table.states
            release([*self.kv_layers, *(states.tensors if states is not None else ())])
            self.kv_layers.clear()
            self.table.states = None
            for name in ("model", "kernels", "late_rows"):
                self.__dict__.pop(name, None)

    def begin(self) -> None:
        """If steps are timed, mark the start of the model's own work on the device."""
        if self.clock is not None:
            self.clock.begin()

    def forward(
        self,
        batch: Batch,
        tokens_N: Tensor | None = None,
        stream_TD: Tensor | None = None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Run the model; returns hidden states (N, D) of the batch's tokens that tokens_N names, or of all if None.

        stream_TD: the residual stream that the stage before sent, if there is one; it may be overwritten. watch: is
        shown the stream after each layer.
        A model may skip the other tokens in its last layer. If tokens_N is empty, one row is computed for nothing.
        """
        rows_N = batch.token_ids_T.new_zeros(1) if tokens_N is not None and not len(tokens_N) else tokens_N
        if rows_N is not None and (len(rows_N) >= batch.num_tokens or watch):
            rows_N = None  # so that the number of returned rows tells whether the model skipped tokens
        attend = self._attend(batch, rows_N)
        if stream_TD is not None or watch is not None:
            attend = attend.with_ends(stream_TD, watch)
        with self.checks.kernels(self.kernels) if self.is_checking else _UNCHECKED:
            given: Any = ScaledAttention(attend, self.cache_scales) if self.cache_scales else attend
            if self.is_checking:
                given = CheckedAttention(given, self.checks, batch.num_tokens)
            hidden_TD = self.model.forward(batch.token_ids_T, batch.positions_T, given)
        if watch is not None:
            watch.check_shown()
        if self.is_checking:
            self.checks.hidden(hidden_TD, batch.num_tokens, *([] if rows_N is None else [len(rows_N)]))
        if tokens_N is None:
            return hidden_TD
        is_narrow = rows_N is not None and len(hidden_TD) == len(rows_N)
        return hidden_TD[: len(tokens_N)] if is_narrow else hidden_TD.index_select(0, tokens_N)

    def _attend(self, batch: Batch, rows_N: Tensor | None) -> PagedAttention | GroupedAttention:
        """The `attend` that the model's forward is given, with the kernels prepared for the batch."""
        kernels, groups = self.kernels, self.groups
        if groups is not None:
            return grouped_attention(kernels, self.kv_layers, groups, batch, rows_N, self.progress, self.table.states)
        kernels.prepare(batch)
        return PagedAttention(kernels, self.kv_layers, batch, rows_N, self.progress)

    def sample(self, hidden_ND: Tensor, sampled: SampleRows) -> Tensor:
        """Tokens (N,) sampled plainly from these hidden states."""
        logits_NV = self._logits(hidden_ND)
        return self._sample(logits_NV, sampled.params, self.ranks.rank * logits_NV.shape[1])

    def keep_tokens(self, sampled: SampleRows, results: Tensor) -> None:
        """Write drawn tokens into the table, where the next step starts from them; the padding row stays as it is.

        results: the tokens (N,), or scored rows (N, X), whose first column holds the tokens.
        Device: no host sync; graph-safe.
        """
        tokens_N = results if results.ndim == 1 else results[:, 0]
        self.kernels.keep_tokens(sampled.rows_N, tokens_N, sampled.params.position_N, self.table.requests)

    def _sample(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> Tensor:
        if self.ranks.size == 1:
            return self._draw(logits_NV[:, : self.vocab_size], params)
        if not self.shards_vocabulary:
            return self._draw(self.ranks.all_gather_last(logits_NV)[:, : self.vocab_size], params)
        return self.ranks.best_tokens(*self._draw_shard(logits_NV, params, first_token))

    def _draw_shard(self, logits_NV: Tensor, params: SamplingBatch, first_token: int) -> tuple[Tensor, Tensor]:
        if not self.is_checking:
            found = self.sampler.sample_shard(logits_NV, params, first_token)
            return self.checks.shard_form(found, len(logits_NV))
        with self.checks.sampling("sample_shard", logits_NV):
            found = self.sampler.sample_shard(logits_NV, params, first_token)
        self.checks.shard(found, len(logits_NV), first_token, first_token + logits_NV.shape[1])
        return found

    def _draw(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        if not self.is_checking:
            tokens_N = self.sampler.sample(logits_NV, params)
            self.checks.form("sampler", "sample", tokens_N, (len(logits_NV),), torch.int64)
            return tokens_N
        with self.checks.sampling("sample", logits_NV):
            tokens_N = self.sampler.sample(logits_NV, params)
        self.checks.tokens("sample", tokens_N, logits_NV)
        return tokens_N

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self.model.logits(hidden_ND)
        if self.is_checking or not isinstance(logits_NV, Tensor):
            self.checks.logits(logits_NV, len(hidden_ND), -(-self.vocab_size // self.ranks.size))
        return logits_NV

    @contextmanager
    def checking(self) -> Iterator[None]:
        """While inside, the results of plugins are checked against their contracts, which waits for the device."""
        self.is_checking = True
        try:
            yield
        finally:
            self.is_checking = False

    def sample_extra(
        self,
        hidden_ND: Tensor,
        sampled: SampleRows,
        extras: Extras,
        max_num_tokens: int,
        forbidden: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The sampled tokens (N,), or scored (N, X).

        max_num_tokens: a number that no draw's position exceeds. forbidden: sections that name (draw, token) pairs
        which must not be drawn. These and late rows apply before all extensions, which choose among the other tokens.
        Device: no host sync; graph-safe without forbidden tokens, if the extensions are.
        """
        raw_NV, params = self.whole_logits(hidden_ND), sampled.params
        logits_NV = self.late_rows.change(raw_NV) if extras.late else raw_NV
        if forbidden is not None:
            logits_NV = logits_NV.to(torch.float32, copy=True)
            logits_NV[forbidden["forbidden_draws"], forbidden["forbidden_tokens"]] = -torch.inf
        if extras.extensions:
            assert self.extensions is not None
            logits_NV = logits_NV.float()
            if logits_NV is raw_NV and extras.num_logprobs >= 0:
                logits_NV = raw_NV.clone()
            logits_NV = self.extensions.process(
                logits_NV, extras.extensions, sampled, max_num_tokens, is_checking=self.is_checking
            )
        tokens_N = self._draw(logits_NV, params)
        if not extras.extensions:
            return tokens_N if extras.num_logprobs < 0 else self.score(raw_NV, tokens_N, extras.num_logprobs)
        assert self.extensions is not None
        self.extensions.write_back(extras.extensions, sampled.rows_N, params, tokens_N)
        allowed_N = allowed_tokens(logits_NV, tokens_N)
        told = self.extensions.results(allowed_N, extras.extensions, sampled, max_num_tokens)
        if extras.num_logprobs < 0:
            return torch.cat([allowed_N.unsqueeze(1), *told], dim=1) if told else allowed_N
        scored_NX = self.score(raw_NV, tokens_N, extras.num_logprobs)
        scored_NX[:, 0] = allowed_N
        return torch.cat([scored_NX, *told], dim=1) if told else scored_NX

    def watch(self, step: Step, batch: Batch, draws_N: Tensor | None) -> LayerWatch | None:
        """The watch of an eager step's layers; None if no extension or tap needs them. draws_N: as in LayerWatch."""
        if self.extensions is None or not (self.apart or self.sees_layers(step)):
            return None
        rows_T = self.table.token_rows(step)
        return self.extensions.watch(step.extensions, rows_T, batch.positions_T, draws_N)

    @property
    def apart(self) -> Sequence[str]:
        """The names of the layers' streams that this rank keeps in every step, apart from draws; see StepResult."""
        return () if self.extensions is None else self.extensions.apart

    def captured_watch(self, rows_T: Tensor, batch: Batch) -> LayerWatch | None:
        """The watch of a captured step's layers, for `apart`; None if `apart` is empty."""
        return self.extensions.watch(0, rows_T, batch.positions_T, None) if self.extensions and self.apart else None

    def sees_layers(self, step: Step) -> bool:
        """Whether an extension of this step sees layers."""
        return (
            step.extensions != 0 and self.extensions is not None and bool(self.extensions.layer_bits(step.extensions))
        )

    def num_columns(self, extras: Extras) -> int:
        """How many integers a draw sends to the host: its scored row or token, and the results of extensions; 0 if the
        results are the tokens alone.
        """
        width = self.extensions.width(extras.extensions) if extras.extensions and self.extensions is not None else 0
        return 0 if extras.num_logprobs < 0 and not width else num_scored(extras) + width

    def split(self, results_NX: IntArray, extras: Extras) -> tuple[IntArray, dict[str, Array]]:
        """Results on the host: the tokens, and StepResult.extras."""
        if results_NX.ndim == 1:
            return results_NX, {}
        count, found = num_scored(extras), dict[str, Array]()
        if extras.num_logprobs >= 0:
            found[DRAW_SCORES] = results_NX[:, :count]
        if self.extensions is not None:
            found |= self.extensions.split(results_NX[:, count:], extras.extensions)
        return results_NX[:, 0], found

    def call_seconds(self, calls: Sequence[Any]) -> Array | None:
        """How long timed calls of step extensions took, see CallClock.read; the device must have finished them."""
        extensions = self.extensions
        return None if extensions is None or extensions.clock is None else extensions.clock.read(calls)

    def whole_logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits over the whole vocabulary, on every rank: (N, V)."""
        return self.ranks.all_gather_last(self._logits(hidden_ND))[:, : self.vocab_size]

    def score(self, raw_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
        """The scored rows (N, X) of these tokens."""
        if not (self._scores_by_sampler and raw_NV.is_cuda):
            return (scored_alone if self.batch_invariant else scored)(raw_NV, tokens_N, num_logprobs)
        if not self.is_checking:
            found = self.sampler.score(raw_NV, tokens_N, num_logprobs)
            self.checks.form("sampler", "score", found, (len(tokens_N), 2 + 2 * num_logprobs), torch.int64)
            return found
        with self.checks.sampling("score", raw_NV):
            found = self.sampler.score(raw_NV, tokens_N, num_logprobs)
        self.checks.scores(found, tokens_N, num_logprobs, self.vocab_size)
        return found


def num_scored(extras: Extras) -> int:
    """How many numbers of a draw are its token and scores."""
    return 1 if extras.num_logprobs < 0 else 2 + 2 * extras.num_logprobs


def allowed_tokens(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    """The drawn tokens (N,), but FORBIDDEN + t for a token t whose logit is -inf, which samplers draw from a row of
    nothing but -inf. NO_TOKEN stays as it is.
    """
    logits_N = logits_NV.gather(1, tokens_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    # In NO_TOKEN, which is negative, the bits of FORBIDDEN are set already.
    return torch.where(logits_N == -torch.inf, tokens_N | FORBIDDEN, tokens_N)
