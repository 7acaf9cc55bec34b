"""CUDA graphs without a GPU: a replay computes what the graph would hold, padding rows and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.core.contracts import Batch
from hookline.core.worker.graphs import cuda_graph

GARBAGE = 2**40
"""What takes the place of results that no longer count."""


class ReplayedAtOnce:
    """In the place of a CUDAGraph: computes `step` anew, and puts results where the first ones are.

    Graphs share their memory. So a replay spoils the results of the others but those that it was made behind, which
    are among the arguments of its step, and what lies outside of all graphs.
    """

    def __init__(self, step: Any, every: list[ReplayedAtOnce]) -> None:
        self.step, self._every, self.count = step, every, 0
        before = {tensor.data_ptr() for tensor in _tensors(step.args)}
        self.written = step()
        made = [tensor for tensor in _tensors(self.written) if tensor.data_ptr() not in before]
        self._own = [tensor for tensor in made if not _is_in_room(tensor, step)]
        every.append(self)

    def replay(self) -> None:
        """Compute the step."""
        self.count += 1
        for to, value in zip(_tensors(self.written), _tensors(self.step()), strict=True):
            to.copy_(value)
        kept = {tensor.data_ptr() for tensor in [*_tensors(self.step.args), *self._own]}
        for other in self._every:
            for tensor in other._own:
                if tensor.data_ptr() not in kept:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)


def replay_at_once(monkeypatch: pytest.MonkeyPatch) -> list[ReplayedAtOnce]:
    """From now on graphs are such ones; returns all that are made."""
    every: list[ReplayedAtOnce] = []

    def record(step: Any, pool: Any, device: Any, first: Any, *, is_known: bool = False) -> tuple[Any, Any]:
        with first:
            graph = ReplayedAtOnce(step, every)
        graph.replay()
        return graph, graph.written

    monkeypatch.setattr(cuda_graph, "record", record)
    return every


def with_host_lengths(kernels: Any) -> None:
    """Let kernels of the CPU compute what graphs hold: they need lengths on the host, and no rows without queries."""
    prepare = kernels.prepare

    def prepared(batch: Batch) -> None:
        if batch.query_starts_host is None:
            lens_B = np.diff(batch.query_starts_B1.numpy())
            rows = torch.from_numpy(np.flatnonzero(lens_B))
            batch.context_lens_B, batch.block_table_BM = batch.context_lens_B[rows], batch.block_table_BM[rows]
            batch.query_starts_host = np.concatenate([[0], np.cumsum(lens_B[rows])]).astype(np.int32)
            batch.query_starts_B1 = torch.from_numpy(batch.query_starts_host)
        if batch.context_lens_host is None:
            batch.context_lens_host = batch.context_lens_B.numpy()
        prepare(batch)

    kernels.prepare = prepared


def _is_in_room(tensor: Tensor, step: Callable[..., Any]) -> bool:
    """Whether a tensor is part of the room for hidden states of the graphs that a step belongs to."""
    room: Tensor | None = getattr(getattr(step.func.__self__, "_room", None), "_room_ND", None)  # type: ignore[attr-defined]
    return room is not None and room.data_ptr() == tensor.data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    return list(_each_tensor(value))


def _each_tensor(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for one in fields(value):
            yield from _each_tensor(getattr(value, one.name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _each_tensor(one)
