"""The late rows of requests for structured outputs: masks of the tokens that may be drawn.

Legend: as in core/worker/runner/late_rows.py; bit t % 32 of word t // 32 of a mask is token t.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hookline.core.contracts import Kernels
from hookline.core.util.arrays import num_mask_words
from hookline.core.worker.runner.late_rows import LateKind, LateRows


class TokenMasks(LateRows):
    """Masks for at most `num_rows` draws; the neutral one allows every token."""

    def __init__(self, num_rows: int, num_words: int, kernels: Kernels, device: torch.device) -> None:
        super().__init__(num_rows, num_words, device, neutral=-1)
        self._kernels = kernels

    def _changed(self, logits_NV: Tensor, rows_RW: Tensor, index_N: Tensor) -> Tensor:
        """The logits, with -inf for each token that a draw's mask does not allow."""
        return self._kernels.mask_logits(logits_NV, rows_RW, index_N)


def token_masks(vocab_size: int, kernels: Kernels, device: torch.device) -> LateKind:
    """Masks as the late rows of an engine."""
    num_words = num_mask_words(vocab_size)
    return LateKind(num_words, partial(TokenMasks, num_words=num_words, kernels=kernels, device=device))
