"""Triton kernels of gates: SiLU·mul and GELU·mul of the halves of a product, sigmoids, and gates of the delta rule.

Each reads its input once and writes its output once; arithmetic is float32, results are rounded once to the input's
dtype. Legend: T tokens, D features, F half of gate and up, G features or 1, H heads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hookline.plugins.kernels.triton_activations import gelu_tanh
from hookline.plugins.kernels.triton_launch import cdiv, launch_options

COLUMNS = 1024
"""Columns per program."""
FEW_COLUMNS = 256
"""Values per program where a token has few."""


@triton.jit
def _halves(gate_up_ptr, row_stride, width, BLOCK: tl.constexpr):
    """Some columns of a row's halves in float32; also the row, the columns, and which of these there are."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    return gate, up, row, column, inside


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate, up, row, column, inside = _halves(gate_up_ptr, row_stride, width, BLOCK)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_tanh_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate, up, row, column, inside = _halves(gate_up_ptr, row_stride, width, BLOCK)
    tl.store(out_ptr + row * width + column, (gelu_tanh(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_mul(gate_up_TF: Tensor, *, gelu: bool = False) -> Tensor:
    """silu(first half) * second half along the last dimension; with `gelu`, gelu in its tanh form of the first.

    Shapes: (T, 2F) -> (T, F).
    Device: one launch, no host sync.
    Source: Shazeer 2020, arXiv:2002.05202; Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    width = gate_up_TF.shape[-1] // 2
    rows_TF = gate_up_TF.reshape(-1, 2 * width)
    out_TF = torch.empty((*gate_up_TF.shape[:-1], width), dtype=gate_up_TF.dtype, device=gate_up_TF.device)
    if out_TF.numel():
        kernel: Any = _gelu_tanh_mul_kernel if gelu else _silu_mul_kernel
        kernel[(len(rows_TF), cdiv(width, COLUMNS))](
            rows_TF, out_TF, rows_TF.stride(0), width, BLOCK=COLUMNS, num_warps=4, **launch_options(out_TF.device)
        )  # fmt: skip
    return out_TF


@triton.jit
def _sigmoid_mul_kernel(
    x_ptr, gate_ptr, added_ptr, out_ptr, x_stride, gate_stride, added_stride, width,
    IS_ONE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if IS_ONE:
        gate = tl.load(gate_ptr + row * gate_stride).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = x / (1.0 + tl.exp(-gate))
    if ADD:
        out += tl.load(added_ptr + row * added_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def sigmoid_mul(x_TD: Tensor, gate_TG: Tensor, added_TD: Tensor | None = None) -> Tensor:
    """The product x * sigmoid(gate), plus `added` if any.

    Shapes: (T, D); gate_TG (T, D) or (T, 1).
    Device: one launch, no host sync.
    """
    num_rows, width = x_TD.shape
    added = x_TD if added_TD is None else added_TD
    x_TD, gate_TG, added = (one if one.stride(1) == 1 else one.contiguous() for one in (x_TD, gate_TG, added))
    out_TD = torch.empty((num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    if out_TD.numel():
        _sigmoid_mul_kernel[(num_rows, cdiv(width, COLUMNS))](
            x_TD, gate_TG, added, out_TD, x_TD.stride(0), gate_TG.stride(0), added.stride(0), width,
            IS_ONE=gate_TG.shape[1] == 1, ADD=added_TD is not None, BLOCK=COLUMNS, num_warps=4,
            **launch_options(x_TD.device),
        )  # fmt: skip
    return out_TD


@triton.jit(do_not_specialize=["num_values"])
def _delta_gates_kernel(
    beta_ptr, decay_ptr, log_rate_ptr, bias_ptr, log_decay_out_ptr, beta_out_ptr, beta_stride, decay_stride,
    num_values, num_heads, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_values
    token, head = place // num_heads, place % num_heads
    beta = tl.load(beta_ptr + token * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
    shifted = tl.load(decay_ptr + token * decay_stride + head, mask=inside, other=0.0).to(tl.float32)
    shifted += tl.load(bias_ptr + head, mask=inside, other=0.0)
    rate = tl.exp(tl.load(log_rate_ptr + head, mask=inside, other=0.0))
    softplus = tl.maximum(shifted, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(shifted)))
    tl.store(log_decay_out_ptr + place, -rate * softplus, mask=inside)
    tl.store(beta_out_ptr + place, 1.0 / (1.0 + tl.exp(-beta)), mask=inside)


def delta_gates(beta_TH: Tensor, decay_TH: Tensor, log_rate_H: Tensor, decay_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """See NormsAndGates.delta_gates. Device: one launch, no host sync."""
    num_values, num_heads = beta_TH.numel(), beta_TH.shape[1]
    beta_TH, decay_TH = (one if one.stride(1) == 1 else one.contiguous() for one in (beta_TH, decay_TH))
    log_decay_out_TH, beta_out_TH = (
        torch.empty(beta_TH.shape, dtype=torch.float32, device=beta_TH.device) for _ in "ab"
    )
    if num_values:
        _delta_gates_kernel[(cdiv(num_values, FEW_COLUMNS),)](
            beta_TH, decay_TH, log_rate_H, decay_bias_H, log_decay_out_TH, beta_out_TH,
            beta_TH.stride(0), decay_TH.stride(0), num_values, num_heads,
            BLOCK=FEW_COLUMNS, num_warps=2, **launch_options(beta_TH.device),
        )  # fmt: skip
    return log_decay_out_TH, beta_out_TH
