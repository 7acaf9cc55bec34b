"""A Triton kernel that forbids tokens by masks of bits, as grammars make them: logits are read once and written once.

Legend: N rows, V vocabulary, R masks, W int32 words of a mask (bit t % 32 of word t // 32 is token t's).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.plugins.kernels.triton_launch import cdiv

TOKENS = 4096
"""Tokens of a program."""


@triton.jit(do_not_specialize=["num_words"])
def _mask_logits_kernel(
    logits_ptr, masks_ptr, index_ptr, out_ptr, row_stride, num_tokens, num_words, TOKENS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    mask_ptr = masks_ptr + tl.load(index_ptr + row) * num_words
    word = tl.load(mask_ptr + token // 32, mask=inside, other=0)
    logits = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0)
    is_allowed = ((word >> (token % 32)) & 1) != 0
    logits = tl.where(is_allowed, logits, -float("inf")).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_tokens + token, logits, mask=inside)


def mask_logits(logits_NV: Tensor, masks_RW: Tensor, index_N: Tensor) -> Tensor:
    """New logits (N, V), with -inf for each token that the mask of its row forbids.

    Shapes: logits_NV with contiguous rows; masks_RW (R, W) int32, contiguous; index_N (N,) int64, the mask of each row.
    Device: one launch, no host sync; safe inside a CUDA graph.
    """
    num_rows, num_tokens = logits_NV.shape
    out_NV = torch.empty((num_rows, num_tokens), dtype=logits_NV.dtype, device=logits_NV.device)
    if num_rows:
        _mask_logits_kernel[(num_rows, cdiv(num_tokens, TOKENS))](
            logits_NV, masks_RW, index_N, out_NV, logits_NV.stride(0), num_tokens, masks_RW.stride(0), TOKENS=TOKENS,
            num_warps=4,
        )  # fmt: skip
    return out_NV
