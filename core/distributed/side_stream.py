"""Work of a GPU on a second stream, beside the current one: it begins after all earlier work, and can be waited for.

The host never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class SideStream:
    """A second CUDA stream, of high priority: its blocks are scheduled onto the GPU before other streams' blocks."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], object]) -> Callable[[], None]:
        """Launch `work` after what the current stream holds; returns a call that makes the current stream wait for it.

        Memory that the work uses belongs to the stream it was allocated on, so it may be freed only after that wait.
        Device: no host sync; safe inside a CUDA graph that holds the wait too.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)
