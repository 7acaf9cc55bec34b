"""Adds to the logits of the tokens that are green behind the last one. Legend: N rows, V vocabulary, L tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.core.contracts import LogitsProcessor, LogitsRows, ProcessorSpec
from hookline_watermark import BITS, MULTIPLIER, SHIFT


class Watermark(LogitsProcessor):
    """All tokens of all rows are looked at on the device; nothing is kept of a request."""

    reads_tokens = True

    def __init__(self, spec: ProcessorSpec) -> None:
        self.ids_V = torch.arange(spec.vocab_size, device=spec.device)

    def process(self, logits_NV: Tensor, rows: LogitsRows) -> Tensor:
        """See LogitsProcessor."""
        assert rows.tokens_RL is not None
        last_N = (rows.sampling.position_N - 1).clamp(min=0)
        previous_N = rows.tokens_RL[rows.rows_N, last_N].long()
        hash_NV = mixed(mixed(previous_N ^ rows.columns["key"]).unsqueeze(1) ^ self.ids_V)
        is_green_NV = hash_NV < rows.columns["gamma"].double().unsqueeze(1) * (BITS + 1)
        return logits_NV.add_(is_green_NV * rows.columns["delta"].unsqueeze(1))


def mixed(numbers: Tensor) -> Tensor:
    """`hookline_watermark.mixed` of int64 numbers below 2**32; products wrap, and their low 32 bits are right."""
    for _ in range(3):
        numbers = (numbers * MULTIPLIER) & BITS
        numbers = numbers ^ (numbers >> SHIFT)
    return numbers
