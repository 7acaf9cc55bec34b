"""Drafts by a head: an extra layer, from the model's checkpoint or another, that reads the model's hidden states.

The head computes an entry of its own KV cache for each token after the token's step, and k drafts for each request
before a step with drafts. Where the engine captures CUDA graphs, one graph computes both, or two graphs if there are
too many entries for one. In a graph each entry is a row of its own, as the tokens of captured steps with drafts are;
entries of long prompts are computed eagerly, with one row for each request. Hidden states stay on the device if rank 0
computes in this process, else they come by way of the host. For a prompt's beginning that was found in the prefix cache
there are none, so the head attends only to later entries: drafts may be worse, tokens stay the same.
Legend: T entries, N requests, B rows of a batch, S streams, D hidden of the model, H hidden of the head, V vocabulary,
C most likely tokens, R rows of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    Batch,
    ComputedRow,
    Drafter,
    DrafterSpec,
    DraftHead,
    DraftRow,
    DraftTarget,
    HeadAttention,
    QKNorm,
    Rope,
    SamplingBatch,
    StateRows,
)
from hookline.plugins.drafters.head_cache import HeadCache, HeadSequence, on_device

MOST_SINGLE = 256
"""Most entries of a batch in which each entry is a row of its own."""
SIZES = tuple(1 << exponent for exponent in range(9))
"""Numbers of entries, and of requests, for which graphs are captured."""
MOST_REQUESTS = 128
"""Requests of the largest graph of drafts, as a step with drafts has at most 256 tokens."""
MOST_LIKELY = 256
"""Most tokens that a truncated draw keeps: only the most likely tokens are compared with top_k, top_p and min_p."""
LEAST_JOINED = 32
"""Entries that graphs of drafts for few requests have room for, see `_num_joined`: as many as cost no time."""
Graph = tuple[Callable[[], None], Tensor, Tensor]
"""A function that replays a CUDA graph, the graph's input, and the tensor that it writes."""
_Asked = tuple[ComputedRow, HeadSequence, int, int]
"""A request with its sequence, and the first position whose entry is wanted and the position after the last."""


class PagedHeadAttention:
    """A head's attention bound to one batch. Implements hookline.core.contracts.Attend."""

    def __init__(self, attention: HeadAttention, batch: Batch) -> None:
        self._attention, self._batch = attention, batch
        attention.kernels.prepare(batch)

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend. layer: not used, since the head has a single layer."""
        kernels, kv_2NSKE, batch = self._attention.kernels, self._attention.kv_2NSKE, self._batch
        # Not qkv_attend: rows of a request see each other, and an entry's number is not its position.
        q_THE = kernels.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm)
        forms = () if form is PLAIN_ATTENTION else (form,)
        return kernels.attend(q_THE, kv_2NSKE, batch, *forms).reshape(len(qkv_TC), -1)

    def states(self, layer: int) -> StateRows:
        """See Attend."""
        raise NotImplementedError(f"a head keeps no state in layer {layer}")


class HeadDrafter(Drafter):
    """Drafts by a head of the model `target`, one after the other; subclasses build the head."""

    @torch.inference_mode()
    def __init__(self, config: Any, spec: DrafterSpec, target: DraftTarget, head: DraftHead, num_streams: int) -> None:
        self.k: int = config.k
        self.adaptive: bool = config.adaptive
        self.head, self._target, self._vocab_size = head, target, spec.vocab_size
        self._attention = target.attention(head.spec, MOST_SINGLE, self.k)
        sizes, runtime = self._attention.spec, target.runtime
        self._device, self._last_position = runtime.device, max(1, runtime.max_model_len) - 1
        self._cache = HeadCache(
            spec.max_num_seqs,
            sizes.max_model_len,
            self._attention.kv_2NSKE.shape[1] - 1,
            sizes.block_size,
            self._device,
        )
        num_hidden = head.spec.hidden_size
        self._hidden_RH = torch.zeros(spec.max_num_seqs + 1, num_hidden, dtype=runtime.dtype, device=self._device)
        """The hidden state of each request's last entry, by the request's row."""
        self._starts = torch.arange(MOST_SINGLE + 1, dtype=torch.int32, device=self._device)
        self._entry_graphs: dict[int, Graph] = {}
        self._draft_graphs: dict[bool, dict[int, Graph]] = {False: {}, True: {}}
        """By whether draws truncate, and by size. The graphs compute pending entries first, see `_num_joined`."""
        self._pending: tuple[np.ndarray[Any, np.dtype[np.int64]], set[int]] | None = None
        """The entries of the last step if a graph has room for them, and their requests; not computed yet."""
        if target.captures:
            shape = num_streams, MOST_SINGLE, target.spec.hidden_size
            self._streams_STD = torch.zeros(shape, dtype=torch.float32, device=self._device)
            self._capture(spec.max_num_seqs)
            self._warm_up()

    @torch.inference_mode()
    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """See Drafter: an entry for each computed token, since the token after it is known."""
        self._compute_pending()
        asked, needed = list[_Asked](), {row.id for row in rows}
        for row in rows:
            known = self._cache.get(row.id)
            end = row.start + row.num_computed
            first = max(row.start, 0 if known is None else known.end)  # earlier entries exist, as after a preemption
            if first >= end:
                continue
            sequence = self._cache.with_room(row.id, end - first, needed)
            if sequence is None:
                self._cache.forget(row.id)
            else:
                asked.append((row, sequence, first, end))
        if not asked:
            return
        self._cache.send()
        entries = _entries(asked, self._cache.padding_row)
        for _, sequence, first, end in asked:
            sequence.length, sequence.end = sequence.length + end - first, end
        streams_STD = self._gathered(asked, entries.shape[1])
        if entries.shape[1] > MOST_SINGLE:
            self._compute(on_device(entries, self._device), streams_STD, self._ragged(entries))
        elif self._entry_graphs:
            self._pending = entries, needed
        else:
            inputs_5T = on_device(entries, self._device)
            self._compute(inputs_5T, streams_STD, self._single(inputs_5T[:4].unbind(), entries[2] + 1))

    def propose(self, row: DraftRow) -> Sequence[int]:
        """See Drafter."""
        return self.propose_all([row])[0]

    @torch.inference_mode()
    def propose_all(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter; no drafts for a request whose last hidden state the head did not get."""
        found: list[list[int]] = [[] for _ in rows]
        going, needed = [], {row.id for row in rows}
        if self._pending is not None:
            needed |= self._pending[1]
        for drafts, row in zip(found, rows, strict=True):
            known = self._cache.get(row.id)
            if known is not None and known.end == len(row.tokens) - 1:
                sequence = self._cache.with_room(row.id, self.k - 1, needed)
                if sequence is not None:
                    going.append((drafts, row, sequence))
        if not going:
            return found
        self._cache.send()
        asked = np.stack([_request(row, sequence) for _, row, sequence in going], axis=1)
        truncates = any(_truncates(row) for _, row, _ in going)
        size = _fitting(self._draft_graphs[truncates], len(going))
        if size is None:
            self._compute_pending()
            drawn_KN = self._draw(on_device(asked, self._device), truncates, asked[1])
        else:
            drawn_KN = self._replayed_drafts(self._draft_graphs[truncates][size], asked, size)
        for (drafts, row, _), drawn in zip(going, drawn_KN.T.tolist(), strict=True):
            most = min(row.num_drafts, self.k)
            drafts += drawn[: next((place for place, token in enumerate(drawn) if token < 0), most)][:most]
        return found

    @torch.inference_mode()
    def hidden_of(self, id: int) -> Tensor:
        """The head's hidden state of a request's last entry, (H,)."""
        self._compute_pending()
        sequence = self._cache.get(id)
        assert sequence is not None, "an entry was computed"
        return self._hidden_RH[sequence.row].clone()

    def forget(self, id: int) -> None:
        """See Drafter."""
        if self._pending is not None and id in self._pending[1]:
            self._compute_pending()  # before another request gets its row and its blocks
        self._cache.forget(id)

    def close(self) -> None:
        """See Drafter."""
        self._pending = None
        self._cache.clear()
        self._entry_graphs.clear()
        for graphs in self._draft_graphs.values():
            graphs.clear()

    @torch.inference_mode()
    def _compute_pending(self) -> None:
        """Compute the entries that wait for a graph."""
        if self._pending is None:
            return
        entries, self._pending = self._pending[0], None
        size = _fitting(self._entry_graphs, entries.shape[1])
        assert size is not None, "there are graphs for all entries that wait"
        replay, inputs_5T, _ = self._entry_graphs[size]
        inputs_5T.copy_(self._padded((entries, size)).view(5, size), non_blocking=True)
        replay()

    def _replayed_drafts(self, graph: Graph, asked: np.ndarray[Any, Any], size: int) -> Tensor:
        """The drafts (k, N) of these requests, drawn by the graph for `size` requests."""
        replay, inputs_X, drawn_KN = graph
        entries, num_joined = np.empty((5, 0), dtype=np.int64), self._num_joined(size)
        if self._pending is not None:
            if self._pending[0].shape[1] > num_joined:
                self._compute_pending()
            else:
                entries, self._pending = self._pending[0], None
        inputs_X.copy_(self._padded((asked, size), (entries, num_joined)), non_blocking=True)
        replay()
        return drawn_KN[:, : asked.shape[1]]

    def _gathered(self, asked: Sequence[_Asked], num_entries: int) -> Tensor:
        """The streams of these entries (S, T, D) on the device: in the graphs' input, if a graph computes so many."""
        layers, start = sorted(asked[0][0].states), 0
        if self._entry_graphs and num_entries <= MOST_SINGLE:
            streams_STD = self._streams_STD[:, :num_entries]
        else:
            shape = len(layers), num_entries, self._target.spec.hidden_size
            streams_STD = torch.empty(shape, dtype=torch.float32, device=self._device)
        for _, rows in groupby(asked, lambda one: id(one[0].states)):  # rows of one step share its states
            alike = list(rows)
            places = [row.first + first - row.start for row, _, first, _ in alike]
            count = sum(end - first for _, _, first, end in alike)
            index_T = on_device(_spans(places, alike), self._device) if len(alike) > 1 else None
            for stream_TD, layer in zip(streams_STD[:, start : start + count], layers, strict=True):
                states_TD = torch.as_tensor(alike[0][0].states[layer])
                if index_T is None:
                    stream_TD.copy_(states_TD[places[0] : places[0] + count])
                else:
                    torch.index_select(states_TD.to(self._device), 0, index_T, out=stream_TD)
            start += count
        return streams_STD

    def _num_joined(self, num_requests: int) -> int:
        """Entries that a graph of drafts for so many requests has room for: few requests have 1 + k each at most."""
        return min(num_requests * (1 + self.k), max(LEAST_JOINED, 2 * num_requests))

    def _compute(self, inputs_5T: Tensor, streams_STD: Tensor, batch: Batch) -> Tensor:
        """Compute entries, and keep the hidden states of requests' last entries; returns all hidden states (T, H).

        inputs_5T: of each entry the token after it, position, number, row of the block table, and row of _hidden_RH to
        keep its hidden state in. Device: graph-safe if the batch is.
        """
        tokens_T, positions_T, _, _, kept_T = inputs_5T
        hidden_TH = self.head.combine(list(streams_STD.to(self._hidden_RH.dtype)))
        hidden_TH = self.head.forward(tokens_T, positions_T, hidden_TH, PagedHeadAttention(self._attention, batch))
        self._hidden_RH[kept_T] = hidden_TH
        return hidden_TH

    def _draw(self, inputs_8N: Tensor, truncates: bool, lengths_N: np.ndarray[Any, Any] | None = None) -> Tensor:
        """Draw k drafts for each request, each from the entry of the draft before: (k, N).

        inputs_8N: row of the table, number and position of the next entry, seed, top_k, and the bits of temperature,
        top_p and min_p. truncates: whether top_k, top_p and min_p apply. lengths_N: the numbers of the next entries on
        the host; None in a graph.
        """
        rows_N, first_N, position_N, seed_N, top_k_N = inputs_8N[:5]
        temperature_N, top_p_N, min_p_N = inputs_8N[5:].to(torch.int32).view(torch.float32)
        hidden_NH, drawn = self._hidden_RH.index_select(0, rows_N), list[Tensor]()
        for ahead in range(self.k):
            if ahead:
                number_N = first_N + (ahead - 1)
                # Drafts past the largest position are never used.
                entry_N = (position_N + (ahead - 1)).clamp(max=self._last_position)
                context_N = None if lengths_N is None else lengths_N + ahead
                tokens_N = drawn[-1].clamp(min=0)
                batch = self._single((tokens_N, entry_N, number_N, rows_N), context_N)
                hidden_NH = self.head.forward(tokens_N, entry_N, hidden_NH, PagedHeadAttention(self._attention, batch))
            logits_NV = self.head.logits(hidden_NH)[:, : self._vocab_size].float()
            if truncates:
                logits_NV = truncated(logits_NV, temperature_N, top_k_N, top_p_N, min_p_N)
            params = SamplingBatch(temperature_N, seed_N, position_N + (1 + ahead))
            drawn.append(self._target.sample(logits_NV, params))
        return torch.stack(drawn)

    def _single(self, entries: Sequence[Tensor], context_lens: np.ndarray[Any, Any] | None) -> Batch:
        """A batch in which each entry is a row. entries: the first four inputs of `_compute`. context_lens: on the
        host; None in a graph.
        """
        tokens_T, positions_T, number_T, rows_T = entries
        cache, count = self._cache, len(tokens_T)
        longest = cache.max_len if context_lens is None else int(context_lens.max())
        table_TM = cache.table_RM[:, : -(-longest // cache.block_size)].index_select(0, rows_T)
        return Batch(
            token_ids_T=tokens_T,
            positions_T=positions_T,
            slot_mapping_T=cache.slots(table_TM, number_T),
            query_starts_B1=self._starts[: count + 1] if count < len(self._starts) else _starts(count, self._device),
            context_lens_B=(number_T + 1).to(torch.int32),
            block_table_BM=table_TM,
            num_decodes=count,
            max_query_len=1,
            max_context_len=longest,
            query_starts_host=np.arange(count + 1, dtype=np.int32),
            context_lens_host=None if context_lens is None else context_lens.astype(np.int32),
            repeats_requests=True,
        )

    def _ragged(self, entries_5T: np.ndarray[Any, Any]) -> Batch:
        """A batch in which the entries of a request, which lie side by side, are one row."""
        cache, (number_T, row_T) = self._cache, entries_5T[2:4]
        is_next_T = (np.diff(row_T) == 0) & (np.diff(number_T) == 1)
        starts = np.concatenate([[0], np.flatnonzero(~is_next_T) + 1, [len(row_T)]]).astype(np.int32)
        lens = (number_T[starts[1:] - 1] + 1).astype(np.int32)
        longest, counts = int(lens.max()), np.diff(starts)
        sent = on_device(entries_5T[:4], self._device)
        table_RM = cache.table_RM[:, : -(-longest // cache.block_size)]
        return Batch(
            token_ids_T=sent[0],
            positions_T=sent[1],
            slot_mapping_T=cache.slots(table_RM.index_select(0, sent[3]), sent[2]),
            query_starts_B1=on_device(starts, self._device),
            context_lens_B=on_device(lens, self._device),
            block_table_BM=table_RM.index_select(0, on_device(row_T[starts[:-1]], self._device)),
            num_decodes=0,
            max_query_len=int(counts.max()),
            max_context_len=longest,
            query_starts_host=starts,
            context_lens_host=lens,
        )

    def _padded(self, *parts: tuple[np.ndarray[Any, Any], int]) -> Tensor:
        """Inputs filled up to these sizes with padding columns, one after the other in host memory to copy from."""
        num_numbers = sum(len(inputs) * size for inputs, size in parts)
        sent = torch.empty(num_numbers, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        numbers, first = sent.numpy(), 0
        for inputs, size in parts:
            columns = numbers[first : first + len(inputs) * size].reshape(len(inputs), size)
            columns[:, : inputs.shape[1]] = inputs
            columns[:, inputs.shape[1] :] = self._padding(len(inputs))
            first += len(inputs) * size
        return sent

    def _padding(self, num_inputs: int) -> np.ndarray[Any, Any]:
        """A column of inputs that stands for no request."""
        column, row = np.zeros((num_inputs, 1), dtype=np.int64), self._cache.padding_row
        column[[3, 4] if num_inputs == 5 else 0] = row
        return column

    def _capture(self, max_num_seqs: int) -> None:
        """Capture all graphs, the largest first, so that the others fit into its memory."""
        for size in reversed(SIZES):
            inputs_5T = torch.from_numpy(self._padding(5)).repeat(1, size).to(self._device)

            def _entries_of(inputs_5T: Tensor = inputs_5T) -> Tensor:
                batch = self._single(inputs_5T[:4].unbind(), None)
                return self._compute(inputs_5T, self._streams_STD[:, : inputs_5T.shape[1]], batch)

            replay, written = self._target.capture(_entries_of)
            self._entry_graphs[size] = replay, inputs_5T, written
        most = min(max_num_seqs, MOST_REQUESTS)
        for size in sorted({most, *(size for size in SIZES if size < most)}, reverse=True):
            for truncates in (False, True):
                parts = (self._padding(8), size), (self._padding(5), self._num_joined(size))
                inputs_X = self._padded(*parts).to(self._device)

                def _drafts_of(inputs_X: Tensor = inputs_X, size: int = size, truncates: bool = truncates) -> Tensor:
                    inputs_5T = inputs_X[8 * size :].view(5, -1)
                    batch = self._single(inputs_5T[:4].unbind(), None)
                    self._compute(inputs_5T, self._streams_STD[:, : inputs_5T.shape[1]], batch)
                    return self._draw(inputs_X[: 8 * size].view(8, size), truncates)

                replay, written = self._target.capture(_drafts_of)
                self._draft_graphs[truncates][size] = replay, inputs_X, written

    def _warm_up(self) -> None:
        """Compute entries of prompts eagerly, of padding alone, so that no prompt waits for a kernel."""
        sizes, kernels = self._attention.spec, self._attention.kernels
        shapes = {(shape.num_tokens, max(shape.context_len, 1)) for shape in kernels.step_shapes()}
        shapes |= {(count, sizes.max_model_len) for count in (*kernels.own_row_counts, sizes.max_num_batched_tokens)}
        shapes |= {(1 << exponent, sizes.max_model_len) for exponent in range(9, 13)}
        fitting = {
            (min(count, sizes.max_num_batched_tokens), min(context, sizes.max_model_len)) for count, context in shapes
        }
        for count, context in sorted(fitting):
            if count > MOST_SINGLE:
                entries = self._padding(5).repeat(count, 1)
                entries[1] = entries[2] = np.arange(count) % context
                entries[1] = entries[1].clip(max=self._last_position)
                streams_STD = self._streams_STD.new_zeros(len(self._streams_STD), count, self._streams_STD.shape[2])
                self._compute(on_device(entries, self._device), streams_STD, self._ragged(entries))


def truncated(logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """The logits, -inf where a row's top_k, top_p and min_p, in this order, leave no token.

    So no draft is a token that the model's own draw excludes. A row with any of these limits keeps no tokens beyond its
    MOST_LIKELY likeliest. Rows of temperature 0 stay as they are. logits: float32. Device: graph-safe.
    """
    temperature_N1, top_k_N1 = temperature_N.unsqueeze(1), top_k_N.unsqueeze(1)
    stays_N1 = ((temperature_N == 0) | ((top_k_N <= 0) & (top_p_N >= 1) & (min_p_N <= 0))).unsqueeze(1)
    temperature_N1 = temperature_N1.masked_fill(stays_N1, 1.0)
    top_NC, tokens_NC = logits_NV.topk(min(MOST_LIKELY, logits_NV.shape[1]))
    place_C = torch.arange(top_NC.shape[1], device=logits_NV.device)
    is_out_NC = (place_C >= top_k_N1) & (top_k_N1 > 0)
    scaled_NC = (top_NC / temperature_N1).masked_fill(is_out_NC, -torch.inf)
    all_N1 = (logits_NV / temperature_N1).logsumexp(1, keepdim=True)
    is_cut_N1 = (top_k_N1 > 0) & (top_k_N1 <= len(place_C))
    chances_NC = (scaled_NC - torch.where(is_cut_N1, scaled_NC.logsumexp(1, keepdim=True), all_N1)).exp()
    before_NC = chances_NC.cumsum(1) - chances_NC
    is_out_NC |= (before_NC >= top_p_N.unsqueeze(1)) | (chances_NC < min_p_N.unsqueeze(1) * chances_NC[:, :1])
    left_NV = torch.full_like(logits_NV, -torch.inf)
    left_NV.scatter_(1, tokens_NC, top_NC.masked_fill(is_out_NC, -torch.inf))
    return torch.where(stays_N1, logits_NV, left_NV)


def _fitting(graphs: Collection[int], count: int) -> int | None:
    """The smallest of these sizes that has room; None if there is none."""
    return min((size for size in graphs if size >= count), default=None)


def _entries(asked: Sequence[_Asked], padding_row: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The entries of requests' positions, as `HeadDrafter._compute` reads them."""
    counts = [end - first for _, _, first, end in asked]
    inputs = np.empty((5, sum(counts)), dtype=np.int64)
    np.concatenate([row.tokens[first + 1 : end + 1] for row, _, first, end in asked], out=inputs[0])
    inputs[1] = _spans([first for _, _, first, _ in asked], asked)
    inputs[2] = _spans([sequence.length for _, sequence, _, _ in asked], asked)
    inputs[3] = np.repeat([sequence.row for _, sequence, _, _ in asked], counts)
    inputs[4] = padding_row
    inputs[4, np.cumsum(counts) - 1] = inputs[3, np.cumsum(counts) - 1]
    return inputs


def _spans(starts: Sequence[int], asked: Sequence[_Asked]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each request, whole numbers from its start on, as many as it has entries."""
    counts = np.array([end - first for _, _, first, end in asked])
    spans: np.ndarray[Any, np.dtype[np.int64]] = np.repeat(starts - np.cumsum(counts) + counts, counts)
    spans += np.arange(len(spans))
    return spans


def _request(row: DraftRow, sequence: HeadSequence) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A request's column of the inputs of `HeadDrafter._draw`."""
    params = row.params
    temperature, top_p = (1.0 if asked is None else asked for asked in (params.temperature, params.top_p))
    bits = np.array([temperature, top_p, params.min_p or 0.0], dtype=np.float32).view(np.int32)
    numbers = sequence.row, sequence.length, sequence.end, row.seed, max(0, params.top_k or 0)
    return np.array([*numbers, *bits.tolist()], dtype=np.int64)


def _truncates(row: DraftRow) -> bool:
    """Whether a request's draws leave out tokens."""
    params = row.params
    is_cut = (params.top_k or 0) > 0 or (params.top_p is not None and params.top_p < 1) or (params.min_p or 0.0) > 0
    return is_cut and params.temperature != 0


def _starts(count: int, device: torch.device) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device=device)
