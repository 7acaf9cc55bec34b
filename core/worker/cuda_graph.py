"""Records what a function launches as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def record(step: Callable[[], Tensor], pool: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of what `step` launches, and the tensor that each replay writes."""
    # A first run outside the capture compiles kernels and lets libraries allocate their workspaces.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        tokens = step()
    return graph, tokens
