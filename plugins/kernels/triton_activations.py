"""Triton functions of single numbers that gates, products, experts and attention share."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_tanh(x):
    """GELU in its tanh form: (1 + tanh(y)) / 2 is sigmoid(2 y), whose exponential must stay finite."""
    return x / (1.0 + tl.exp(tl.minimum(-1.5957691216057308 * (x + 0.044715 * x * x * x), 80.0)))


@triton.jit
def widened(values, dtype: tl.constexpr):
    """Values of e4m3, or its bits, or of int8, in another dtype; values of that dtype as they are.

    The bits of e4m3 in the place of float16's are the value times 2^-8, its denormal values too.
    """
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        wide = (half.to(tl.float32) * 256.0).to(dtype)
    elif values.dtype == tl.float8e4nv and dtype == tl.bfloat16:  # two at a time, where a conversion takes one
        wide = values.to(tl.float16).to(tl.float32).to(dtype)
    else:
        wide = values.to(dtype)
    return wide
