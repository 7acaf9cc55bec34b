"""Sampled tokens on their way to the host: one asynchronous copy per step into a ring of pinned buffers.

On a CPU there is nothing to copy or to wait for, and the tokens are simply kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hookline.core.util.arrays import IntArray

RING = 4
"""Buffers of the ring; the engine has at most two steps in flight."""


class Rows(Protocol):
    """Rows of numbers on their way to the host."""

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> IntArray:
        """Wait for them; float32 values come as their bits, in an array to be viewed as float32."""
        ...


@dataclass(slots=True)
class TransferredTokens:
    """The tokens of one launched step, or its scored rows: tokens with their log-probabilities."""

    tokens_N: Tensor
    event: Any = None

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> IntArray:
        """Wait for the copy and return the tokens; the only place where the host waits for the device.

        On a GPU they lie in a buffer of the ring, which is written to again after RING steps.
        """
        if self.event is not None:
            self.event.synchronize()
        tokens: IntArray = self.tokens_N.numpy()
        return tokens


class TokenTransfer:
    """The ring, whose buffers hold `max_tokens` draws at first.

    A step with drafts has more draws than rows: the first such step makes a ring of larger ones.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._next = 0
        self._buffers = _buffers(max_tokens) if device.type == "cuda" else []

    def send(self, tokens_N: Tensor) -> TransferredTokens:
        """Start copying tokens to the host; they must not change before the device has carried out the copy."""
        if not self._buffers:
            return TransferredTokens(tokens_N)
        if tokens_N.ndim > 1:
            return send_apart(tokens_N)
        if tokens_N.shape[0] > self._buffers[0][0].shape[0]:
            # steps in flight refer to the old buffers until their tokens have been read
            self._buffers = _buffers(tokens_N.shape[0])
        buffer, event = self._buffers[self._next]
        self._next = (self._next + 1) % RING
        arriving_N = buffer[: tokens_N.shape[0]]
        arriving_N.copy_(tokens_N, non_blocking=True)
        event.record()
        return TransferredTokens(arriving_N, event)


def _buffers(max_tokens: int) -> list[tuple[Tensor, Any]]:
    """Pinned buffers of a ring, each with the event that its copy records."""
    return [
        (torch.empty(max_tokens, dtype=torch.int64, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
        for _ in range(RING)
    ]


def send_apart(rows_NX: Tensor) -> TransferredTokens:
    """Start copying rows of any size to the host, such as scored ones, into a buffer of their own.

    Few steps have such rows, so they need no ring.
    """
    if not rows_NX.is_cuda:
        return TransferredTokens(rows_NX)
    arriving_NX = torch.empty(rows_NX.shape, dtype=rows_NX.dtype, pin_memory=True)
    arriving_NX.copy_(rows_NX, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return TransferredTokens(arriving_NX, event)
