"""Triton kernels at the beginning and end of a decode step: gather the inputs of its rows, keep the sampled tokens.

Each is one launch in place of a dozen small ones. Legend: R rows of requests, N rows of the step, M blocks in a table
row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.core.contracts import DecodeInputs, RequestRows
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, next_power_of_2

MOST_COLUMNS = 1024
"""Blocks of a table row that are copied at a time."""
KEPT_ROWS = 128
"""Rows of a program that keeps tokens."""


@triton.jit(do_not_specialize=["table_stride", "num_columns"], do_not_specialize_on_alignment=OF_STEP)
def _gather_decodes_kernel(
    rows_ptr, last_token_ptr, length_ptr, temperature_ptr, seed_ptr, table_ptr,
    token_out, position_out, context_out, table_out, slot_out, temperature_out, seed_out, draw_position_out,
    table_stride, num_columns, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + at)
    length = tl.load(length_ptr + row)
    token = tl.load(last_token_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    seed = tl.load(seed_ptr + row)
    row_ptr = table_ptr + row * table_stride
    column = tl.arange(0, COLUMNS)
    for first in range(0, num_columns, COLUMNS):
        inside = first + column < num_columns
        blocks = tl.load(row_ptr + first + column, mask=inside, other=0)
        tl.store(table_out + at * num_columns + first + column, blocks, mask=inside)
    position = length - 1
    block = tl.load(row_ptr + position // BLOCK_SIZE).to(tl.int64)
    tl.store(token_out + at, token)
    tl.store(position_out + at, position.to(tl.int64))
    tl.store(context_out + at, length)
    tl.store(slot_out + at, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(temperature_out + at, temperature)
    tl.store(seed_out + at, seed)
    tl.store(draw_position_out + at, length.to(tl.int64))


@triton.jit(
    do_not_specialize=["num_rows", "token_stride", "padding_row"],
    do_not_specialize_on_alignment=(*OF_STEP, "tokens_ptr", "position_ptr"),
)
def _keep_tokens_kernel(
    rows_ptr, tokens_ptr, position_ptr, last_token_ptr, length_ptr, num_rows, token_stride, padding_row,
    ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < num_rows
    row = tl.load(rows_ptr + at, mask=inside, other=0)
    token = tl.load(tokens_ptr + at.to(tl.int64) * token_stride, mask=inside, other=0)
    position = tl.load(position_ptr + at, mask=inside, other=0)
    tl.store(last_token_ptr + row, tl.maximum(token, 0), mask=inside)
    tl.store(length_ptr + row, tl.where(row == padding_row, 1, position + 1).to(tl.int32), mask=inside)


def gather_decodes(rows_N: Tensor, requests: RequestRows) -> DecodeInputs:
    """See Kernels.gather_decodes. Device: one launch, no host sync; safe inside a CUDA graph."""
    num_rows, num_columns = rows_N.shape[0], requests.block_table_RM.shape[1]
    device = rows_N.device
    token_ids_N, position_N, slot_mapping_N, seed_N, draw_position_N = (
        torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(5)
    )
    context_N = torch.empty(num_rows, dtype=torch.int32, device=device)
    temperature_N = torch.empty(num_rows, dtype=torch.float32, device=device)
    table_NM = torch.empty((num_rows, num_columns), dtype=torch.int32, device=device)
    assert requests.block_table_RM.stride(1) == 1 and rows_N.stride(0) == 1
    if num_rows:
        _gather_decodes_kernel[(num_rows,)](
            rows_N, requests.last_token_R, requests.length_R, requests.temperature_R, requests.seed_R,
            requests.block_table_RM, token_ids_N, position_N, context_N, table_NM, slot_mapping_N, temperature_N,
            seed_N, draw_position_N, requests.block_table_RM.stride(0), num_columns, BLOCK_SIZE=requests.block_size,
            COLUMNS=min(MOST_COLUMNS, next_power_of_2(num_columns)), num_warps=1,
        )  # fmt: skip
    return DecodeInputs(
        token_ids_N, position_N, context_N, table_NM, slot_mapping_N, temperature_N, seed_N, draw_position_N
    )


def keep_tokens(rows_N: Tensor, tokens_N: Tensor, draw_position_N: Tensor, requests: RequestRows) -> None:
    """See Kernels.keep_tokens. Device: one launch, no host sync; safe inside a CUDA graph."""
    num_rows = rows_N.shape[0]
    assert rows_N.stride(0) == 1 and draw_position_N.stride(0) == 1
    if num_rows:
        _keep_tokens_kernel[(cdiv(num_rows, KEPT_ROWS),)](
            rows_N, tokens_N, draw_position_N, requests.last_token_R, requests.length_R, num_rows, tokens_N.stride(0),
            requests.padding_row, ROWS=KEPT_ROWS, num_warps=4,
        )  # fmt: skip
