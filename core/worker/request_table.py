"""The device's table of the running requests, one row each, and the batch that a step gathers from these rows.

The last token, the length and the block table of a request never travel back to the host between steps: a step names
rows, and everything a decode needs is gathered from them.
Legend: R rows of the table, B requests of a step, D of them decoding, T tokens, N draws, M blocks of a table row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Batch, RequestRows, SamplingBatch, StateTensor
from hookline.core.step.message import SECTIONS, Sections, Step, pack
from hookline.core.util.arrays import IntArray, no_ints


class RequestTable:
    """One row per running request, and a padding row, whose block table names only the scratch block.

    max_blocks: columns of the block table for each group of layers that has blocks of its own; the groups' columns lie
    side by side. windows: each group's attention window in tokens, None for full attention. states: the recurrent
    states, zeroed for each request that is admitted. is_by_layer: see CacheGroups.
    Shapes: last_token_R int64, length_R int32 (tokens known, the last one not yet in the cache), temperature_R float32,
    seed_R int64, block_table_RM int32, shared_len_R int32 (tokens of a prefix shared with other rows). host_length_R
    mirrors length_R on the host.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        *,
        windows: Sequence[int | None] = (None,),
        states: LayerStates | None = None,
        is_by_layer: bool = True,
    ) -> None:
        size, self.block_size, self.device = num_rows + 1, block_size, device
        self.padding_row = num_rows
        self.last_token_R = torch.zeros(size, dtype=torch.int64, device=device)
        self.length_R = torch.ones(size, dtype=torch.int32, device=device)
        self.temperature_R = torch.zeros(size, dtype=torch.float32, device=device)
        self.seed_R = torch.zeros(size, dtype=torch.int64, device=device)
        num_columns = max_blocks * len(windows)
        self.block_table_RM = torch.full((size, num_columns), scratch_block, dtype=torch.int32, device=device)
        self.windows, self.states = tuple(windows), states
        self.group_tables = torch.split(self.block_table_RM, max_blocks, dim=1)
        """Each group's columns of block_table_RM, (R, max_blocks)."""
        self._tables_GRM = self.block_table_RM.view(size, len(windows), max_blocks).transpose(0, 1)
        self.requests = RequestRows(
            self.last_token_R, self.length_R, self.temperature_R, self.seed_R, self.group_tables[0], block_size,
            self.padding_row,
        )  # fmt: skip
        """The tensors of this table that kernels are given."""
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        """0, 1, 2, ...: the first token of each row if rows have one token; decodes slice query_starts_B1 from it."""
        self.is_plain = self.windows == (None,) and states is None and is_by_layer
        self.shared_len_R = torch.zeros(size, dtype=torch.int32, device=device)
        self.host_length_R = np.ones(size, dtype=np.int32)
        nothing = Sections(on_device(pack(Step()), device), [0] * len(SECTIONS))
        self._decoded: tuple[IntArray, IntArray, Sections] = no_ints(), no_ints(), nothing
        """decode_rows, late_draws and the sections on the device of the last step that only decoded."""

    def receive(self, step: Step) -> DeviceStep:
        """Write a step's admissions and blocks into the table; its sections go to the device in one transfer."""
        lengths = [len(getattr(step, name)) for name in SECTIONS]
        if sum(lengths) == len(step.decode_rows) + len(step.late_draws):
            return DeviceStep(step, partial(self._decodes, step, lengths))
        device_step = DeviceStep(step, partial(self._sent, step, lengths))
        if step.changes_table:
            self._change(device_step)
        return device_step

    def _sent(self, step: Step, lengths: Sequence[int]) -> Sections:
        return Sections(on_device(pack(step), self.device), lengths)

    def _change(self, device_step: DeviceStep) -> None:
        """Write a step's admissions, restored states, block tables and shared prefix into the table."""
        step, views = device_step.step, device_step.views
        if len(step.admit_rows):
            self.seed_R[views["admit_rows"]] = views["admit_seeds"]
            self.temperature_R[views["admit_rows"]] = views["admit_temperatures"].to(torch.int32).view(torch.float32)
            if self.states is not None:
                self.states.clear(views["admit_rows"])
        if len(step.restored_rows):
            assert self.states is not None
            self.states.restore(step.restored_rows.tolist(), step.restored_slots.tolist())
        if len(step.table_rows):
            self.block_table_RM[views["table_rows"], views["table_columns"]] = views["table_blocks"].to(torch.int32)
        if len(step.shared_rows):
            self.shared_len_R.zero_()
            self.shared_len_R[views["shared_rows"]] = step.shared_len

    def save_states(self, step: Step) -> None:
        """Copy the states that a computed step leaves into the slots that it names. Device: no host sync."""
        if len(step.saved_rows) and self.states is not None:
            self.states.save(step.saved_rows.tolist(), step.saved_slots.tolist())

    def _decodes(self, step: Step, lengths: Sequence[int]) -> Sections:
        """The sections of a step that only decodes: mostly the rows of the step before, which are on the device."""
        decode_rows, late_draws, views = self._decoded
        if not (np.array_equal(step.decode_rows, decode_rows) and np.array_equal(step.late_draws, late_draws)):
            views = self._sent(step, lengths)
            self._decoded = step.decode_rows.copy(), step.late_draws.copy(), views
        return views

    def batch(self, device_step: DeviceStep) -> Batch:
        """Lay a step out for the kernels: decodes first, then the chunks."""
        step, views = device_step.step, device_step.views
        num_decodes, num_chunks = len(step.decode_rows), len(step.chunk_rows)
        rows_B = torch.cat([views["decode_rows"], views["chunk_rows"]]) if num_chunks else views["decode_rows"]
        num_columns = -(-step.max_context_len // self.block_size)
        block_table_BM = self.group_tables[0][:, :num_columns].index_select(0, rows_B)
        token_ids_T, positions_T, context_B = self.newest(views["decode_rows"])
        batch_rows_T = None
        if num_chunks:
            chunk_rows_T, chunk_positions_T = _chunk_tokens(views, len(step.token_ids_T))
            arange_D = torch.arange(num_decodes, device=self.device)
            batch_rows_T = torch.cat([arange_D, chunk_rows_T + num_decodes])
            positions_T = torch.cat([positions_T, chunk_positions_T])
            token_ids_T = torch.cat([token_ids_T, views["token_ids_T"]])
            context_B = torch.cat([context_B, (views["chunk_starts"] + views["chunk_lens"]).to(torch.int32)])
        starts = np.concatenate([np.arange(num_decodes + 1), num_decodes + np.cumsum(step.chunk_lens)]).astype(np.int32)
        batch = Batch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slot_mapping_T=slot_mapping(block_table_BM, batch_rows_T, positions_T, self.block_size),
            query_starts_B1=torch.from_numpy(starts).to(self.device, non_blocking=True),
            context_lens_B=context_B,
            block_table_BM=block_table_BM,
            num_decodes=num_decodes,
            max_query_len=int(step.chunk_lens.max(initial=1)),
            max_context_len=step.max_context_len,
            query_starts_host=starts,
            context_lens_host=np.concatenate(
                [self.host_length_R[step.decode_rows], step.chunk_starts + step.chunk_lens]
            ).astype(np.int32),
        )
        batch = self.grouped(batch, rows_B, batch_rows_T)
        if step.shared_len:
            batch.shared_lens_B = self.shared_len_R.index_select(0, views["decode_rows"])
        return batch

    def grouped(self, batch: Batch, rows_B: Tensor, batch_rows_T: Tensor | None) -> Batch:
        """The first group's batch with the batches of the other groups; the batch itself if all layers are alike.

        rows_B: the table's. batch_rows_T: the row of the batch that each token belongs to; None: token t to row t.
        Device: no host sync; graph-safe.
        """
        if self.is_plain:
            return batch
        batch.window, num_columns = self.windows[0], batch.block_table_BM.shape[1]
        if len(self.windows) == 1:
            return GroupedBatch(**vars(batch), rows_B=rows_B)
        tables_GBM = self._tables_GRM[1:, :, :num_columns].index_select(1, rows_B)
        slots_GT = slot_mappings(tables_GBM, batch_rows_T, batch.positions_T, self.block_size)
        others = [
            replace(batch, window=window, slot_mapping_T=slots_GT[index], block_table_BM=tables_GBM[index], scratch={})
            for index, window in enumerate(self.windows[1:])
        ]
        return GroupedBatch(**vars(batch), others=others, rows_B=rows_B)

    def token_rows(self, step: Step) -> Tensor:
        """The table's row of each token of a step, (T,) int64: of its decodes, then of its chunks' tokens."""
        rows_T = np.concatenate([step.decode_rows, step.chunk_rows.repeat(step.chunk_lens)])
        return on_device(rows_T, self.device)

    def newest(self, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of a decode of these rows: token ids and positions (int64), and lengths with these tokens (int32).

        Device: no host sync; graph-safe.
        """
        context_N = self.length_R.index_select(0, rows_N)
        positions_N = torch.sub(context_N, 1, out=torch.empty_like(context_N, dtype=torch.int64))
        return self.last_token_R.index_select(0, rows_N), positions_N, context_N

    def lengthen(self, sampled: SampleRows) -> None:
        """Count a sampled token in each of these rows; its value is not needed. Device: no host sync; graph-safe."""
        position_N = sampled.params.position_N
        self.length_R[sampled.rows_N] = torch.add(position_N, 1, out=torch.empty_like(position_N, dtype=torch.int32))

    def reset_padding(self) -> None:
        """Set the padding row's length back to one token, after a step that drew for it. Device: graph-safe."""
        self.length_R[self.padding_row : self.padding_row + 1].fill_(1)

    def mirror(self, step: Step) -> None:
        """Update host_length_R to the lengths that a launched step leaves on the device."""
        self.host_length_R[step.decode_rows] += 1
        chunks = step.sampled_chunks
        self.host_length_R[step.chunk_rows[chunks]] = step.chunk_starts[chunks] + step.chunk_lens[chunks] + 1

    def sample_rows(self, device_step: DeviceStep, batch: Batch) -> SampleRows:
        """Which tokens' hidden states are sampled from, and with which parameters."""
        step, views = device_step.step, device_step.views
        rows_N, context_N = views["decode_rows"], batch.context_lens_B
        tokens_N = None
        if len(step.chunk_rows):
            batch_rows_N = torch.cat(
                [torch.arange(batch.num_decodes, device=self.device), views["sampled_chunks"] + batch.num_decodes]
            )
            rows_N = torch.cat([rows_N, views["chunk_rows"].index_select(0, views["sampled_chunks"])])
            context_N = context_N.index_select(0, batch_rows_N)
            tokens_N = batch.query_starts_B1[1:].index_select(0, batch_rows_N).long() - 1
            if step.draws_several:
                ahead_N = on_device(draws_ahead(step), self.device)
                tokens_N, context_N = tokens_N - ahead_N, context_N - ahead_N.to(torch.int32)
        return SampleRows(rows_N, tokens_N, self.sampling(rows_N, context_N.long(), all_greedy=step.all_greedy))

    def decode_draws(self, rows_N: Tensor) -> SampleRows:
        """One draw for each of these rows, which all decode. Device: no host sync; graph-safe."""
        return SampleRows(rows_N, None, self.sampling(rows_N, self.length_R.index_select(0, rows_N).long()))

    def sampling(self, rows_N: Tensor, position_N: Tensor, *, all_greedy: bool = False) -> SamplingBatch:
        """The sampling parameters of these rows, for draws at these positions. Device: no host sync; graph-safe."""
        temperature_N, seed_N = (values_R.index_select(0, rows_N) for values_R in (self.temperature_R, self.seed_R))
        return SamplingBatch(temperature_N, seed_N, position_N, all_greedy=all_greedy)


@dataclass
class GroupedBatch(Batch):
    """The batch of the first group of layers, the batches of the other groups, and the rows of the request table."""

    others: Sequence[Batch] = ()
    rows_B: Tensor | None = None


def state_form(tensor: StateTensor, dtype: torch.dtype, num_ranks: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of one rank's part of a request's state. dtype: for state tensors that name no dtype."""
    shape = list(tensor.shape)
    if tensor.split_dim is not None:
        shape[tensor.split_dim] //= num_ranks
    return tuple(shape), getattr(torch, tensor.dtype) if tensor.dtype else dtype


class LayerStates:
    """The recurrent states of the layers that keep one: tensors (R, *shape) by layer and name.

    States of one shape and dtype lie in one large tensor, so that clearing a row takes few launches.

    layers: of each such layer, the shape of one request's part and the dtype, by name.
    """

    def __init__(
        self,
        layers: Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]],
        num_rows: int,
        device: torch.device,
    ) -> None:
        alike: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, str]]] = {}
        for layer, named in layers.items():
            for name, form in named.items():
                alike.setdefault(form, []).append((layer, name))
        self._stacks: list[Tensor] = []
        self._slots: list[Tensor] = []
        """For each stack, the copies of a row: (layers, slots, *shape)."""
        self.layers: dict[int, dict[str, Tensor]] = {layer: {} for layer in layers}
        for (shape, dtype), members in alike.items():
            self._stacks.append(torch.zeros(len(members), num_rows + 1, *shape, dtype=dtype, device=device))
            for (layer, name), tensor in zip(members, self._stacks[-1], strict=True):
                self.layers[layer][name] = tensor

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The large tensors, which hold all of the memory."""
        return [*self._stacks, *self._slots]

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's states, and of one slot."""
        return sum(stack[:, 0].numel() * stack.element_size() for stack in self._stacks)

    def make_slots(self, num_slots: int) -> None:
        """Allocate so many slots in place of those before."""
        self._slots = []
        # A slot is saved before it is restored; to zero them all would be half of a small model's start on a CPU.
        self._slots = [stack.new_empty(len(stack), num_slots, *stack.shape[2:]) for stack in self._stacks]

    def save(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the states of rows into slots, one by one, which needs no further memory. Device: no host sync."""
        for stack, copies in zip(self._stacks, self._slots, strict=True):
            for row, slot in zip(rows, slots, strict=True):
                copies[:, slot].copy_(stack[:, row])

    def restore(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots into the states of rows. Device: no host sync."""
        for stack, copies in zip(self._stacks, self._slots, strict=True):
            for row, slot in zip(rows, slots, strict=True):
                stack[:, row].copy_(copies[:, slot])

    def clear(self, rows_N: Tensor) -> None:
        """Zero the states of these rows in all layers. Device: no host sync."""
        for stack in self._stacks:
            stack.index_fill_(1, rows_N, 0)


@dataclass(frozen=True)
class DeviceStep:
    """A step. send: copies its sections to the device; called on their first use, since some graphs need none."""

    step: Step
    send: Callable[[], Sections]

    @cached_property
    def views(self) -> Any:
        """The sections on the device."""
        return self.send()


@dataclass(frozen=True)
class SampleRows:
    """The draws of a step: the table's row of each, and its sampling parameters.

    token_indices_N: the token of the step's T that each draw follows, int64; None if every token is followed by one.
    streams: see LogitsRows.
    """

    rows_N: Tensor
    token_indices_N: Tensor | None
    params: SamplingBatch
    streams: Mapping[int, Tensor] = field(default_factory=dict)


def draws_ahead(step: Step) -> IntArray:
    """For each draw of a step, how many tokens of its chunk come after the token that the draw follows."""
    ahead = np.zeros(step.num_sampled, dtype=np.int64)
    chunks = step.sampled_chunks
    ends = np.searchsorted(chunks, chunks, side="right")
    ahead[len(step.decode_rows) :] = ends - 1 - np.arange(len(chunks))
    return ahead


def on_device(array: IntArray, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for it."""
    sent = torch.from_numpy(array)
    return sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent


def slot_mapping(block_table_BM: Tensor, batch_rows_T: Tensor | None, positions_T: Tensor, block_size: int) -> Tensor:
    """Flat cache slot of each token; batch_rows_T None means that token t belongs to row t."""
    return slot_mappings(block_table_BM.unsqueeze(0), batch_rows_T, positions_T, block_size).squeeze(0)


def slot_mappings(tables_GBM: Tensor, batch_rows_T: Tensor | None, positions_T: Tensor, block_size: int) -> Tensor:
    """`slot_mapping` for G groups of layers at once: (G, T)."""
    column_T = positions_T // block_size
    if batch_rows_T is None:
        block_GT = tables_GBM.gather(2, column_T.view(1, -1, 1).expand(len(tables_GBM), -1, 1)).squeeze(2)
    else:
        block_GT = tables_GBM[:, batch_rows_T, column_T]
    return torch.add(positions_T, block_GT - column_T, alpha=block_size)


def _chunk_tokens(views: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
    """For each chunk token, its chunk's index and its position."""
    lens = views["chunk_lens"]
    indices = torch.arange(lens.shape[0], device=lens.device)
    rows_T = torch.repeat_interleave(indices, lens, output_size=num_tokens)
    offsets = views["chunk_starts"] - (lens.cumsum(0) - lens)
    return rows_T, torch.arange(num_tokens, device=lens.device) + offsets.index_select(0, rows_T)
