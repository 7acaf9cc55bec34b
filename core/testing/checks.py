"""Checks of tensors for the conformance suites: every failure is one line with the value at fault and its place."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hookline.core.contracts import Needs
from hookline.core.plugin.check_contract import class_fault
from hookline.core.util.garbage import is_frozen

_NO_NEEDS = Needs()
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def check(holds: bool, message: str) -> None:
    """Raise AssertionError with `message` unless `holds`; unlike `assert` it also works under python -O."""
    if not holds:
        raise AssertionError(message)


def check_contract(kind: str, plugin: Any, needs: Needs = _NO_NEEDS) -> None:
    """Check a class as an engine does when it is chosen, except for its constructor; other callables pass.

    Raises: AssertionError with the first fault of the class.
    """
    fault = class_fault(kind, plugin, needs) if isinstance(plugin, type) else None
    check(fault is None, f"{plugin} does not keep its contract: {fault}")


def check_form(what: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """`tensor` is a tensor of this shape and dtype. Raises: AssertionError that begins with `what`."""
    check(isinstance(tensor, Tensor), f"{what} is a {type(tensor).__name__} and must be a tensor")
    check(tensor.shape == tuple(shape), f"{what} has shape {tuple(tensor.shape)} and must have {tuple(shape)}")
    check(tensor.dtype == dtype, f"{what} has dtype {tensor.dtype} and must have {dtype}")


def check_close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """|actual - expected| <= tolerance * (1 + |expected|) everywhere, the shapes agree, and nothing is NaN.

    Raises: AssertionError with the place of the largest error, both values there, and the tolerance.
    """
    check_form(what, actual, expected.shape, actual.dtype)
    check(not bool(actual.isnan().any()), f"{what} holds NaN: part of it was never written, or reads what was not")
    error = (actual.double() - expected.double()).abs() / (1 + expected.double().abs())
    if error.numel() and float(error.max()) > tolerance:
        index = tuple(int(at) for at in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{what} is wrong: {float(actual[index]):.6g} instead of {float(expected[index]):.6g} at {index}, "
            f"relative error {float(error.max()):.2g}, allowed {tolerance:.2g}"
        )


@contextmanager
def check_nothing_kept(what: str) -> Iterator[None]:
    """No tensor that is made inside exists afterwards. Raises: AssertionError that begins with `what`."""
    was_frozen = is_frozen()
    gc.freeze()  # searching all of torch's objects, which existed before, takes seconds
    try:
        yield
        gc.collect()
        kept = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    finally:
        if not was_frozen:
            gc.unfreeze()
    shapes = sorted({f"{tuple(one.shape)} of {one.dtype}" for one in kept})
    check(not kept, f"{what} keeps what it made for a new size: {len(kept)} tensors, {', '.join(shapes[:3])}")


def check_unchanged(what: str, before: Tensor, after: Tensor) -> None:
    """Two tensors are equal in every bit; NaN differs from NaN. Raises: AssertionError that begins with `what`."""
    check(torch.equal(before, after), f"{what} was changed")


class PoisonedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, torch.empty and similar functions return NaN, which exposes values that were never written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; fill its result with NaN if it is uninitialised memory."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _UNINITIALISED and out.is_floating_point():
            out.fill_(torch.nan)
        return out
