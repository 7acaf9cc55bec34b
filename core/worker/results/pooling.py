"""The device's half of pooling: hidden states of prompts into vectors, by the poolers of plugins.

A step names chunks, rows of the request table and poolers by index; one without pooled chunks never comes here.
Legend: as in core/contracts/pooler.py; P pooled chunks of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import PooledChunks, Pooler
from hookline.core.errors import HooklineError, PluginError, RequestFault, is_out_of_memory
from hookline.core.plugin.blame import breach, with_place
from hookline.core.requests.pooling import BEGINS, ENDS, NORMALIZES
from hookline.core.step.executor import pooled_by
from hookline.core.step.message import POOLED_WIDTH, Step
from hookline.core.util.arrays import IntArray
from hookline.core.util.raising import Raising
from hookline.core.worker.form_checks import form_fault
from hookline.core.worker.request_table import on_device


@dataclass(frozen=True)
class PoolerMaker:
    """A pooler's name in errors, whether it reads all tokens, and how to make it."""

    name: str
    make: Callable[[], Pooler]
    reads_all_tokens: Callable[[], bool]


@dataclass(frozen=True)
class Group:
    """The pooled chunks of a step that one pooler takes, as arrays on the host.

    rows, starts, lens: of each chunk, its request's row, the position of its first token and its length. flags, sizes:
    see core.requests.pooling. tokens: where the chunks' tokens stand among the step's.
    """

    pooler: int
    rows: IntArray
    starts: IntArray
    lens: IntArray
    flags: IntArray
    sizes: IntArray
    tokens: IntArray


DeviceVectors = Mapping[str, Tensor]
"""The vectors (P, F) of each pooler for the prompts that are complete, in the order of their chunks; see pooled_by."""


class PooledStates:
    """The poolers that requests use, each made on first use, and their state for each row of the request table."""

    def __init__(self, makers: Sequence[PoolerMaker], num_rows: int, device: torch.device) -> None:
        self._makers, self._num_rows, self._device = makers, num_rows, device
        self._poolers: dict[int, tuple[Pooler, Tensor]] = {}
        self._refusals: dict[int, HooklineError] = {}
        self._reads_all_tokens: dict[int, bool] = {}

    def groups(self, step: Step) -> list[Group]:
        """The step's pooled chunks, by their pooler."""
        pooled_P4 = step.pooled.reshape(-1, POOLED_WIDTH)
        firsts = len(step.decode_rows) + np.cumsum(step.chunk_lens) - step.chunk_lens
        return [
            self._group(step, index, pooled_P4[pooled_P4[:, 1] == index], firsts)
            for index in np.unique(pooled_P4[:, 1]).tolist()
        ]

    def _group(self, step: Step, index: int, pooled_P4: IntArray, firsts: IntArray) -> Group:
        chunks = pooled_P4[:, 0]
        starts, lens, firsts = step.chunk_starts[chunks], step.chunk_lens[chunks], firsts[chunks]
        if index not in self._reads_all_tokens:
            self._reads_all_tokens[index] = self._makers[index].reads_all_tokens()
        if not self._reads_all_tokens[index]:
            starts, firsts, lens = starts + lens - 1, firsts + lens - 1, np.ones_like(lens)
        tokens = np.repeat(firsts - (np.cumsum(lens) - lens), lens) + np.arange(lens.sum())
        rows, flags, sizes = step.chunk_rows[chunks], pooled_P4[:, 2], pooled_P4[:, 3]
        return Group(index, rows, starts, lens, flags, sizes, tokens)

    def reads_all_tokens(self, groups: Sequence[Group]) -> bool:
        """Whether any of them needs more than a prompt's last token."""
        return any(self._reads_all_tokens[group.pooler] for group in groups)

    def run(self, groups: Sequence[Group], hidden_PD: Tensor) -> DeviceVectors:
        """Pool the hidden states of the groups' tokens, which lie one group after the other.

        Raises: RequestFault naming the pooler that failed and its method, and the rows of its requests.
        """
        found, first = dict[str, Tensor](), 0
        for group in groups:
            hidden_TD = hidden_PD[first : first + len(group.tokens)]
            first += len(group.tokens)
            with self._raising(group):
                vectors_PF = self._run(group, hidden_TD)
            if vectors_PF is not None:
                found[pooled_by(group.pooler)] = vectors_PF
        return found

    def _raising(self, group: Group, method: str = "") -> Raising:
        """Around a call of a pooler's method, or around the use of its results."""

        def fault(error: BaseException) -> RequestFault | None:
            if isinstance(error, RequestFault):
                return None
            is_ours = isinstance(error, HooklineError)
            is_refusal = is_ours and not isinstance(error, PluginError) and not is_out_of_memory(error)
            did = "refuses" if is_refusal else f"fails in {method}" if method else "fails"
            why = str(error) if is_ours else with_place(error)
            told = f"{self._makers[group.pooler].name} {did}: {why}"
            return RequestFault(told, rows=group.rows.tolist(), is_refusal=is_refusal)

        return Raising(fault)

    def _run(self, group: Group, hidden_TD: Tensor) -> Tensor | None:
        """The vectors of the group's prompts that are complete; None if none is."""
        with self._raising(group, "__init__"):
            pooler, state_RS = self._pooler(group.pooler)
        numbers = np.stack([group.rows, group.starts, group.lens, (group.flags & BEGINS) > 0, group.sizes])
        rows_B, starts_B, lens_B, begins_B, sizes_B = on_device(numbers, self._device).unbind(0)
        state_BS = state_RS.index_select(0, rows_B).masked_fill_(begins_B.bool().unsqueeze(1), 0)
        chunks = _chunks(starts_B, lens_B, len(group.tokens))
        with self._raising(group, "accumulate"):
            found = pooler.accumulate(state_BS, hidden_TD, chunks)
        state_BS = self._formed("accumulate", group, found, *state_BS.shape)
        state_RS.index_copy_(0, rows_B, state_BS)
        (ends,) = ((group.flags & ENDS) > 0).nonzero()
        if not len(ends):
            return None
        if len(ends) < len(group.rows):
            picked = on_device(ends, self._device)
            state_BS, starts_B, lens_B, sizes_B = (
                values.index_select(0, picked) for values in (state_BS, starts_B, lens_B, sizes_B)
            )
        with self._raising(group, "finish"):
            found = pooler.finish(state_BS, starts_B + lens_B)
        vectors_BF = self._formed("finish", group, found, len(ends))
        wishes = group.flags[ends] & NORMALIZES
        if group.sizes[ends].any():
            numbers_F = torch.arange(vectors_BF.shape[1], device=self._device)
            vectors_BF = vectors_BF.masked_fill((numbers_F >= sizes_B.unsqueeze(1)) & (sizes_B > 0).unsqueeze(1), 0)
        if wishes.any():
            is_scaled_B1 = on_device(wishes, self._device).unsqueeze(1) > 0
            vectors_BF = functional.normalize(vectors_BF).where(is_scaled_B1, vectors_BF)
        return vectors_BF.contiguous()

    def _pooler(self, index: int) -> tuple[Pooler, Tensor]:
        """The pooler, made when it is first asked for.

        Raises: what making it raised, then and ever after if it refuses this checkpoint: to find that out it may read
        files, and whoever asks again must not hold up everybody's steps again.
        """
        if index in self._refusals:
            raise self._refusals[index].with_traceback(None)
        if index not in self._poolers:
            try:
                pooler = self._makers[index].make()
            except HooklineError as error:
                if not is_out_of_memory(error):
                    self._refusals[index] = error
                raise
            state_RS = torch.zeros((self._num_rows, pooler.state_size()), dtype=torch.float32, device=self._device)
            self._poolers[index] = pooler, state_RS
        return self._poolers[index]

    def _formed(self, method: str, group: Group, found: Any, num_rows: int, width: int | None = None) -> Tensor:
        """What a pooler returned, if its shape and dtype are right. width: None if any number of columns is right."""
        if width is None:
            width = found.shape[1] if isinstance(found, Tensor) and found.ndim == 2 else 1
        if fault := form_fault(found, (num_rows, width), [torch.float32]):
            raise RequestFault(breach(self._makers[group.pooler].name, method, fault), rows=group.rows.tolist())
        formed: Tensor = found
        return formed


def _chunks(starts_B: Tensor, lens_B: Tensor, num_tokens: int) -> PooledChunks:
    """starts_B: positions of the pieces' first tokens in their prompts."""
    indices_B = torch.arange(len(lens_B), device=lens_B.device)
    chunk_of_T = torch.repeat_interleave(indices_B, lens_B, output_size=num_tokens)
    firsts_B = lens_B.cumsum(0) - lens_B
    positions_T = torch.arange(num_tokens, device=lens_B.device) + (starts_B - firsts_B).index_select(0, chunk_of_T)
    return PooledChunks(firsts_B, lens_B, chunk_of_T, positions_T)
