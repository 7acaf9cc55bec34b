"""Drafts by a head: a layer of its own that reads the model's hidden states, as a checkpoint or a publisher brings it.

Runs between steps, on the model's device and in plain calls: hidden states come by way of the host, each request has a
KV cache of its own, and every draft is one more run of the head. Where hidden states are missing, of a prompt's
beginning that the prefix cache has, the head attends to what it saw: drafts may be worse, tokens stay the same.
Legend: T entries of a run, R rows of a run, L entries of a request, Q query heads, K kv heads, E head dim, F numbers of
a value, D hidden of the model, H hidden of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    ComputedRow,
    Drafter,
    DrafterSpec,
    DraftHead,
    DraftRow,
    DraftTarget,
    ModelSpec,
    QKNorm,
    Rope,
    StateRows,
)

MIN_ENTRIES = 64
"""Entries that a request's cache has room for at first."""


@dataclass(slots=True)
class HeadSequence:
    """What the head keeps of one request.

    keys_LKE, values_LKF: of its entries, with room for more; with ModelSpec.value_dim values are a part of the keys.
    length: how many entries. end: the position behind the last one. hidden_H: what the last one came to.
    """

    keys_LKE: Tensor
    values_LKF: Tensor | None
    length: int = 0
    end: int = 0
    hidden_H: Tensor | None = None

    def append(self, keys_TKE: Tensor, values_TKF: Tensor | None) -> None:
        """Keep the keys and values of further entries."""
        end = self.length + len(keys_TKE)
        self.keys_LKE = _with_room(self.keys_LKE, end)
        self.keys_LKE[self.length : end] = keys_TKE
        if values_TKF is not None:
            assert self.values_LKF is not None
            self.values_LKF = _with_room(self.values_LKF, end)
            self.values_LKF[self.length : end] = values_TKF
        self.length = end


class HeadAttention:
    """Attention of one run over the caches of its rows, in plain torch. Implements hookline.core.contracts.Attend.

    counts_R: entries of each row in this run; positions_T: theirs.
    """

    def __init__(
        self, spec: ModelSpec, sequences: Sequence[HeadSequence], counts_R: Sequence[int], positions_T: Tensor
    ) -> None:
        self._spec, self._sequences, self._counts_R, self._positions_T = spec, sequences, counts_R, positions_T

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend; of AttentionForm it knows the scale alone. layer: the head has one, whatever its number is."""
        spec, num_tokens = self._spec, len(qkv_TC)
        if norm is not None or form.features - {"scale"}:
            raise NotImplementedError(f"attention of a head with {norm}, {sorted(form.features)}")
        heads_TNE = qkv_TC.view(num_tokens, -1, spec.head_dim)
        q_TQE, k_TKE = heads_TNE[:, : spec.num_heads], heads_TNE[:, spec.num_heads :][:, : spec.num_kv_heads]
        v_TKF = None if spec.value_dim is not None else heads_TNE[:, spec.num_heads + spec.num_kv_heads :]
        if rope is not None:
            table_TR = rope.table_PE.index_select(0, self._positions_T)
            q_TQE, k_TKE = _rotated(q_TQE, table_TR), _rotated(k_TKE, table_TR)
        attended, first = [], 0
        for sequence, count in zip(self._sequences, self._counts_R, strict=True):
            mine = slice(first, first + count)
            sequence.append(k_TKE[mine], None if v_TKF is None else v_TKF[mine])
            attended.append(self._attended(q_TQE[mine], sequence, form.scale))
            first += count
        return torch.cat(attended).flatten(1)

    def states(self, layer: int) -> StateRows:
        """See Attend."""
        raise NotImplementedError(f"a head keeps no state in layer {layer}")

    def _attended(self, q_TQE: Tensor, sequence: HeadSequence, scale: float | None) -> Tensor:
        """Of the newest entries of one request, each over those up to itself: (T, Q, F)."""
        length, count = sequence.length, len(q_TQE)
        keys_LKE = sequence.keys_LKE[:length]
        values_LKF = keys_LKE if sequence.values_LKF is None else sequence.values_LKF[:length]
        if self._spec.value_dim is not None:
            values_LKF = values_LKF[..., -self._spec.value_dim :]
        device = q_TQE.device
        own_T1 = torch.arange(length - count, length, device=device).unsqueeze(1)
        sees_TL = torch.arange(length, device=device) <= own_T1
        repeats = self._spec.num_heads // self._spec.num_kv_heads
        keys_QLE, values_QLF = (x.transpose(0, 1).repeat_interleave(repeats, 0) for x in (keys_LKE, values_LKF))
        found_QTF = functional.scaled_dot_product_attention(
            q_TQE.transpose(0, 1), keys_QLE, values_QLF, attn_mask=sees_TL, scale=scale
        )
        return found_QTF.transpose(0, 1)


class HeadDrafter(Drafter):
    """Drafts by a head of the model `target`, one after the other; subclasses build the head."""

    def __init__(self, config: Any, spec: DrafterSpec, target: DraftTarget, head: DraftHead) -> None:
        self.k, self.adaptive = config.k, config.adaptive
        self.head, self._target, self._vocab_size = head, target, spec.vocab_size
        self._device, self._dtype = target.runtime.device, target.runtime.dtype
        self._sequences: dict[int, HeadSequence] = {}

    @torch.inference_mode()
    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """See Drafter: an entry for each computed token, as the token behind it is known."""
        sequences, entries = [], []
        for row in rows:
            sequence = self._sequences.get(row.id) or self._sequences.setdefault(row.id, self._new_sequence())
            end = row.start + len(next(iter(row.streams.values())))
            first = max(row.start, sequence.end)  # those before are there, as after a preemption
            if first < end:
                sequences.append(sequence)
                entries.append((row, first, end))
        if not entries:
            return
        tokens_T = torch.cat([torch.from_numpy(row.tokens[first + 1 : end + 1].copy()) for row, first, end in entries])
        positions_T = torch.cat([torch.arange(first, end) for _, first, end in entries])
        streams = [
            torch.cat([torch.from_numpy(row.streams[layer][first - row.start :]) for row, first, _ in entries])
            for layer in sorted(entries[0][0].streams)
        ]
        hidden_TH = self.head.combine([stream_TD.to(self._device, self._dtype) for stream_TD in streams])
        self._run(sequences, [end - first for _, first, end in entries], tokens_T, positions_T, hidden_TH)

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        return self.propose_all([row])[0]

    @torch.inference_mode()
    def propose_all(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter; nothing for a request whose last hidden state it did not get."""
        found: list[list[int]] = [[] for _ in rows]
        going = [
            (drafts, row, sequence)
            for drafts, row in zip(found, rows, strict=True)
            if (sequence := self._sequences.get(row.id)) is not None and sequence.end == len(row.tokens) - 1
        ]
        lengths = [(sequence, sequence.length, sequence.end, sequence.hidden_H) for _, _, sequence in going]
        ahead = 0
        while going := [one for one in going if ahead < min(one[1].num_drafts, self.k)]:
            if ahead:
                tokens_T = torch.tensor([drafts[-1] for drafts, _, _ in going])
                positions_T = torch.tensor([sequence.end for _, _, sequence in going])
                hidden_TH = torch.stack([_known(sequence.hidden_H) for _, _, sequence in going])
                self._run([sequence for _, _, sequence in going], [1] * len(going), tokens_T, positions_T, hidden_TH)
            ahead += 1
            logits_NV = self.head.logits(torch.stack([_known(sequence.hidden_H) for _, _, sequence in going]))
            asking = [row for _, row, _ in going]
            drawn = self._target.draw(truncated(logits_NV[:, : self._vocab_size], asking), asking, ahead)
            for (drafts, _, _), token in zip(going, drawn, strict=True):
                drafts += [token] if token >= 0 else []
            going = [one for one, token in zip(going, drawn, strict=True) if token >= 0]
        for sequence, length, end, hidden_H in lengths:  # what was computed of drafts counts no more
            sequence.length, sequence.end, sequence.hidden_H = length, end, hidden_H
        return found

    def hidden_of(self, id: int) -> Tensor:
        """What the last entry of a request came to, (H,)."""
        return _known(self._sequences[id].hidden_H)

    def forget(self, id: int) -> None:
        """See Drafter."""
        self._sequences.pop(id, None)

    def close(self) -> None:
        """See Drafter."""
        self._sequences.clear()

    def _run(
        self,
        sequences: Sequence[HeadSequence],
        counts_R: Sequence[int],
        tokens_T: Tensor,
        positions_T: Tensor,
        hidden_TH: Tensor,
    ) -> None:
        """Compute further entries of these requests."""
        on_device_T = positions_T.to(self._device)
        attend = HeadAttention(self.head.spec, sequences, counts_R, on_device_T)
        hidden_TH = self.head.forward(tokens_T.to(self._device, torch.int64), on_device_T, hidden_TH, attend)
        ends = torch.tensor(counts_R).cumsum(0) - 1
        last = positions_T[ends].tolist()
        for sequence, hidden_H, position in zip(sequences, hidden_TH[ends.to(self._device)], last, strict=True):
            sequence.hidden_H, sequence.end = hidden_H, position + 1

    def _new_sequence(self) -> HeadSequence:
        spec = self.head.spec
        keys_LKE = torch.empty(MIN_ENTRIES, spec.num_kv_heads, spec.head_dim, dtype=self._dtype, device=self._device)
        return HeadSequence(keys_LKE, None if spec.value_dim is not None else torch.empty_like(keys_LKE))


def truncated(logits_NV: Tensor, rows: Sequence[DraftRow]) -> Tensor:
    """The logits, -inf where a row's top_k, top_p and min_p, in this order, leave no token; float32 if any row has one.

    So a draft is none of the tokens that the model's own draw leaves out.
    """
    for index, params in enumerate(row.params for row in rows):
        top_k, top_p, min_p = params.top_k or 0, 1.0 if params.top_p is None else params.top_p, params.min_p or 0.0
        temperature = 1.0 if params.temperature is None else params.temperature
        if not temperature or (top_k <= 0 and top_p >= 1 and min_p <= 0):
            continue
        logits_NV = logits_NV.float()
        sorted_V, tokens_V = (logits_NV[index] / temperature).sort(descending=True)
        sorted_V[top_k or len(sorted_V) :] = -torch.inf
        chances_V = sorted_V.softmax(0)
        is_out_V = (chances_V.cumsum(0) - chances_V >= top_p) | (chances_V < min_p * chances_V[0]) | sorted_V.isinf()
        left_V = torch.zeros_like(is_out_V).index_copy_(0, tokens_V, ~is_out_V)
        is_row_N1 = torch.arange(len(rows), device=tokens_V.device).unsqueeze(1) == index
        logits_NV = logits_NV.masked_fill(is_row_N1 & ~left_V, -torch.inf)
    return logits_NV


def _known(hidden_H: Tensor | None) -> Tensor:
    assert hidden_H is not None, "an entry was computed"
    return hidden_H


def _with_room(cached: Tensor, length: int) -> Tensor:
    """The same entries with room for at least so many."""
    if length <= len(cached):
        return cached
    larger = cached.new_empty(max(length, 2 * len(cached)), *cached.shape[1:])
    larger[: len(cached)] = cached
    return larger


def _rotated(heads_TNE: Tensor, table_TR: Tensor) -> Tensor:
    """The first R numbers of each head rotated by halves, in float32; see Rope."""
    cos_T1R, sin_T1R = table_TR.unsqueeze(1).chunk(2, -1)
    width = table_TR.shape[-1]
    one, other = heads_TNE[..., :width].float().chunk(2, -1)
    turned = torch.cat([one * cos_T1R - other * sin_T1R, other * cos_T1R + one * sin_T1R], -1)
    return torch.cat([turned.to(heads_TNE.dtype), heads_TNE[..., width:]], -1)
