"""The late rows of a step on their way to the device, where they change the logits of its late draws.

One buffer on the host and one on the device, both at fixed addresses, so that captured graphs read them; allocated when
a step first needs them. The host fills the rows: core/requests/late_input.py. They are copied on a stream of their own:
beside the forward pass of an eager step, beside the computation of logits in a graph.
Legend: N draws, V vocabulary, R rows of the buffers, K late draws, W int32 words of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.core.util.arrays import WordArray


class LateRows(ABC):
    """Rows for at most `num_rows` draws, and on the device a neutral row of words `neutral`, which changes nothing."""

    def __init__(self, num_rows: int, width: int, device: torch.device, *, neutral: int) -> None:
        self.neutral_row = num_rows
        self._host_RW = torch.zeros(num_rows, width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device_RW = torch.full((num_rows + 1, width), neutral, dtype=torch.int32, device=device)
        self._index_R = torch.full((num_rows,), num_rows, device=device)
        """The row of each draw of the step that is drawn next."""
        self._rows_R = torch.arange(num_rows, device=device)
        self._num_placed: int | None = None
        """The number of draws in _index_R if all of them are late, each with the row of its index; None otherwise."""
        self._copying: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sent: Any = torch.cuda.Event() if self._copying is not None else None  # type: ignore[no-untyped-call]
        self._is_begun = self._is_fetching = False

    @property
    def host_rows(self) -> WordArray:
        """The host's buffer; waits until the device has read it, which it has once the step's tokens have come back."""
        if self._sent is not None:
            self._sent.synchronize()
        rows: WordArray = self._host_RW.numpy()
        return rows

    def begin(self) -> None:
        """Called before the forward pass of a step: rows sent from now on may replace the rows of earlier steps.

        All draws that read the earlier rows must have been launched.
        """
        if self._copying is not None:
            self._copying.wait_stream(torch.cuda.current_stream(self._device_RW.device))
        self._is_begun = True

    def send(self, num_rows: int) -> None:
        """Copy the first rows to the device; work that is launched after this call waits for the copy."""
        if not self._is_begun:
            self.begin()
        self._is_begun = False
        if self._copying is None:
            self._device_RW[:num_rows].copy_(self._host_RW[:num_rows])
            return
        with torch.cuda.stream(self._copying):
            self._device_RW[:num_rows].copy_(self._host_RW[:num_rows], non_blocking=True)
            self._sent.record()
        torch.cuda.current_stream(self._device_RW.device).wait_stream(self._copying)

    def fetch(self, num_rows: int) -> None:
        """Start to copy the first rows to the device, in a graph; `change` waits for them.

        After each replay of the graph, `note_replay` must be called.
        """
        if self._copying is None:
            self._device_RW[:num_rows].copy_(self._host_RW[:num_rows])
            return
        self._copying.wait_stream(torch.cuda.current_stream(self._device_RW.device))
        with torch.cuda.stream(self._copying):
            self._device_RW[:num_rows].copy_(self._host_RW[:num_rows], non_blocking=True)
        self._is_fetching = True

    def note_replay(self) -> None:
        """Note that a graph was launched which reads the host's buffer; `host_rows` waits for its end."""
        if self._sent is not None:
            self._sent.record()

    def place(self, num_draws: int, late_draws_K: Tensor, rows_K: Tensor | None = None) -> None:
        """Set which row changes each draw of the step that is drawn next; draws launched before keep their rows.

        The k-th late draw gets row k, the other draws get the neutral row. late_draws_K: ascending. rows_K: the row of
        each late draw, if these draws are only some of the step's.
        """
        num_late = len(late_draws_K)
        num_placed = num_draws if num_late == num_draws and rows_K is None else None
        if num_placed is not None and num_placed == self._num_placed:
            return  # it is written already
        self._num_placed = num_placed
        self._index_R.fill_(self.neutral_row)
        if num_placed is not None:  # one copy is enough
            self._index_R[:num_placed].copy_(self._rows_R[:num_placed])
        elif num_late:
            self._index_R[late_draws_K] = self._rows_R[:num_late] if rows_K is None else rows_K

    def change(self, logits_NV: Tensor) -> Tensor:
        """New logits, each draw's changed by its row. Device: no host sync; graph-safe."""
        if self._is_fetching:
            self._is_fetching = False
            torch.cuda.current_stream(self._device_RW.device).wait_stream(self._copying)
        return self._changed(logits_NV, self._device_RW, self._index_R[: len(logits_NV)])

    @abstractmethod
    def _changed(self, logits_NV: Tensor, rows_RW: Tensor, index_N: Tensor) -> Tensor:
        """The logits that `change` returns. rows_RW: on the device. index_N: each draw's row of rows_RW."""


@dataclass(frozen=True)
class LateKind:
    """The kind of late rows of an engine: W, and a function that makes room for a number of rows."""

    width: int
    make: Callable[[int], LateRows]
