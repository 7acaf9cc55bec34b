"""Captures what a function launches on the GPU as a CUDA graph, and keeps the graphs that only some steps need."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hookline.core.worker.runner.model_runner import ModelRunner
from hookline.core.worker.startup.late_work import CAPTURED, note

MAX_EXTRA_GRAPHS = 192
"""Most graphs that one ExtraGraphs keeps besides those it has reserved room for: requests combine extensions freely, so
the number of kinds has no other bound."""
Key = TypeVar("Key", bound=Hashable)
Captured = TypeVar("Captured")
Result = TypeVar("Result")


class ExtraGraphs(Generic[Key, Captured]):
    """Graphs that only some steps need, by their kind: captured when a step first needs one.

    The graph that was not used for longest makes room for a new one, and all are dropped when a step extension was
    made anew, since they captured the old one.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._generation = runner, 0
        self._graphs: OrderedDict[Key, Captured] = OrderedDict()
        self._num_reserved = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Key]:
        """The kinds of graphs that there are now."""
        return iter(self._graphs)

    def reserve(self, count: int) -> None:
        """Raise the number of graphs that are kept at a time by `count`."""
        self._num_reserved += count

    def get(self, key: Key, capture: Callable[[], Captured]) -> Captured:
        """The graph of this kind, which `capture` makes if there is none."""
        extensions = self._runner.extensions
        if extensions is not None and extensions.generation != self._generation:
            self._await_replays()
            self._generation = extensions.generation
            self._graphs.clear()
        if key not in self._graphs:
            if len(self._graphs) >= MAX_EXTRA_GRAPHS + self._num_reserved:
                self._await_replays()
                self._graphs.popitem(last=False)
            self._graphs[key] = capture()
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _await_replays(self) -> None:
        """Wait for the device: the last replay of a graph that is to be dropped may still be running."""
        torch.cuda.synchronize(self._runner.table.device)


class HiddenRoom:
    """A buffer of at most `num_rows` hidden states, which all graphs of layers write and captured draws read.

    It lies outside the graphs' memory pool, where a tensor that outlives its graph's replay would leave gaps.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._room_ND: Tensor | None = None

    def keep(self, hidden_ND: Tensor) -> Tensor:
        """Copy hidden states to the first rows; returns these. The first call allocates, so no capture may make it."""
        if self._room_ND is None:
            self._room_ND = hidden_ND.new_empty((self._num_rows, hidden_ND.shape[1]))
        return self._room_ND[: len(hidden_ND)].copy_(hidden_ND)

    def kept(self, num_rows: int) -> Tensor:
        """The first `num_rows` of the hidden states that were kept last."""
        assert self._room_ND is not None, "nothing was kept"
        return self._room_ND[:num_rows]


_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs whose captures CUDA broke off: torch's allocator of pinned memory still asks them which streams are theirs."""


class GraphPool:
    """The memory that captured graphs share. handle: of torch.

    captures_at_once: whether a graph is captured without a run before it, if one of its kind was captured already.
    """

    def __init__(self, *, captures_at_once: bool = False) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.captures_at_once = captures_at_once

    def end_broken(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed capture: end it if CUDA broke it off, which torch up to 2.13 does only in part, or not at all.

        Otherwise torch would still allocate for that capture, draw no random numbers on the device, and begin no other
        capture into this pool. Later graphs get a new pool.
        """
        device = torch.cuda.current_device()
        try:
            torch._C._cuda_endAllocateToPool(device, self.handle)
        except RuntimeError:  # it has ended
            return
        torch._C._cuda_releasePool(device, self.handle)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
        _BROKEN.append(graph)
        self.handle = torch.cuda.graph_pool_handle()


@cache
def _side_stream(device: torch.device) -> Any:
    """The same stream for all runs, since cuBLAS keeps 32 MiB for each stream that it was used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def run_before(step: Callable[[], object], device: torch.device, first: AbstractContextManager[None]) -> None:
    """Run a step before its capture: this compiles kernels and lets libraries allocate their workspaces."""
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), first:
        step()
    torch.cuda.current_stream().wait_stream(side)


def record(
    step: Callable[[], Result],
    pool: GraphPool | None,
    device: torch.device,
    first: AbstractContextManager[None],
    *,
    is_known: bool = False,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `step` launches, and the tensors that each replay writes.

    step: called once to warm up and once inside the capture; in a pool that captures at once, only inside the capture
    if is_known. pool: the memory of the graph; None: its own. first: a context around the first of these calls.
    is_known: a graph of this kind was captured before, for another size.
    Raises: what `step` raises; the capture is ended then, and the current stream is as before.
    """
    started = time.perf_counter()
    if is_known and pool is not None and pool.captures_at_once:
        graph, written = _captured(step, pool, "relaxed")  # kernels may be loaded meanwhile
        graph.replay()  # loads the graph onto the device
    else:
        run_before(step, device, first)
        graph, written = _captured(step, pool, "global")
    note(CAPTURED, f"of {device}", time.perf_counter() - started)
    return graph, written


class Recorder:
    """Records the graphs of a runner into one memory pool, and knows which kinds of graphs it has recorded before.

    Graphs of one kind compute the same for different numbers of rows and tokens.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._kinds = runner, set[Hashable]()
        self._pool: GraphPool | None = None

    def use_pool(self, pool: GraphPool | None) -> None:
        """Record all graphs into this pool; to be called before the first recording. None: each graph has its own."""
        self._pool = pool

    def record(
        self, step: Callable[[], Result], kind: Hashable, *, sizes_alike: bool = True
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of this kind, as the function `record` makes it; plugins' results are checked for the first graph.

        sizes_alike: whether a graph of another size stands for this one, which then needs no run before its capture.
        """
        extensions = self._runner.extensions
        kind = (
            kind,
            0 if extensions is None else extensions.generation,
        )  # extensions that were made anew are checked anew
        is_known = kind in self._kinds
        checking = nullcontext() if is_known else self._runner.checking()
        is_alike = is_known and sizes_alike
        recorded = record(step, self._pool, self._runner.table.device, checking, is_known=is_alike)
        self._kinds.add(kind)
        return recorded


def _captured(step: Callable[[], Result], pool: GraphPool | None, mode: str) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph and the tensors that `record` returns. mode: CUDA's capture mode: which calls it forbids."""
    graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    cause: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=None if pool is None else pool.handle, capture_error_mode=mode):
            try:
                written = step()
            except BaseException as error:
                cause = error  # the end of a capture that was broken off raises another error
                raise
    except BaseException:
        torch.cuda.set_stream(outside)
        if pool is not None:
            pool.end_broken(graph)
        if cause is not None:
            raise cause from cause.__cause__
        raise
    return graph, written
