"""Triton's interpreter with a card's conversion to e4m3: its own rounds small numbers down, and 1.9375 to 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def round_to_e4m3_as_cards_do(patch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's conversion of float32 numbers to e4m3 by torch's, which is exact."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(given: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if (from_dtype, to_dtype) != (tl.float32, tl.float8e4nv):
            return convert(given, from_dtype, to_dtype, rounding_mode)
        numbers = torch.from_numpy(np.frombuffer(given.tobytes(), np.float32).copy())
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(given.shape)

    patch.setattr(interpreter, "_convert_float", converted)
