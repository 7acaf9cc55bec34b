"""Triton kernels at the beginning and end of a decode step: gather the inputs of its rows, keep the sampled tokens; the
same for steps in which the device drafts.

Each is one launch in place of a dozen small ones. Legend: R rows of requests, N rows of the step, M blocks in a table
row, B rows with K drafts each, G tokens of a graph.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hookline.core.contracts import DecodeInputs, DraftingRows, RequestRows
from hookline.plugins.kernels.triton_launch import OF_STEP, cdiv, next_power_of_2

MOST_COLUMNS = 1024
"""Blocks of a table row that are copied at a time."""
KEPT_ROWS = 128
"""Rows of a program that keeps tokens."""


@triton.jit(do_not_specialize=["table_stride", "num_columns", "num_rows"], do_not_specialize_on_alignment=OF_STEP)
def _gather_decodes_kernel(
    rows_ptr, inputs_ptr, last_token_ptr, length_ptr, temperature_ptr, seed_ptr, table_ptr,
    token_out, position_out, context_out, table_out, slot_out, temperature_out, seed_out, draw_position_out,
    table_stride, num_columns, num_rows, IS_GIVEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    if IS_GIVEN:
        row = tl.load(inputs_ptr + 2 * num_rows + at)
        length = tl.load(inputs_ptr + num_rows + at).to(tl.int32) + 1
        token = tl.load(inputs_ptr + at)
        if token < 0:
            token = tl.load(last_token_ptr + row)
    else:
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
    return _gather(rows_N, None, requests)


def gather_tokens(inputs_3N: Tensor, requests: RequestRows) -> DecodeInputs:
    """See Kernels.gather_tokens. Device: one launch, no host sync; safe inside a CUDA graph."""
    assert inputs_3N.is_contiguous()
    return _gather(inputs_3N[2], inputs_3N, requests)


def _gather(rows_N: Tensor, inputs_3N: Tensor | None, requests: RequestRows) -> DecodeInputs:
    """`gather_tokens` of these inputs, or `gather_decodes` of these rows."""
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
            rows_N, inputs_3N, requests.last_token_R, requests.length_R, requests.temperature_R, requests.seed_R,
            requests.block_table_RM, token_ids_N, position_N, context_N, table_NM, slot_mapping_N, temperature_N,
            seed_N, draw_position_N, requests.block_table_RM.stride(0), num_columns, num_rows,
            IS_GIVEN=inputs_3N is not None, BLOCK_SIZE=requests.block_size,
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


@triton.jit(
    do_not_specialize=["num_rows", "num_drafts", "num_tokens", "vocab_size", "padding_row"],
    do_not_specialize_on_alignment=OF_STEP,
)
def _lay_out_drafts_kernel(
    rows_ptr, drafts_ptr, limit_ptr, last_token_ptr, length_ptr, inputs_ptr,
    num_rows, num_drafts, num_tokens, vocab_size, padding_row, PLACES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    count, row, length, token = 0, padding_row.to(tl.int64), 1, tl.zeros((PLACES,), tl.int64)
    if at < num_rows:
        row = tl.load(rows_ptr + at)
        length = tl.load(length_ptr + row)
        is_draft = (place > 0) & (place <= num_drafts)
        token = tl.load(drafts_ptr + at * num_drafts + place - 1, mask=is_draft, other=-1)
        is_missing = (place > 0) & ~((token >= 0) & (token < vocab_size))
        first_missing = tl.min(tl.where(is_missing, place, num_drafts + 1))
        count = tl.minimum(first_missing, tl.load(limit_ptr + row).to(tl.int32) - length)
        token = tl.where(place == 0, tl.load(last_token_ptr + row), token)
    is_used = place < count
    number = at * (1 + num_drafts) + place
    inside = (place <= num_drafts) & (number < num_tokens)
    tl.store(inputs_ptr + number, tl.where(is_used, token, 0), mask=inside)
    tl.store(inputs_ptr + num_tokens + number, tl.where(is_used, length - 1 + place, 0).to(tl.int64), mask=inside)
    tl.store(inputs_ptr + 2 * num_tokens + number, tl.where(is_used, row, padding_row), mask=inside)


@triton.jit(
    do_not_specialize=["num_drafts", "num_tokens", "padding_row", "pretended", "text_stride"],
    do_not_specialize_on_alignment=OF_STEP,
)
def _keep_drafts_kernel(
    rows_ptr, inputs_ptr, drawn_ptr, last_token_ptr, length_ptr, tokens_ptr, due_ptr, results_ptr,
    num_drafts, num_tokens, padding_row, pretended, text_stride, PRETENDS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + at)
    place = tl.arange(0, PLACES)
    first = at * (1 + num_drafts)
    inside = place <= num_drafts
    drawn = tl.load(drawn_ptr + first + place, mask=inside, other=0)
    owner = tl.load(inputs_ptr + 2 * num_tokens + first + place, mask=inside, other=-1)
    is_used = owner == row
    found = tl.maximum(tl.sum(is_used.to(tl.int32)) - 1, 0)
    if PRETENDS:
        due = tl.load(due_ptr + row) + pretended
        whole = tl.floor(due + 1e-4)
        tl.store(due_ptr + row, due - whole)
        kept = tl.minimum(whole.to(tl.int32), found)
    else:
        token = tl.load(inputs_ptr + first + place, mask=inside, other=-1)
        before = tl.load(drawn_ptr + first + place - 1, mask=inside & (place > 0), other=-2)
        is_wrong = (place > 0) & ~(is_used & (token == before))
        kept = tl.min(tl.where(is_wrong, place, num_drafts + 1)) - 1
    result = results_ptr + at * (3 + num_drafts)
    tl.store(result, found.to(tl.int64))
    tl.store(result + 1, kept.to(tl.int64))
    tl.store(result + 2 + place, drawn, mask=inside)
    if tl.load(inputs_ptr + 2 * num_tokens + first) != padding_row:
        length = tl.load(inputs_ptr + num_tokens + first).to(tl.int32) + 1
        known = tl.maximum(drawn, 0)
        tl.store(tokens_ptr + row * text_stride + length + place, known.to(tl.int32), mask=place <= kept)
        tl.store(length_ptr + row, length + 1 + kept)
        tl.store(last_token_ptr + row, tl.sum(tl.where(place == kept, known, 0)))
    if at == 0:
        tl.store(length_ptr + padding_row, 1)


def lay_out_drafts(
    rows_B: Tensor, drafts_BK: Tensor, drafting: DraftingRows, requests: RequestRows, inputs_3G: Tensor
) -> None:
    """See Kernels.lay_out_drafts. Device: one launch, no host sync; safe inside a CUDA graph."""
    num_rows, num_drafts = drafts_BK.shape
    num_tokens = inputs_3G.shape[1]
    assert rows_B.stride(0) == 1 and drafts_BK.is_contiguous() and inputs_3G.is_contiguous()
    _lay_out_drafts_kernel[(cdiv(num_tokens, 1 + num_drafts),)](
        rows_B, drafts_BK, drafting.limit_R, requests.last_token_R, requests.length_R, inputs_3G,
        num_rows, num_drafts, num_tokens, drafting.vocab_size, requests.padding_row,
        PLACES=next_power_of_2(1 + num_drafts), num_warps=1,
    )  # fmt: skip


def keep_drafts(
    rows_B: Tensor,
    inputs_3G: Tensor,
    drawn_G: Tensor,
    num_drafts: int,
    drafting: DraftingRows,
    requests: RequestRows,
) -> Tensor:
    """See Kernels.keep_drafts. Device: one launch, no host sync; safe inside a CUDA graph."""
    num_rows, pretended = len(rows_B), drafting.pretended_length
    assert rows_B.stride(0) == 1 and inputs_3G.is_contiguous() and drawn_G.stride(0) == 1
    results_X = torch.empty(num_rows * (3 + num_drafts), dtype=torch.int64, device=rows_B.device)
    if num_rows:
        _keep_drafts_kernel[(num_rows,)](
            rows_B, inputs_3G, drawn_G, requests.last_token_R, requests.length_R, drafting.tokens_RL, drafting.due_R,
            results_X, num_drafts, inputs_3G.shape[1], requests.padding_row,
            0.0 if pretended is None else pretended - 1, drafting.tokens_RL.stride(0), PRETENDS=pretended is not None,
            PLACES=next_power_of_2(1 + num_drafts), num_warps=1,
        )  # fmt: skip
    return results_X
