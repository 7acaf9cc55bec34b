"""What is compiled, loaded or captured after an engine was ready, while requests wait: counted, and named in the log.

Every such wait is a fault of the warm-up (core/worker/startup/warm_up.py), or of a request that asked for something
rare. Costs nothing while nothing of the kind happens: the hooks are called by the compilers and loaders themselves.
Hooks are the process's, so an engine's counts begin when it is ready, and two engines of one process count each
other's.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from threading import Lock
from typing import Any
from weakref import WeakSet

logger = logging.getLogger("hookline")
COMPILED, FETCHED, LOADED, CAPTURED, TRACED = "kernel_compiled", "kernel_fetched", "kernel_loaded", "graph", "inductor"
KINDS = (COMPILED, FETCHED, LOADED, CAPTURED, TRACED)
"""A Triton kernel compiled; read from its cache folder; a kernel's binary put on the device; a CUDA graph captured; a
function compiled by torch.compile."""


class LateWork:
    """Counts since `begin`, by kind; `seconds` likewise. Before that nothing is counted.

    is_late: whether each is a warning; if not, an engine is starting, and wants to know what of it its start is.
    ahead: variants of kernels, see `variant_of`, that some other process compiled for this one.
    """

    def __init__(self, *, is_late: bool = True, ahead: Collection[str] = ()) -> None:
        self.is_late, self._ahead = is_late, ahead
        self._twice: Counter[str] = Counter()
        """Kernels that were compiled all the same, by name."""
        self._twice_s = 0.0
        self.counts: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self._lock = Lock()

    def begin(self) -> None:
        """The engine is ready: what comes from now on is late."""
        _install()
        _LISTENING.add(self)

    def end(self) -> None:
        """Count no more."""
        _LISTENING.discard(self)

    def add(self, kind: str, seconds: float, variant: str = "") -> None:
        """Something of this kind was done late. variant: of the kernel that was compiled."""
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
"""Engines of this process that are ready and still there; empty while none is, and then every hook returns at once."""
_MICRO = 1e-6


def note(kind: str, what: str, seconds: float, variant: str = "") -> None:
    """Tell every engine that is ready of something that was done late; the log hears of it once."""
    listening = tuple(_LISTENING)
    for one in listening:
        one.add(kind, seconds, variant)
    if any(one.is_late for one in listening):
        logger.warning("%s after the engine was ready: %s, %.3f s", _TOLD[kind], what, seconds)


_HOOKED: set[str] = set()
"""Modules whose hooks are ours already; a process's hooks are never taken out again."""


def _install() -> None:
    """Hook into the compilers that are in use: those whose modules were imported before the engine was ready."""
    for name, hook in (("triton", _hook_triton), ("torch._dynamo", _hook_dynamo)):
        if name in sys.modules and name not in _HOOKED:
            _HOOKED.add(name)
            hook()


def variant_of(source: Any, metadata: Mapping[str, Any]) -> str:
    """A kernel's name and what it is compiled for, as a digest: as in Triton's own key, but without the kernel's code.

    source, metadata: as Triton's compilation listener is given them.
    """
    constants = [str(value) for _, value in sorted(source.constants.items())]
    options = [metadata.get("num_warps"), metadata.get("num_stages")]
    told = f"{sorted(source.signature.items())} {constants} {source.attrs} {options}"
    return f"{source.name}-{hashlib.sha256(told.encode()).hexdigest()[:32]}"


def _named(source: Any) -> str:
    """A kernel with what it is compiled for: its constants, and of its arguments which are known to be multiples."""
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

    def listen(*, src: Any, times: Any, metadata: Mapping[str, Any], cache_hit: bool, **others: Any) -> None:
        if before is not None:
            before(src=src, times=times, metadata=metadata, cache_hit=cache_hit, **others)
        if _LISTENING and cache_hit:
            note(FETCHED, _named(src), times.total * _MICRO)
        elif _LISTENING:
            note(COMPILED, _named(src), times.total * _MICRO, variant_of(src, metadata))

    def load_starts(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        started[hash] = time.perf_counter()

    def load_ends(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        begun = started.pop(hash, None)
        if _LISTENING and begun is not None:
            note(LOADED, name, time.perf_counter() - begun)

    knobs.compilation.listener = listen
    knobs.runtime.kernel_load_start_hook.add(load_starts)
    knobs.runtime.kernel_load_end_hook.add(load_ends)


def _hook_dynamo() -> None:
    from torch._dynamo.callback import callback_handler

    started: list[float] = []

    def ends(*_: Any) -> None:
        begun = started.pop() if started else time.perf_counter()
        if _LISTENING:
            note(TRACED, "a function", time.perf_counter() - begun)

    callback_handler.register_start_callback(lambda *_: started.append(time.perf_counter()))
    callback_handler.register_end_callback(ends)
