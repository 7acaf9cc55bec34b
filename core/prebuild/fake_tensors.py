"""Tensors of a card that is not there: sizes without memory. They are torch's fake tensors, found in a shorter way.

A dry run does thousands of operations. For each of them torch's class looks for decompositions, constants and symbolic
sizes, which takes several times as long as the meta kernel that knows the outcome's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_ATEN = torch.ops.aten
_NEW = frozenset((
    _ATEN.arange.default, _ATEN.empty.memory_format, _ATEN.full.default, _ATEN.ones.default, _ATEN.zeros.default,
))  # fmt: skip
"""Operations that make a tensor without a tensor argument."""
_OF_TENSORS = frozenset((
    _ATEN.add.Tensor, _ATEN.cat.default, _ATEN.cumsum.default, _ATEN.embedding.default, _ATEN.empty_like.default,
    _ATEN.expand.default, _ATEN.fill_.Scalar, _ATEN.gather.default, _ATEN.index.Tensor, _ATEN.index_select.default,
    _ATEN.linear.default, _ATEN.reshape.default, _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.split_with_sizes.default,
    _ATEN.squeeze.dim, _ATEN.sub.Tensor, _ATEN.sub.out, _ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.unbind.int,
    _ATEN.unsqueeze.default, _ATEN.view.default,
))  # fmt: skip
"""Frequent operations of tensors whose meta kernel is fast and does not depend on values."""


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors on CUDA devices that are not there, although torch.cuda says that they are."""

    avoid_device_init = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would ask its compiler in each operation whether this method may be compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As torch's class, but frequent operations call their meta kernel directly."""
        given = kwargs or {}
        if func in _NEW:
            return self._faked(func(*args, **{**given, "device": "meta"}), given.get("device") or torch.device("cpu"))
        if func in _OF_TENSORS and (device := _common_device((*args, *given.values()))) is not None:
            if (target := given.get("device")) is not None:
                given = {**given, "device": None}
                if func is _ATEN.to.dtype_layout and _place(target) != _place(device):
                    given["copy"] = True
            with in_kernel_invocation_manager(self):
                found = func(*args, **given)
            return self._faked(found, device if target is None else target)
        if func is _ATEN.lift_fresh.default and type(args[0]) is Tensor and args[0].numel() != 1:  # one has a value
            return self._faked(torch.empty_like(args[0], device="meta"), args[0].device)
        return self.dispatch(func, types, args, given)

    def _faked(self, found: Any, device: torch.device) -> Any:
        """The outcome of a meta kernel, as tensors on this device."""
        if isinstance(found, FakeTensor):  # one of the operation's own arguments
            return found
        if isinstance(found, Tensor):
            return FakeTensor(self, found, device)
        return type(found)(self._faked(one, device) for one in found)


def _place(device: torch.device) -> tuple[str, int]:
    """A value that devices of the same place share, named with or without a number."""
    return device.type, device.index or 0


def _common_device(given: Sequence[Any]) -> torch.device | None:
    """The device of all given tensors; None without tensors, for several devices, and if a value is known or real."""
    device = None
    for argument in given:
        for one in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(one, Tensor):
                if type(one) is not FakeTensor or one.constant is not None or device not in (None, one.fake_device):
                    return None
                device = one.fake_device
    return device
