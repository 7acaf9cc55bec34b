"""Penalties on a GPU: count a row's tokens where they stand, then change its logits in one pass.

Legend: N rows, V vocabulary, R rows of the table, L tokens of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.core.contracts import LogitsRows

STRETCH = 4096
TOKENS = 1024
"""Tokens of a request that one program counts."""


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "prompt_lens"])
def _count(tokens, row_stride, rows, positions, prompt_lens, counts, num_tokens, TOKENS: tl.constexpr):
    """Each token's occurrences in the output, and bit 30 if it is in the prompt."""
    row = tl.program_id(0)
    places = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_known = places < tl.load(positions + row)
    is_prompt = places < tl.load(prompt_lens + row)
    token = tl.load(tokens + tl.load(rows + row) * row_stride + places, mask=is_known, other=0)
    at = counts + row.to(tl.int64) * num_tokens + token
    tl.atomic_or(at, 1 << 30, mask=is_known & is_prompt, sem="relaxed")
    tl.atomic_add(at, 1, mask=is_known & (places >= tl.load(prompt_lens + row)), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["repetitions", "presences", "frequencies"])
def _apply(logits, row_stride, counts, repetitions, presences, frequencies, num_tokens, STRETCH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    is_token = columns < num_tokens
    count = tl.load(counts + row * num_tokens + columns, mask=is_token, other=0)
    is_seen = count > 0
    at = logits + row * row_stride + columns
    value = tl.load(at, mask=is_seen, other=0.0)
    repetition = tl.load(repetitions + row)
    value = tl.where(value > 0, value / repetition, value * repetition)
    num_outputs = count & ((1 << 30) - 1)
    value -= tl.load(frequencies + row) * num_outputs.to(tl.float32)
    value -= tl.where(num_outputs > 0, tl.load(presences + row), 0.0)
    tl.store(at, value, mask=is_seen)


def penalize(logits_NV: Tensor, rows: LogitsRows) -> Tensor:
    """`Penalties.process`, in place. Device: no host sync; safe inside a CUDA graph."""
    assert rows.tokens_RL is not None and rows.num_prompt_tokens_N is not None
    num_rows, num_tokens = logits_NV.shape
    counts_NV = torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=logits_NV.device)
    _count[(num_rows, triton.cdiv(rows.max_num_tokens, TOKENS))](
        rows.tokens_RL,
        rows.tokens_RL.stride(0),
        rows.rows_N,
        rows.sampling.position_N,
        rows.num_prompt_tokens_N,
        counts_NV,
        num_tokens,
        TOKENS=TOKENS,
    )
    _apply[(num_rows, triton.cdiv(num_tokens, STRETCH))](
        logits_NV,
        logits_NV.stride(0),
        counts_NV,
        rows.columns["repetition_penalty"],
        rows.columns["presence_penalty"],
        rows.columns["frequency_penalty"],
        num_tokens,
        STRETCH=STRETCH,
        num_warps=8,
    )
    return logits_NV
