"""What tests of Triton kernels need where the interpreter stands for a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
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
    nothing. It makes the table of numpy's dtypes anew for each look into it. Around each function of the language are
    two others, of which one copies its arguments and one asks for an argument that is there. What it does for shapes:
    `_know_shapes`.
    """
    if not hasattr(interpreter, "_LangPatchScope"):  # before Triton 3.9
        return
    _know_shapes()
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

    def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*arguments, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_with_one_patch
    interpreter._patch_attr = patch_attribute
    interpreter._get_np_dtype = numpy_dtype
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _know_shapes() -> None:
    """Describe and check each shape once, not for each value that has it; shapes that are equal need no broadcast."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    @lru_cache(maxsize=None, typed=True)
    def known_block(*sizes: int) -> tuple[Any, int, str]:
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    @cache
    def known_value(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, (list, core.tuple))
        if not len(shape):
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, text = known_block(*map(unwrap, shape))
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known_value(*type.shape.values) if type.is_block() else known_value()

    find, plain = core._unwrap_if_constexpr, {int, bool, float, str, type(None), core.tensor, core.dtype}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else find(value)

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if not any(blocks) or (all(blocks) and lhs.type.shape.values == rhs.type.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = make_block_type, make_tensor
    core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value = unwrap, broadcast_unlike
