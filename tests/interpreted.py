"""What tests of Triton kernels need where the interpreter stands for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses what rounding to e4m3 carries into the exponent: 127.9 becomes 64 there, not 128."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, from_dtype: Any, to_dtype: Any, rounding: Any) -> Any:
        if not to_dtype.is_fp8e4nv() or values.dtype.name != "float32":
            return convert(values, from_dtype, to_dtype, rounding)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
