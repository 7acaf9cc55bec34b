"""Whether this process is compiling something: kernels that are needed for the first time may hold a step up for long.

Looks at where the threads are, so that nobody who compiles has to say so. Knows no kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

COMPILERS = (
    "triton.compiler",
    "torch._dynamo.convert_frame",
    "torch._inductor.async_compile",
    "torch._inductor.codecache",
    "torch.utils.cpp_extension",
    "flashinfer.jit",
)
"""Packages and modules that a thread is inside of while it compiles; not those that what was compiled runs under, nor
those whose threads stay behind, as the rest of torch's."""


def is_compiling(compilers: tuple[str, ...] = COMPILERS) -> bool:
    """Whether any thread is inside one of these modules, however deep: takes some microseconds a thread."""
    return any(
        _lies_in(frame.f_globals.get("__name__"), compilers)
        for top in sys._current_frames().values()
        for frame in _stack(top)
    )


def _stack(top: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = top
    while frame is not None:
        yield frame
        frame = frame.f_back


def _lies_in(module: object, packages: tuple[str, ...]) -> bool:
    """Code that somebody executes may call its module anything, or nothing."""
    return isinstance(module, str) and f"{module}.".startswith(tuple(f"{package}." for package in packages))
