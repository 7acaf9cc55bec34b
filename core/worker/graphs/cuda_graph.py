"""Records what a function launches as a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hookline.core.worker.startup.late_work import CAPTURED, note


def record(
    step: Callable[[], Tensor], pool: Any, device: torch.device, first: AbstractContextManager[None]
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of what `step` launches, and the tensor that each replay writes.

    first: around the run before the capture.
    Raises: what `step` raises; the capture is ended then, and nothing is left of it.
    """
    started = time.perf_counter()
    # A first run outside the capture compiles kernels and lets libraries allocate their workspaces.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), first:
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph, outside = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    cause: BaseException | None = None
    try:
        with torch.cuda.graph(graph, pool=pool):
            try:
                tokens = step()
            except BaseException as error:
                cause = error  # a capture that is broken off says something else at its end
                raise
    except BaseException:
        torch.cuda.set_stream(outside)
        if cause is not None:
            raise cause from cause.__cause__
        raise
    note(CAPTURED, f"of {device}", time.perf_counter() - started)
    return graph, tokens
