"""What tests of Triton kernels need where the interpreter stands for a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
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


def interpret_quickly(interpreter: Any) -> None:
    """Leave out what Triton's interpreter does for nothing, which was more than half of its time. Results are the same.

    For each call of a device function it replaces again what the function calls of the language; once a launch is
    enough. It computes whether each sum and product of integers overflows and then, unless `debug` is set, asserts
    nothing. It makes the table of numpy's dtypes anew for each look into it.
    """
    builder, patch, launch = interpreter.interpreter_builder, interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] | None = None

    def patch_once(function: Any) -> Any:
        names = id(function.__globals__)
        if patched is None or names not in patched:
            scope = patch(function)
        else:
            scope = interpreter._LangPatchScope()
        if patched is not None:
            patched.add(names)
        return scope

    def launch_with_one_patch(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal patched
        patched = set()
        try:
            return launch(self, *arguments, **options)
        finally:
            patched = None

    find_dtype = interpreter._get_np_dtype
    known_dtype = cache(find_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return find_dtype(scalar) if scalar.is_ptr() else known_dtype(scalar)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_with_one_patch
    interpreter._get_np_dtype = numpy_dtype
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
