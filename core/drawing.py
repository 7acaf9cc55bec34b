"""Draws that are more than plain: through logits processors, with forbidden tokens, or with log-probabilities.

Works on whole rows of the vocabulary, on every rank alike. Log-probabilities are those of the model itself: of its
logits before bias, penalties, temperature and truncation.
Legend: T tokens of a step, D hidden, N draws, V vocabulary, K alternatives, X = 2 + 2K integers of a scored token: its
id, the bits of its float32 log-probability, the ids of the K most likely tokens and the bits of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.state import Draws
from core.step import Step

if TYPE_CHECKING:
    from core.worker import Worker

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


def draw_extra(
    worker: Worker, hidden_ND: Tensor, drawn: Draws, extras: Extras, max_num_tokens: int, mask: Any = None
) -> Tensor:
    """The drawn tokens (N,), or scored (N, X). mask: views that name (draw, token) pairs which must not win.

    max_num_tokens: a number that no draw's position exceeds.
    Device: no host sync; graph-safe without a mask, if the processors are.
    """
    raw_NV = whole_logits(worker, hidden_ND)
    logits_NV, params = raw_NV.float(), drawn.params
    if extras.num_logprobs >= 0 and logits_NV is raw_NV:
        logits_NV = raw_NV.clone()
    if mask is not None:
        logits_NV[mask["mask_rows"], mask["mask_tokens"]] = -torch.inf
    if extras.processors:
        assert worker.pipeline is not None
        logits_NV = worker.pipeline.process(logits_NV, extras.processors, drawn.rows_N, params, max_num_tokens)
    tokens_N = worker.sampler.sample(logits_NV, params)
    if extras.processors:
        assert worker.pipeline is not None
        worker.pipeline.write_back(extras.processors, drawn.rows_N, params, tokens_N)
    return tokens_N if extras.num_logprobs < 0 else scored(raw_NV, tokens_N, extras.num_logprobs)


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
        rows.append(scored(raw_PV, targets_P[some], num_logprobs))
    return torch.cat(rows)


def whole_logits(worker: Worker, hidden_ND: Tensor) -> Tensor:
    """Logits over the whole vocabulary, on every rank: (N, V)."""
    return worker.ranks.all_gather_last(worker.model.logits(hidden_ND))[:, : worker.vocab_size]


def scored(raw_NV: Tensor, tokens_N: Tensor, num_logprobs: int) -> Tensor:
    """Tokens with their log-probabilities and those of the most likely ones, (N, X) int64."""
    num_parts = _num_parts(raw_NV)
    total_N1 = raw_NV.float().reshape(len(raw_NV), num_parts, -1).logsumexp(2).logsumexp(1, keepdim=True)
    columns = [tokens_N.unsqueeze(1), _bits(raw_NV.gather(1, tokens_N.unsqueeze(1)).float() - total_N1)]
    if num_logprobs:
        top_NK, ids_NK = _top(raw_NV, num_logprobs, num_parts)
        columns += [ids_NK, _bits(top_NK.float() - total_N1)]
    return torch.cat(columns, dim=1)


def _num_parts(logits_NV: Tensor) -> int:
    """Into how many parts a GPU had better split a row of logits, whose one reduction keeps few of its cores busy."""
    if not logits_NV.is_cuda:
        return 1
    return next(count for count in (64, 32, 16, 8, 4, 2, 1) if logits_NV.shape[1] % count == 0)


def _top(logits_NV: Tensor, count: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row and their token ids, by way of the largest of each part."""
    parts_NPV = logits_NV.reshape(len(logits_NV), num_parts, -1)
    size = parts_NPV.shape[2]
    if num_parts == 1 or size < count:
        return logits_NV.topk(count, dim=1)
    best_NPK, ids_NPK = parts_NPV.topk(count, dim=2)
    ids_NPK = ids_NPK + torch.arange(num_parts, device=logits_NV.device).view(-1, 1) * size
    top_NK, places_NK = best_NPK.flatten(1).topk(count, dim=1)
    return top_NK, ids_NPK.flatten(1).gather(1, places_NK)


def _bits(values: Tensor) -> Tensor:
    """float32 bit patterns in int64."""
    return values.contiguous().view(torch.int32).long()
