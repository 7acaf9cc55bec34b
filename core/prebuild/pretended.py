"""A pretended CUDA card: tensors take no memory, and launches of kernels are only recorded.

Inside `pretended(card)` an engine's code runs as it would on that card, so that the Triton kernels it launches become
known; none is computed. Functions of torch.cuda are replaced in this process meanwhile, so use it in a process of its
own, or in a test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from hookline.core.errors import ConfigError
from hookline.core.prebuild.fake_tensors import FakeTensors
from hookline.core.worker.graphs import cuda_graph
from hookline.core.worker.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Card:
    """The properties of a card that decide which kernels it gets: its compute capability, its number of
    multiprocessors, and the bytes of shared memory that one program can have.
    """

    compute_capability: tuple[int, int]
    num_sms: int
    shared_memory_bytes: int


CARDS = {
    "a100": Card((8, 0), 108, 166_912),
    "rtx3090": Card((8, 6), 82, 101_376),
    "rtx4090": Card((8, 9), 128, 101_376),
    "l4": Card((8, 9), 58, 101_376),
    "l40s": Card((8, 9), 142, 101_376),
    "h100": Card((9, 0), 132, 232_448),
    "h200": Card((9, 0), 132, 232_448),
    "b200": Card((10, 0), 148, 232_448),
    "rtx5090": Card((12, 0), 170, 101_376),
}
"""Cards that can be named; any other card must be in this machine, see `card_here`."""


def card_named(name: str) -> Card:
    """The card of this name.

    Raises: ConfigError listing the names if there is no card of this name.
    """
    if name not in CARDS:
        raise ConfigError(f"card={name} is not known; known are: {', '.join(CARDS)}")
    return CARDS[name]


def card_here(device: torch.device) -> Card:
    """The card behind a CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return Card((major, minor), properties.multi_processor_count, properties.shared_memory_per_block_optin)


Seen = Callable[[Any, str], None]
"""seen(kernel, specialization): a Triton kernel's JITFunction and Triton's JSON of one of its variants."""


@contextmanager
def pretended(card: Card, seen: Seen, *, num_devices: int = 1) -> Iterator[None]:
    """Inside, this process seems to have such cards; `seen` is called with each variant that is launched, once."""
    with ExitStack() as stack:
        for name, value in _torch_cuda(card, num_devices).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.version, "cuda", None))  # so that CUDA's own libraries are not loaded
        if hasattr(fake_tensor, "init_gpu_context"):  # which puts a real tensor on the card before the first fake one
            stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda *_: None))
        stack.enter_context(patch.object(ModelRunner, "checking", nullcontext))  # there are no results to look at
        stack.enter_context(patch.object(cuda_graph, "run_before", lambda *_: None))  # a capture launches the same
        stack.enter_context(_recorded_launches(card, seen))
        stack.enter_context(FakeTensors(allow_non_fake_inputs=True))
        stack.enter_context(_Addresses())
        yield


class _Addresses(TorchFunctionMode):
    """Gives fake tensors addresses that are aligned as real ones are, and skips operations that need a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "data_ptr":
            return 512 + args[0].storage_offset() * args[0].element_size()
        if name in ("pin_memory", "copy_"):
            return args[0]
        if name == "numpy":
            return np.zeros(tuple(args[0].shape), dtype=np.int64)
        if name == "to" and isinstance(args[0], FakeTensor) and "cuda" in str((args[1:], kwargs.get("device"))):
            args[0].constant = None  # a single number would really be sent, to a card that is not there
        if name == "__getitem__":
            return _indexed(*args)
        if name == "__setitem__":
            return _put(*args)
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
        return func(*args, **kwargs)


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    """tensor[index], step by step: a torch that was built without CUDA does not index tensors of such devices."""
    tensors: list[Tensor | None] = []
    for one in _without_ellipsis(index if isinstance(index, tuple) else (index,), tensor.dim()):
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, len(tensors), one.start, one.stop, one.step or 1)
            tensors.append(None)
        elif one is None:
            tensor = tensor.unsqueeze(len(tensors))
            tensors.append(None)
        else:
            tensor = tensor.select(len(tensors), int(one))
    return tensor if all(one is None for one in tensors) else torch.ops.aten.index.Tensor(tensor, tensors)


def _without_ellipsis(index: tuple[Any, ...], num_dims: int) -> tuple[Any, ...]:
    """The index with slices of whole dimensions in place of `...`."""
    places = [place for place, one in enumerate(index) if one is Ellipsis]
    if not places:
        return index
    named = sum(one is not None for one in index) - 1
    return (*index[: places[0]], *[slice(None)] * (num_dims - named), *index[places[0] + 1 :])


def _put(tensor: Tensor, index: Any, value: Any) -> None:
    """tensor[index] = value, of which only the sizes matter here."""
    _indexed(tensor, index)


class _Stream:
    """A stream or an event whose methods do nothing."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _torch_cuda(card: Card, num_devices: int) -> dict[str, Any]:
    """Functions of torch.cuda as such a card would have them answer."""
    properties = SimpleNamespace(
        name="pretended",
        multi_processor_count=card.num_sms,
        shared_memory_per_block_optin=card.shared_memory_bytes,
        major=card.compute_capability[0],
        minor=card.compute_capability[1],
        total_memory=1 << 37,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": num_devices,
        "current_device": 0,
        "get_device_capability": card.compute_capability,
        "get_device_properties": properties,
        "mem_get_info": (1 << 37, 1 << 37),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "is_current_stream_capturing": False,
        "graph_pool_handle": (0, 0),
    }
    made = {name: lambda *args, _value=value, **kwargs: _value for name, value in answers.items()}
    setters = ("set_device", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init")
    made |= {name: lambda *args, **kwargs: None for name in setters}
    made |= {name: lambda *args, **kwargs: nullcontext() for name in ("stream", "graph", "device")}
    made |= {name: lambda *args, **kwargs: _Stream() for name in ("current_stream", "default_stream")}
    return made | {"Stream": _Stream, "Event": _Stream, "CUDAGraph": _Stream}


class _Driver:
    """Triton's driver of a card that is not there: it has a target and no device."""

    def __init__(self, card: Card) -> None:
        self._capability = card.compute_capability

    def get_current_target(self) -> Any:
        """The target that kernels are compiled for: the card's compute capability."""
        from triton.backends.compiler import GPUTarget

        major, minor = self._capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The only device, as torch names it."""
        return torch.device("cuda", 0)


@contextmanager
def target_of(card: Card) -> Iterator[None]:
    """Inside, Triton compiles for this card, whether one is here or not."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(_Driver(card))
    try:
        yield
    finally:
        driver._active = before


class _Recorded:
    """Stands for a compiled kernel; its launches do nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


@contextmanager
def seeing_once(seen: Seen) -> Iterator[Seen]:
    """A `seen` for `pretended` after which Triton takes a variant for compiled, until the end of this context.

    Its further launches are then a look-up: to describe a variant again takes a third of a dry run's time.
    """
    kept = list[tuple[dict[str, Any], str]]()

    def _seen(kernel: Any, specialization: str) -> None:
        seen(kernel, specialization)
        kernels, key = kernel.device_caches[0][0], json.loads(specialization)["key"]
        kernels[key] = _Recorded()
        kept.append((kernels, key))

    try:
        yield _seen
    finally:
        for kernels, key in kept:
            kernels.pop(key, None)


@contextmanager
def _recorded_launches(card: Card, seen: Seen) -> Iterator[None]:
    """Inside, Triton neither compiles nor launches: `seen` is called with each variant that it would, once."""
    from triton import knobs

    told: set[tuple[int, str]] = set()

    def _hook(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        place = (id(fn.jit_function), key)
        if place not in told:
            told.add(place)
            seen(fn.jit_function, compile["specialization_data"])
        return True  # so nothing is compiled, and nothing launched

    with target_of(card), patch.object(knobs.runtime, "jit_cache_hook", _hook):
        yield
