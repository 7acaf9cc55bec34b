"""The device's half of pooling: hidden states of prompts into vectors, by the poolers of plugins.

Legend: as in core/contracts/pooler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import PooledChunks, Pooler
from hookline.core.errors import HooklineError, PluginError, RequestFault, is_out_of_memory
from hookline.core.plugin.blame import breach, with_place
from hookline.core.requests.pooling import BEGINS, ENDS, NORMALIZES
from hookline.core.util.raising import Raising
from hookline.core.worker.form_checks import form_fault
from hookline.core.worker.request_table import on_device
from hookline.core.worker.results.prompt_readers import Group, RankReader


class RankPooler(RankReader):
    """A pooler on this rank, made when it is first used, and its state for each row of the request table.

    name: the pooler's, for errors. make: makes the pooler. reads_all: whether it reads all tokens of a prompt.
    """

    num_columns = 0

    def __init__(
        self, name: str, make: Callable[[], Pooler], reads_all: Callable[[], bool], num_rows: int, device: torch.device
    ) -> None:
        self._name, self._make, self._reads_all = name, make, reads_all
        self._num_rows, self._device = num_rows, device
        self._made: tuple[Pooler, Tensor] | None = None
        self._refusal: HooklineError | None = None

    @cached_property
    def reads_last(self) -> bool:
        """See RankReader."""
        return not self._reads_all()

    def run(self, group: Group, hidden_TD: Tensor) -> Tensor | None:
        """See RankReader: the vectors of the group's prompts that are complete.

        Raises: RequestFault naming the pooler and its method that failed, and the rows of its requests.
        """
        with self._raising(group):
            return self._run(group, hidden_TD)

    def _raising(self, group: Group, method: str = "") -> Raising:
        """Around a call of the pooler's method, or around the use of its results."""

        def fault(error: BaseException) -> RequestFault | None:
            if isinstance(error, RequestFault):
                return None
            is_ours = isinstance(error, HooklineError)
            is_refusal = is_ours and not isinstance(error, PluginError) and not is_out_of_memory(error)
            did = "refuses" if is_refusal else f"fails in {method}" if method else "fails"
            why = str(error) if is_ours else with_place(error)
            return RequestFault(f"{self._name} {did}: {why}", rows=group.rows.tolist(), is_refusal=is_refusal)

        return Raising(fault)

    def _run(self, group: Group, hidden_TD: Tensor) -> Tensor | None:
        with self._raising(group, "__init__"):
            pooler, state_RS = self._pooler()
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

    def _pooler(self) -> tuple[Pooler, Tensor]:
        """The pooler, made on first use, and its state.

        Raises: the error of making it. If it refuses this checkpoint, every later call raises the same error without
        another try: a try may read files, which delays the steps of all requests.
        """
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if self._made is None:
            try:
                pooler = self._make()
            except HooklineError as error:
                if not is_out_of_memory(error):
                    self._refusal = error
                raise
            shape = self._num_rows, pooler.state_size()
            self._made = pooler, torch.zeros(shape, dtype=torch.float32, device=self._device)
        return self._made

    def _formed(self, method: str, group: Group, found: Any, num_rows: int, width: int | None = None) -> Tensor:
        """A pooler's result, after a check of its shape and dtype. width: None if any number of columns is right."""
        if width is None:
            width = found.shape[1] if isinstance(found, Tensor) and found.ndim == 2 else 1
        if fault := form_fault(found, (num_rows, width), [torch.float32]):
            raise RequestFault(breach(self._name, method, fault), rows=group.rows.tolist())
        formed: Tensor = found
        return formed


def _chunks(starts_B: Tensor, lens_B: Tensor, num_tokens: int) -> PooledChunks:
    """starts_B: positions of the pieces' first tokens in their prompts."""
    indices_B = torch.arange(len(lens_B), device=lens_B.device)
    chunk_of_T = torch.repeat_interleave(indices_B, lens_B, output_size=num_tokens)
    firsts_B = lens_B.cumsum(0) - lens_B
    positions_T = torch.arange(num_tokens, device=lens_B.device) + (starts_B - firsts_B).index_select(0, chunk_of_T)
    return PooledChunks(firsts_B, lens_B, chunk_of_T, positions_T)
