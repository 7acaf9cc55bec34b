"""Conditions of copy engines on a product's operands; importable without Triton."""

from __future__ import annotations

from torch import Tensor


def has_aligned_rows(operand_RD: Tensor) -> bool:
    """Whether rows lie one behind the other, each without gaps and from a multiple of 16 bytes on.

    Device: looks at shape, strides and address only, so a captured graph keeps its answer.
    """
    row_stride, stride = operand_RD.stride()
    is_whole = stride == 1 and row_stride >= operand_RD.shape[1]
    return is_whole and row_stride * operand_RD.element_size() % 16 == 0 and operand_RD.data_ptr() % 16 == 0
