"""Counts and logs kernels compiled or loaded and graphs captured after an engine was ready, while requests wait.

Each such wait means that the warm-up (core/worker/startup/warm_up.py) missed a step, or that a request asked for
something rare. The compilers and loaders call our hooks themselves, so counting costs a running engine no time. Hooks
belong to the process: engines that share a process count each other's waits.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakSet

logger = logging.getLogger("hookline")
COMPILED, FETCHED, LOADED, CAPTURED, TRACED = "kernel_compiled", "kernel_fetched", "kernel_loaded", "graph", "inductor"
KINDS = (COMPILED, FETCHED, LOADED, CAPTURED, TRACED)
"""A Triton kernel compiled; read from its cache folder; a kernel's binary put on the device; a CUDA graph captured; a
function compiled by torch.compile."""


class LateWork:
    """counts, seconds: number and duration of compilations, loads and captures, by kind, since `begin` was called.

    is_late: whether each is logged as a warning; False while an engine starts, to measure how long compiling and
    loading take at the start. ahead: variants of kernels, see `variant_of`, that another process compiled for this one.
    """

    def __init__(self, *, is_late: bool = True, ahead: Collection[str] = ()) -> None:
        self.is_late, self._ahead = is_late, ahead
        self._twice: Counter[str] = Counter()
        """How often each kernel was compiled although it is among `ahead`, by name."""
        self._twice_s = 0.0
        self.counts: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._lock = Lock()

    def begin(self) -> None:
        """Start counting: the engine is ready, so compilations, loads and captures from now on are late."""
        _install()
        _LISTENING.add(self)

    def end(self) -> None:
        """Stop counting."""
        _LISTENING.discard(self)

    def add(self, kind: str, seconds: float, variant: str = "") -> None:
        """Count a compilation, load or capture. variant: of the kernel that was compiled, see `variant_of`."""
        with self._lock:
            self.counts[kind] += 1
            self.seconds[kind] += seconds
            if variant in self._ahead:
                self._twice[variant.rpartition("-")[0]] += 1
                self._twice_s += seconds

    @property
    def compiled_twice(self) -> str | None:
        """Which kernels were compiled although they had been compiled ahead, in one line; None if there are none."""
        if not self._twice:
            return None
        names = ", ".join(f"{name} {count}" for name, count in self._twice.items())
        return (
            f"compiled again although compiled ahead, {self._twice_s:.1f} s: {names}; Triton's cache has them under "
            "other keys (docs/plugins.md#kernels-in-triton)"
        )

    def __str__(self) -> str:
        done = [f"{_SHORT[kind]} {self.counts[kind]} in {self.seconds[kind]:.1f} s" for kind in _SHORT]
        return "kernels " + ", ".join(done)


_SHORT = {COMPILED: "compiled", FETCHED: "read from their cache", LOADED: "loaded"}
_TOLD = {
    COMPILED: "a kernel was compiled",
    FETCHED: "a compiled kernel was read from its cache",
    LOADED: "a kernel was loaded onto the device",
    CAPTURED: "a CUDA graph was captured",
    TRACED: "torch.compile compiled a function",
}
_LISTENING: WeakSet[LateWork] = WeakSet()
"""The LateWork objects of this process that count at present; without any, every hook returns at once."""
_MICRO = 1e-6


def note(kind: str, what: str, seconds: float, variant: str = "") -> None:
    """Count a compilation, load or capture for every engine that is ready, and log it once."""
    listening = tuple(_LISTENING)
    for one in listening:
        one.add(kind, seconds, variant)
    if any(one.is_late for one in listening):
        logger.warning("%s after the engine was ready: %s, %.3f s", _TOLD[kind], what, seconds)


@contextmanager
def not_late() -> Iterator[None]:
    """Around work of a start after its worker is ready, such as a drafter's own start; not for several threads."""
    listening = tuple(_LISTENING)
    _LISTENING.clear()
    try:
        yield
    finally:
        _LISTENING.update(listening)


_HOOKED: set[str] = set()
"""Names of modules with our hooks, which stay until the process ends."""


def _install() -> None:
    """Put our hooks into the compilers that were imported by now: Triton, torch.compile or both."""
    for name, hook in (("triton", _hook_triton), ("torch._dynamo", _hook_dynamo)):
        if name in sys.modules and name not in _HOOKED:
            _HOOKED.add(name)
            hook()


def variant_of(source: Any, metadata: Mapping[str, Any]) -> str:
    """A kernel's name with a digest of its signature, constants and options: Triton's key without the kernel's code.

    source, metadata: as Triton's compilation listener is given them.
    """
    constants = [str(value) for _, value in sorted(source.constants.items())]
    options = [metadata.get("num_warps"), metadata.get("num_stages")]
    told = f"{sorted(source.signature.items())} {constants} {source.attrs} {options}"
    return f"{source.name}-{hashlib.sha256(told.encode()).hexdigest()[:32]}"


def _named(source: Any) -> str:
    """A kernel's name with its constants and with the arguments that are not known to be multiples of 16."""
    try:
        names = source.fn.arg_names
        constants = [f"{names[place[0]]}={value}" for place, value in source.constants.items()]
        odd = [
            f"{name} not a multiple of 16"
            for index, (name, kind) in enumerate(source.signature.items())
            if (kind.startswith("*") or kind in ("i32", "i64")) and not source.attrs.get((index,))
        ]
        return f"{source.name}({', '.join(constants + odd)})"
    except Exception:  # of Triton's own classes, which change; the name alone will do then
        return str(getattr(source, "name", source))


def _hook_triton() -> None:
    from triton import knobs

    before, started = knobs.compilation.listener, dict[str, float]()

    def _listen(*, src: Any, times: Any, metadata: Mapping[str, Any], cache_hit: bool, **others: Any) -> None:
        if before is not None:
            before(src=src, times=times, metadata=metadata, cache_hit=cache_hit, **others)
        if _LISTENING and cache_hit:
            note(FETCHED, _named(src), times.total * _MICRO)
        elif _LISTENING:
            note(COMPILED, _named(src), times.total * _MICRO, variant_of(src, metadata))

    def _load_starts(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        started[hash] = time.perf_counter()

    def _load_ends(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        begun = started.pop(hash, None)
        if _LISTENING and begun is not None:
            note(LOADED, name, time.perf_counter() - begun)

    knobs.compilation.listener = _listen
    knobs.runtime.kernel_load_start_hook.add(_load_starts)
    knobs.runtime.kernel_load_end_hook.add(_load_ends)


def _hook_dynamo() -> None:
    from torch._dynamo.callback import callback_handler

    started: list[float] = []

    def _ends(*_: Any) -> None:
        begun = started.pop() if started else time.perf_counter()
        if _LISTENING:
            note(TRACED, "a function", time.perf_counter() - begun)

    callback_handler.register_start_callback(lambda *_: started.append(time.perf_counter()))
    callback_handler.register_end_callback(_ends)
