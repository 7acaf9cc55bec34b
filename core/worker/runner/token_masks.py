"""The masks of a step's draws on their way to the device, and the logits with what they forbid.

One buffer on the host and one on the device, both at fixed addresses, so that captured graphs read them; allocated when
a step first needs them. What the masks hold comes from the host: core/requests/structured_output.py. They are copied on
a stream of their own: beside the forward pass of an eager step, beside the computation of logits in a graph.
Legend: N draws, V vocabulary, R rows of the request table, W int32 words of a mask (bit t % 32 of word t // 32 is token
t), X = 4 W bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import Kernels
from hookline.core.util.arrays import MaskArray


class TokenMasks:
    """Masks for at most `num_rows` draws, and one more on the device that allows everything."""

    def __init__(self, num_rows: int, num_words: int, kernels: Kernels, device: torch.device) -> None:
        self.unmasked_row, self._kernels = num_rows, kernels
        self._host_RW = torch.zeros(num_rows, num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device_RW = torch.full((num_rows + 1, num_words), -1, dtype=torch.int32, device=device)
        self._rows_R = torch.arange(num_rows, device=device)
        self._copying: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sent: Any = torch.cuda.Event() if self._copying is not None else None  # type: ignore[no-untyped-call]
        self._is_begun = self._is_fetching = False

    @property
    def host_rows(self) -> MaskArray:
        """The host's buffer; waits until the device has read it, which long is over where tokens came back."""
        if self._sent is not None:
            self._sent.synchronize()
        rows: MaskArray = self._host_RW.numpy()
        return rows

    def begin(self) -> None:
        """Called before the forward pass of a step: masks that come from now on may replace those of earlier steps.

        All draws that read these must have been launched.
        """
        if self._copying is not None:
            self._copying.wait_stream(torch.cuda.current_stream(self._device_RW.device))
        self._is_begun = True

    def send(self, num_rows: int) -> None:
        """Copy the first rows to the device; what is launched from now on comes after that."""
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
        """Start to copy the first rows to the device, in a graph; `forbid` waits for them.

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

    def index(self, num_draws: int, masked_draws_K: Tensor, masks_K: Tensor | None = None) -> Tensor:
        """The row that masks each draw: k for the k-th of the masked ones, one that forbids nothing for the others.

        masks_K: on the device, of each masked draw the row, where they are some of a step's.
        """
        index_N = torch.empty(num_draws, dtype=torch.int64, device=self._device_RW.device)
        if masks_K is None:
            self.write_index(index_N, num_draws, masked_draws_K)
        else:
            index_N.fill_(self.unmasked_row)[masked_draws_K] = masks_K
        return index_N

    def write_index(self, index_G: Tensor, num_draws: int, masked_draws_K: Tensor) -> None:
        """Write `index` into a tensor that a graph reads, which may have further rows. masked_draws_K: ascending.

        Mostly either all draws of a step have masks or few have; if all have, one copy is enough.
        """
        num_masked = len(masked_draws_K)
        num_written = num_masked if num_masked == num_draws else 0
        index_G[:num_written].copy_(self._rows_R[:num_written])
        if num_written < len(index_G):
            index_G[num_written:].fill_(self.unmasked_row)
        if num_written < num_masked:
            index_G[masked_draws_K] = self._rows_R[:num_masked]

    def forbid(self, logits_NV: Tensor, index_N: Tensor) -> Tensor:
        """The logits, with -inf for each token that a draw's mask does not allow. Device: no host sync; graph-safe."""
        if self._is_fetching:
            self._is_fetching = False
            torch.cuda.current_stream(self._device_RW.device).wait_stream(self._copying)
        return self._kernels.mask_logits(logits_NV, self._device_RW, index_N)
