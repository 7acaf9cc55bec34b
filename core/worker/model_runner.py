"""From a batch to tokens: the model's forward, its logits, and the sampling of tokens from them.

Legend: T tokens of a step, D hidden, N draws, V vocabulary, K alternatives, X = 2 + 2K integers of a scored token: its
id, the bits of its float32 log-probability, the ids of the K most likely tokens and the bits of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.core.contracts import Batch, Kernels, QKNorm, Rope
from hookline.core.step.message import Step
from hookline.core.worker.request_table import SampleRows

if TYPE_CHECKING:
    from hookline.core.worker.worker import Worker


@dataclass(frozen=True)
class PagedAttention:
    """`core.contracts.Attend` for one step: the kernels, bound to a batch and to every layer's part of the cache."""

    kernels: Kernels
    kv_layers: Sequence[Tensor]
    batch: Batch
    rows_N: Tensor | None = None

    def __call__(self, layer: int, qkv_TC: Tensor, rope: Rope | None, norm: QKNorm | None = None) -> Tensor:
        """See Attend."""
        kv_2NSKE = self.kv_layers[layer]
        fused = getattr(self.kernels, "qkv_attend", None)
        if fused is not None:
            out_THE: Tensor = fused(qkv_TC, kv_2NSKE, self.batch, rope, norm)
        else:
            q_THE = self.kernels.qk_norm_rope_write(qkv_TC, kv_2NSKE, self.batch, rope, norm)
            out_THE = self.kernels.attend(q_THE, kv_2NSKE, self.batch)
        return out_THE.reshape(qkv_TC.shape[0], -1)


ROWS_AT_ONCE = 256
"""Prompt tokens whose logits are held at a time."""


@dataclass(frozen=True)
class Extras:
    """What a step's draws need beyond plain sampling; a captured graph is made for one such value.

    processors: their bits. num_logprobs: alternatives to score, -1 for no scores at all.
    """

    processors: int = 0
    num_logprobs: int = -1


PLAIN = Extras()


def sample_extra(
    worker: Worker, hidden_ND: Tensor, sampled: SampleRows, extras: Extras, max_num_tokens: int, mask: Any = None
) -> Tensor:
    """The sampled tokens (N,), or scored (N, X). mask: views that name (draw, token) pairs which must not win.

    max_num_tokens: a number that no draw's position exceeds.
    Device: no host sync; graph-safe without a mask, if the processors are.
    """
    raw_NV = whole_logits(worker, hidden_ND)
    logits_NV, params = raw_NV.float(), sampled.params
    if extras.num_logprobs >= 0 and logits_NV is raw_NV:
        logits_NV = raw_NV.clone()
    if mask is not None:
        logits_NV[mask["mask_rows"], mask["mask_tokens"]] = -torch.inf
    if extras.processors:
        assert worker.pipeline is not None
        logits_NV = worker.pipeline.process(logits_NV, extras.processors, sampled.rows_N, params, max_num_tokens)
    tokens_N = worker.sampler.sample(logits_NV, params)
    if extras.processors:
        assert worker.pipeline is not None
        worker.pipeline.write_back(extras.processors, sampled.rows_N, params, tokens_N)
    return tokens_N if extras.num_logprobs < 0 else _score(worker, raw_NV, tokens_N, extras.num_logprobs)


def score_prompt(worker: Worker, hidden_TD: Tensor, step: Step, num_logprobs: int) -> Tensor:
    """The prompt tokens that follow those of the step's scored chunks, scored: (P, X)."""
    starts = len(step.decode_rows) + step.chunk_lens.cumsum() - step.chunk_lens
    places = [
        torch.arange(starts[chunk], starts[chunk] + count)
        for chunk, count in zip(step.scored_chunks, step.scored_lens, strict=True)
    ]
    places_P = torch.cat(places).to(hidden_TD.device)
    targets_P = torch.from_numpy(step.scored_tokens).to(hidden_TD.device)
    rows = []
    for first in range(0, len(places_P), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        raw_PV = whole_logits(worker, hidden_TD.index_select(0, places_P[some]))
        rows.append(_score(worker, raw_PV, targets_P[some], num_logprobs))
    return torch.cat(rows)


def whole_logits(worker: Worker, hidden_ND: Tensor) -> Tensor:
    """Logits over the whole vocabulary, on every rank: (N, V)."""
    return worker.ranks.all_gather_last(worker.model.logits(hidden_ND))[:, : worker.vocab_size]


def _score(worker: Worker, raw_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
    faster = getattr(worker.sampler, "score", None)
    score = faster if faster is not None and raw_NV.is_cuda else scored
    rows_NX: Tensor = score(raw_NV, tokens_N, num_logprobs)
    return rows_NX


def scored(raw_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
    """Tokens with their log-probabilities and those of the most likely ones, (N, X) int64."""
    total_N1 = raw_NV.float().logsumexp(1, keepdim=True)
    columns = [tokens_N.unsqueeze(1), _bits(raw_NV.gather(1, tokens_N.unsqueeze(1)).float() - total_N1)]
    if num_logprobs:
        top_NK, ids_NK = raw_NV.topk(num_logprobs, dim=1)
        columns += [ids_NK, _bits(top_NK.float() - total_N1)]
    return torch.cat(columns, dim=1)


def _bits(values: Tensor) -> Tensor:
    """float32 bit patterns in int64."""
    return values.contiguous().view(torch.int32).long()
