"""Triton functions of single numbers that gates, products and experts share."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_tanh(x):
    """GELU in its tanh form: (1 + tanh(y)) / 2 is sigmoid(2 y), whose exponential must stay finite."""
    return x / (1.0 + tl.exp(tl.minimum(-1.5957691216057308 * (x + 0.044715 * x * x * x), 80.0)))
