"""Finds, on any device, calls that would make the host wait for a GPU, which a captured CUDA graph does not allow.

On a CPU nothing waits, so calls are recognised by their kind: calls that read values of tensors (item, tolist, numpy, a
condition) and calls whose result's shape depends on values (nonzero, unique, indexing with a mask).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__format__")
_VALUES_ASKED = ("tolist", "numpy", "cpu", "__array__", "__dlpack__", "item", "is_nonzero", "allclose", *_CONVERSIONS)
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
_INTERPRETERS = ("triton.",)
"""Modules that may wait: on a GPU, the work of Triton's interpreter is done on the device."""
_NOT_TO_BLAME = ("torch.", __name__)


@contextmanager
def no_host_sync(what: str, but: Sequence[str] = ()) -> Iterator[None]:
    """Fail as soon as the block, called `what` in the message, would wait for the device.

    but: beginnings of the names of modules that may wait when the block calls into them.
    """
    with _Methods(what, but), _Operations(what, but):
        yield


class _Watch:
    """The common part of both modes: which modules may wait, and the error for others."""

    def __init__(self, what: str, but: Sequence[str]) -> None:
        super().__init__()
        self.what, self.but = what, (*_INTERPRETERS, *but)

    def refuse(self, name: str) -> None:
        """Fail and name the line, unless one of the modules that may wait is among the callers."""
        frames = list(_frames_below(sys._getframe(2)))
        if any(_is_in(frame, self.but) for frame in frames):
            return
        culprit = next((frame for frame in frames if not _is_in(frame, _NOT_TO_BLAME)), frames[0])
        where = f"{culprit.f_code.co_filename.rpartition('/')[2]}:{culprit.f_lineno}, {culprit.f_code.co_name}"
        raise AssertionError(
            f"{self.what} waits for the device: {name} in {where}; compute it there, or don't declare graph_safe"
        )


class _Methods(_Watch, TorchFunctionMode):
    """Methods that read a tensor's values, some of them without an operation of torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, unless it asks for values."""
        name = getattr(func, "__name__", "")
        if name in _VALUES_ASKED or (name == "where" and len(args) == 1):
            self.refuse(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class _Operations(_Watch, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations that wait, or that cannot know their result's shape without waiting."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it waits."""
        name = func.overloadpacket.__name__
        if name in _WAITING or (name in _INDEXING and _has_mask(args[1])) or _is_open_ended(name, args, kwargs):
            self.refuse(f"torch's {name}")
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _is_open_ended(name: str, args: Any, kwargs: Any) -> bool:
    """Whether it repeats by counts on the device without being told their sum."""
    counts = name == "repeat_interleave" and any(isinstance(arg, Tensor) for arg in args[-1:])
    return counts and (kwargs or {}).get("output_size") is None


def _frames_below(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames from this one outwards, up to the block that is watched."""
    while frame is not None and frame.f_code.co_name != "no_host_sync":
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, modules: Sequence[str]) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(tuple(modules))
