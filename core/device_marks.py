"""How far a GPU has got with what the host launched: behind each mark, eight bytes are copied to the host.

For steps that the host launches in a moment and the device computes for seconds. The copies have a stream of their own,
so that computing never waits behind other copies for them. Asking takes no call of CUDA, which another thread must not
make while a graph is captured.
"""

from __future__ import annotations

import torch

from core.aside import Aside

NUM_NUMBERS = 1 << 16
"""Marks that differ; then they begin again. Far fewer are passed between two looks."""


class DeviceMarks:
    """`core.pulse.Marks` of a GPU, in whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._numbers_K = torch.arange(NUM_NUMBERS, device=device)
        self._latest_1 = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen_1 = self._latest_1.numpy()
        self._aside = Aside(device)
        self._next, self._num_reached, self._before = 0, 0, 0

    def mark(self) -> None:
        """See Marks. Nothing happens during a capture, whose graph would repeat the mark as it was."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._next = (self._next + 1) % NUM_NUMBERS
        number_1 = self._numbers_K[self._next : self._next + 1]
        self._aside(lambda: self._latest_1.copy_(number_1, non_blocking=True))

    def num_reached(self) -> int:
        """See Marks."""
        latest = int(self._seen_1[0])
        self._num_reached += (latest - self._before) % NUM_NUMBERS
        self._before = latest
        return self._num_reached
