"""Triton products of a few tokens with their experts: limited by reading the weights once, not by arithmetic.

Pairs of a token and one of its experts are not grouped: each reads its expert's weights, which hardly any other pair
needs. Two launches do all, and the second asks for its weights while the first still runs (programmatic dependent
launch). Accumulation is float32. Weights in e4m3, int8 and int4 with scales are widened in registers.
Legend: T tokens, D hidden, F intermediate features, X experts, A experts of a token, P = T * A pairs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.products.triton_row_chunks import PIECE, load_chunk, load_piece_scales, piece_sums
from hookline.plugins.kernels.products.triton_scales import (
    Scales,
    blocks_of,
    expert_scaling_arguments,
    loadable,
    scaled_sums,
    scaling_constants,
)
from hookline.plugins.kernels.triton_activations import gelu_tanh
from hookline.plugins.kernels.triton_launch import cdiv, launch_options, next_power_of_2

MAX_TOKENS = 4
FEWEST_EXPERTS_A_PAIR = 4
"""Experts for each pair of several tokens from which on few pairs have the same expert."""
GATE_UP_ELEMENTS, DOWN_ELEMENTS = 16384, 32768
"""Elements of the weights that are in a program's registers at once."""
PLAIN_GATE_UP_ELEMENTS = 4096
"""As GATE_UP_ELEMENTS, of weights without scales: 8 of 256 experts of 512 at width 2,048 take both products 16.3 us in
place of 18.2 on an H200, 2 of 8 of 14,336 at width 4,096 161 in place of 169 (2026-11-29)."""
FEWEST_FOR_EIGHT_WARPS = 8192
"""Elements of an output's rows, of all a token's experts, above which eight warps are faster for the second product."""
CHUNK_OUTPUTS = 2
"""Outputs of a program of down in e4m3, whose warps take 256 columns of a chunk each."""
CHUNK_ELEMENTS, MOST_CHUNK_WARPS = 6144, 8
"""Inputs of an output, of all its token's experts, that a warp takes; and most warps."""


@triton.jit(do_not_specialize=["alpha", "limit", "num_pairs"])
def _few_gate_up_kernel(
    x_ptr, expert_ptr, weight_ptr, bias_ptr, out_ptr, x_stride, expert_stride, weight_stride, half_stride, bias_stride,
    num_chosen, depth, width, alpha, limit, shared_ptr, num_pairs,
    scale_ptr, zero_ptr, scale_stride, expert_scale_stride, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr,
    CLAMPED: tl.constexpr, GELU: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pairs, and behind them each token once, for an expert that all tokens share, if there is a shared_ptr.

    The programs of that expert come first, for they ask for its weights before the choice of the others is known.
    """
    pair = tl.program_id(1)
    if shared_ptr is not None:
        pair = tl.num_programs(1) - 1 - pair
    elif PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: the next kernel reads which experts there are ahead of its wait
    out, column = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_D)
    stored = tl.arange(0, BLOCK_D // PACKED)
    outs, columns = out < width, column < depth
    inside = outs[:, None] & (stored * PACKED < depth)[None, :]
    token = (pair // num_chosen).to(tl.int64)
    expert = token * 0
    if shared_ptr is None:
        expert = tl.load(expert_ptr + pair).to(tl.int64)
        matrix_ptr = weight_ptr + expert * expert_stride
    else:
        matrix_ptr = shared_ptr
        if pair < num_pairs:
            if PDL:
                gdc_wait()
                gdc_launch_dependents()
            expert = tl.load(expert_ptr + pair).to(tl.int64)
            matrix_ptr = weight_ptr + expert * expert_stride
        else:
            token = (pair - num_pairs).to(tl.int64)
    gate_at = matrix_ptr + out[:, None].to(tl.int64) * weight_stride + stored[None, :]
    gate_weight = tl.load(gate_at, mask=inside, other=0.0)
    up_weight = tl.load(gate_at + half_stride, mask=inside, other=0.0)
    if PDL:
        if shared_ptr is not None:  # once more, of those that have waited
            gdc_wait()
            gdc_launch_dependents()
    x = tl.load(x_ptr + token * x_stride + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    if SCALE_ROWS:
        scale_at = scale_ptr + expert * expert_scale_stride
        zero_at = zero_ptr if zero_ptr is None else zero_ptr + expert * expert_scale_stride
        scale, zero = blocks_of(
            scale_at, zero_at, scale_stride, out, outs, depth, SCALE_ROWS, SCALE_COLUMNS, BLOCKS
        )  # fmt: skip
        gate = scaled_sums(gate_weight, x, scale, zero, PACKED, BLOCKS)
        scale, zero = blocks_of(
            scale_at, zero_at, scale_stride, out + width, outs, depth, SCALE_ROWS, SCALE_COLUMNS, BLOCKS
        )  # fmt: skip
        up = scaled_sums(up_weight, x, scale, zero, PACKED, BLOCKS)
    else:
        gate = tl.sum(gate_weight.to(tl.float32) * x, axis=1)
        up = tl.sum(up_weight.to(tl.float32) * x, axis=1)
    if CLAMPED:
        bias_at = bias_ptr + expert * bias_stride + out
        gate = tl.minimum(gate + tl.load(bias_at, mask=outs, other=0.0).to(tl.float32), limit)
        up += tl.load(bias_at + width, mask=outs, other=0.0).to(tl.float32)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
    y = (gelu_tanh(gate) if GELU else gate / (1.0 + tl.exp(-alpha * gate))) * up
    tl.store(out_ptr + pair * width + out, y.to(out_ptr.dtype.element_ty), mask=outs)


@triton.jit
def _few_down_kernel(
    hidden_ptr, expert_ptr, pair_weight_ptr, weight_ptr, bias_ptr, out_ptr, expert_stride, weight_stride, bias_stride,
    depth, width, shared_ptr, gate_ptr, gate_stride, CHOSEN: tl.constexpr, BIAS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One output of a token: a row of each of its experts' matrices, in chunks of columns."""
    if PDL:
        gdc_launch_dependents()
    out, token = tl.program_id(0), tl.program_id(1)
    place, column = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_C)
    places, pair = place < CHOSEN, token * CHOSEN + place
    # Routing was over when the kernel before this one let it start; it is read past the L1.
    expert = tl.load(expert_ptr + pair, mask=places, other=0, cache_modifier=".cg").to(tl.int64)
    pair_weight = tl.load(pair_weight_ptr + pair, mask=places, other=0.0, cache_modifier=".cg")
    in_matrix = out.to(tl.int64) * weight_stride
    weight_at = weight_ptr + (expert * expert_stride + in_matrix)[:, None] + column[None, :]
    weights = ()
    shared_weights = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK_C + column < depth
        weight = tl.load(weight_at + chunk * BLOCK_C, mask=places[:, None] & columns[None, :], other=0.0)
        weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
        if shared_ptr is not None:
            weight = tl.load(shared_ptr + in_matrix + chunk * BLOCK_C + column, mask=columns, other=0.0)
            shared_weights = shared_weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    if BIAS:
        bias = tl.load(bias_ptr + expert * bias_stride + out, mask=places, other=0.0).to(tl.float32)
    if shared_ptr is not None:  # the router's product has its gate
        gate = tl.load(gate_ptr + token * gate_stride, cache_modifier=".cg").to(tl.float32)
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_A, BLOCK_C], tl.float32)
    shared_sums = tl.zeros([BLOCK_C], tl.float32)
    shared_hidden_ptr = hidden_ptr + (tl.num_programs(1) * CHOSEN + token) * depth
    for chunk in tl.static_range(CHUNKS):
        at = chunk * BLOCK_C + column
        hidden_at = hidden_ptr + pair[:, None] * depth + at[None, :]
        hidden = tl.load(hidden_at, mask=places[:, None] & (at < depth)[None, :], other=0.0)
        sums += weights[chunk].to(tl.float32) * hidden.to(tl.float32)
        if shared_ptr is not None:
            hidden = tl.load(shared_hidden_ptr + at, mask=at < depth, other=0.0)
            shared_sums += shared_weights[chunk].to(tl.float32) * hidden.to(tl.float32)
    y = tl.sum(sums, axis=1)
    if BIAS:
        y += bias
    total = tl.sum(y * pair_weight, axis=0)
    if shared_ptr is not None:
        total += tl.sum(shared_sums, axis=0) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * width + out, total.to(out_ptr.dtype.element_ty))


@triton.jit
def _few_scaled_down_kernel(
    hidden_ptr, expert_ptr, pair_weight_ptr, weight_ptr, out_ptr, expert_stride, weight_stride, depth, width,
    scale_ptr, zero_ptr, scale_stride, expert_scale_stride, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As _few_down_kernel, for a weight with scales: a program's rows are outputs, each of one of a token's experts."""
    row = tl.arange(0, BLOCK_A * BLOCK_O)
    place, out = row // BLOCK_O, tl.program_id(0) * BLOCK_O + row % BLOCK_O
    column, stored = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_F // PACKED)
    pair = tl.program_id(1) * CHOSEN + place
    rows = (place < CHOSEN) & (out < width)
    expert = tl.load(expert_ptr + pair, mask=rows, other=0, cache_modifier=".cg").to(tl.int64)
    pair_weight = tl.load(pair_weight_ptr + pair, mask=rows, other=0.0, cache_modifier=".cg")
    weight_at = weight_ptr + (expert * expert_stride + out.to(tl.int64) * weight_stride)[:, None] + stored[None, :]
    weight = tl.load(weight_at, mask=rows[:, None] & (stored * PACKED < depth)[None, :], other=0.0)
    # The scales of all experts are the rows of one matrix, expert after expert.
    first_block = expert * (expert_scale_stride // scale_stride) * SCALE_ROWS
    scale, zero = blocks_of(
        scale_ptr, zero_ptr, scale_stride, first_block + out, rows, depth, SCALE_ROWS, SCALE_COLUMNS, BLOCKS
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    hidden_at = hidden_ptr + pair[:, None] * depth + column[None, :]
    hidden = tl.load(hidden_at, mask=rows[:, None] & (column < depth)[None, :], other=0.0).to(tl.float32)
    y = scaled_sums(weight, hidden, scale, zero, PACKED, BLOCKS) * pair_weight
    total = tl.sum(tl.reshape(y, [BLOCK_A, BLOCK_O]), axis=0)
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    tl.store(out_ptr + tl.program_id(1) * width + out, total.to(out_ptr.dtype.element_ty), mask=out < width)


@triton.jit
def _few_chunked_down_kernel(
    hidden_ptr, expert_ptr, pair_weight_ptr, weight_ptr, out_ptr, expert_stride, weight_stride, depth, width,
    scale_ptr, scale_stride, expert_scale_stride, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As _few_down_kernel, for a weight in e4m3: a thread adds up its products for all the token's experts."""
    token = tl.program_id(1)
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = tl.where(out < width, out, 0)
    weights = ()
    scales = ()
    for place in tl.static_range(CHOSEN):
        # Routing was over when the kernel before this one let it start; it is read past the L1.
        expert = tl.load(expert_ptr + token * CHOSEN + place, cache_modifier=".cg").to(tl.int64)
        pair_weight = tl.load(pair_weight_ptr + token * CHOSEN + place, cache_modifier=".cg")
        weight_at, scale_at = weight_ptr + expert * expert_stride, scale_ptr + expert * expert_scale_stride
        if not SCALE_COLUMNS:
            scale = tl.load(scale_at + row // SCALE_ROWS * scale_stride)[:, None] * pair_weight
        for chunk in tl.static_range(CHUNKS):
            weight = load_chunk(weight_at, row, chunk * BLOCK_C, depth, weight_stride, BLOCK_C, EVEN)
            weights = weights + (weight,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
            if SCALE_COLUMNS:
                scale = pair_weight * load_piece_scales(
                    scale_at, row // SCALE_ROWS, chunk * BLOCK_C, depth, scale_stride, SCALE_COLUMNS, BLOCK_C
                )  # fmt: skip
            scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_O, BLOCK_C // 8], tl.float32)
    for place in tl.static_range(CHOSEN):
        for chunk in tl.static_range(CHUNKS):
            column = chunk * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            hidden_at = hidden_ptr + (token * CHOSEN + place) * depth + column
            if EVEN:
                hidden = tl.load(hidden_at)
            else:
                hidden = tl.load(hidden_at, mask=column < depth, other=0.0)
            sums += piece_sums(weights[place * CHUNKS + chunk], hidden) * scales[place * CHUNKS + chunk]
    total = tl.sum(sums, axis=1)
    tl.store(out_ptr + token * width + out, total.to(out_ptr.dtype.element_ty), mask=out < width)


def fits(expert_TA: Tensor, num_experts: int) -> bool:
    """Whether there are few enough tokens for `few_expert_mlp`, which reads an expert's weights for each pair.

    Device: looks at shapes only, so a captured graph keeps its answer.
    """
    num_tokens, num_pairs = len(expert_TA), expert_TA.numel()
    return num_tokens == 1 or (0 < num_tokens <= MAX_TOKENS and num_pairs * FEWEST_EXPERTS_A_PAIR <= num_experts)


def is_alike(shared_gate_up_FD: Tensor, shared_down_DF: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> bool:
    """Whether an expert that all tokens share has the sizes of the others, and lies in memory as each of them does."""
    pairs = (shared_gate_up_FD, gate_up_XFD), (shared_down_DF, down_XDF)
    return all((one.shape, one.stride()) == (many.shape[1:], many.stride()[1:]) for one, many in pairs)


def few_expert_mlp(
    x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
    *, gate_up_bias_XF: Tensor | None = None, down_bias_XD: Tensor | None = None, alpha: float = 1.0,
    limit: float = 0.0, scales: tuple[Scales, Scales] | None = None, gelu: bool = False,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Kernels.expert_mlp, gelu_expert_mlp, or clamped_expert_mlp if there is a gate_up_bias_XF, for tokens that `fits`.

    scales: of both weights, which are then as ScaledWeight has them, and go without biases. shared: both weights of an
    expert that `is_alike`, and its gate, as Kernels.shared_expert_mlp has them; for plain weights alone.
    Device: two launches, no host sync. The weights of the second product and the routing are read before the launch
    before has finished: it must not write them.
    """
    (num_tokens, hidden), num_chosen = x_TD.shape, expert_TA.shape[1]
    inner = gate_up_XFD.shape[1] // 2
    gate_up_scales, down_scales = scales or (None, None)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    expert_TA, weight_TA = expert_TA.contiguous(), weight_TA.contiguous()
    assert gate_up_XFD.stride(2) == 1 and down_XDF.stride(2) == 1
    gate_up_XFD, down_XDF = (one if scales is None else loadable(one) for one in (gate_up_XFD, down_XDF))
    options = launch_options(x_TD.device)
    assert shared is None or scales is None
    shared_FD, shared_DF, gate_T1 = shared or (None, None, None)
    num_pairs = num_tokens * num_chosen
    num_rows = num_pairs + (num_tokens if shared else 0)
    hidden_PF = torch.empty((num_rows, inner), dtype=x_TD.dtype, device=x_TD.device)
    bias_XF = gate_up_XFD if gate_up_bias_XF is None else gate_up_bias_XF
    block_d, block_f = (
        max(next_power_of_2(size), one.columns if one else 0)
        for size, one in ((hidden, gate_up_scales), (inner, down_scales))
    )
    block_o = max(1, (PLAIN_GATE_UP_ELEMENTS if scales is None else GATE_UP_ELEMENTS) // (2 * block_d))
    _few_gate_up_kernel[(cdiv(inner, block_o), num_rows)](
        x_TD, expert_TA, gate_up_XFD, bias_XF, hidden_PF, x_TD.stride(0), gate_up_XFD.stride(0),
        gate_up_XFD.stride(1), inner * gate_up_XFD.stride(1), bias_XF.stride(0), num_chosen, hidden, inner,
        float(alpha), float(limit), shared_FD, num_pairs,
        *expert_scaling_arguments(gate_up_scales), **_constants(gate_up_scales, block_d),
        CLAMPED=gate_up_bias_XF is not None, GELU=gelu, BLOCK_O=block_o, BLOCK_D=block_d, num_warps=4, **options,
    )  # fmt: skip
    out_TD = torch.empty((num_tokens, hidden), dtype=x_TD.dtype, device=x_TD.device)
    bias_XD = down_XDF if down_bias_XD is None else down_bias_XD
    block_a = next_power_of_2(num_chosen)
    if down_scales is not None:
        block_o = max(1, DOWN_ELEMENTS // (block_a * block_f))
        assert gate_up_bias_XF is None and down_bias_XD is None
        num_warps = next_power_of_2(cdiv(num_chosen * inner, CHUNK_ELEMENTS))
        is_e4m3 = down_XDF.dtype in (torch.float8_e4m3fn, torch.uint8) and down_scales.packed == 1
        if is_e4m3 and num_warps <= MOST_CHUNK_WARPS and inner % PIECE == 0:
            block_c = 256 * num_warps
            _few_chunked_down_kernel[(cdiv(hidden, CHUNK_OUTPUTS), num_tokens)](
                hidden_PF, expert_TA, weight_TA, down_XDF, out_TD, down_XDF.stride(0), down_XDF.stride(1), inner,
                hidden, down_scales.factors_RC, down_scales.factors_RC.stride(1), down_scales.factors_RC.stride(0),
                SCALE_ROWS=down_scales.rows, SCALE_COLUMNS=down_scales.columns, CHOSEN=num_chosen,
                CHUNKS=cdiv(inner, block_c), BLOCK_O=CHUNK_OUTPUTS, BLOCK_C=block_c, EVEN=inner % block_c == 0,
                num_warps=num_warps, **options,
            )  # fmt: skip
            return out_TD
        _few_scaled_down_kernel[(cdiv(hidden, block_o), num_tokens)](
            hidden_PF, expert_TA, weight_TA, down_XDF, out_TD, down_XDF.stride(0), down_XDF.stride(1), inner, hidden,
            *expert_scaling_arguments(down_scales), **_constants(down_scales, block_f), CHOSEN=num_chosen,
            BLOCK_A=block_a, BLOCK_O=block_o, BLOCK_F=block_f, num_warps=8, **options,
        )  # fmt: skip
        return out_TD
    block_c, num_warps = _down_tiling(block_a, inner)
    _few_down_kernel[(hidden, num_tokens)](
        hidden_PF, expert_TA, weight_TA, down_XDF, bias_XD, out_TD, down_XDF.stride(0), down_XDF.stride(1),
        bias_XD.stride(0), inner, hidden, shared_DF, gate_T1, None if gate_T1 is None else gate_T1.stride(0),
        CHOSEN=num_chosen, BIAS=down_bias_XD is not None, CHUNKS=cdiv(inner, block_c), BLOCK_A=block_a,
        BLOCK_C=block_c, num_warps=num_warps, **options,
    )  # fmt: skip
    return out_TD


def _down_tiling(places: int, inner: int) -> tuple[int, int]:
    """Columns of a chunk and warps of the second product of plain weights: the fastest on an H200 (docs/log).

    Few places have longer chunks, so that a thread reads 16 bytes at a time.
    """
    row = next_power_of_2(inner)
    if inner < row and places * inner <= FEWEST_FOR_EIGHT_WARPS:
        return min(row, max(128, 1024 // places)), 4
    return min(row, max(256, 2048 // places) if places < 4 else 256), 8


def _constants(scales: Scales | None, block: int) -> dict[str, Any]:
    """Compile-time constants of a kernel that reads `block` inputs of each row at a time."""
    columns = 0 if scales is None else scales.columns
    return {**scaling_constants(scales), "BLOCKS": block // columns if columns else 1}
