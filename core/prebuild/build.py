"""Compiles every Triton kernel that an engine of a configuration launches, over processes, into Triton's own cache.

A dry run on a pretended card finds the kernels; each is handed to a process as soon as it is found. Kernels that are in
the cache already are not compiled again. Needs no GPU. The processes are forked, so this must run in a process without
threads.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

from hookline.core.assembly.kernel_build import key_of
from hookline.core.config.settings import Config
from hookline.core.errors import HooklineError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import Option
from hookline.core.prebuild.pretended import Card, pretended, seeing_once, target_of
from hookline.core.worker.startup.late_work import variant_of

LEAST_LAYERS = 2
"""Layers to run of a model whose layers are alike: two, since the last one computes only the wanted rows."""
GIVES_WAY = 5
"""By how much the processes that compile are nicer than the engine and the dry run."""
PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent ends."""


@dataclass(frozen=True)
class Built:
    """The outcome of a build. failed: a line for each kernel that could not be compiled. variants, keys: names of the
    compiled kernels, by `variant_of` and `kernel_build.key_of`.
    """

    num_kernels: int
    num_compiled: int
    seconds: float
    failed: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """The outcome for one variant of a kernel. is_new: it was not in the cache. failure: what went wrong, if anything.

    variant: its name, see `variant_of`.
    """

    is_new: bool
    failure: str | None = None
    variant: str | None = None


def build(
    config: Config, host: PluginHost, card: Card, num_processes: int, told: Callable[[str, Outcome], None] | None = None
) -> Built:
    """Compile the kernels that an engine of this configuration launches on such a card.

    told: called with each kernel's `kernel_build.key_of` as soon as it is compiled or has failed, from any thread.
    Raises: PluginError, ConfigError or CheckpointError, as an engine does that does not fit.
    """
    importlib.import_module("triton")  # once, and not in each of the processes
    started, pending = time.perf_counter(), list[tuple[str, Future[Outcome]]]()
    launched: dict[tuple[str, str], None] = {}
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"), initializer=_begin_process) as pool:
        for _ in range(num_processes):
            pool.submit(int)  # so that all processes are there before this one pretends anything

        pool.submit(build_driver)

        def _seen(kernel: Any, specialization: str) -> None:
            name = kernel.__module__, kernel.__name__
            future = pool.submit(compile_one, card, *name, specialization, tuple(launched))
            key = key_of(kernel, specialization)
            if told is not None:
                future.add_done_callback(partial(_tell, told, key))
            pending.append((key, future))
            launched[name] = None

        with _quietly():
            launch_all(config, host, card, _seen)
        done = [(key, future.result()) for key, future in pending]
    failed = tuple(one.failure for _, one in done if one.failure is not None)
    variants = tuple(one.variant for _, one in done if one.variant is not None)
    keys = tuple(key for key, one in done if one.failure is None)
    num_new = sum(one.is_new for _, one in done)
    return Built(len(done), num_new, time.perf_counter() - started, failed, variants, keys)


def _tell(told: Callable[[str, Outcome], None], key: str, future: Future[Outcome]) -> None:
    if not future.cancelled() and future.exception() is None:
        told(key, future.result())


def _begin_process() -> None:
    """Prepare a process that compiles: its priority is lower than the engine's, and it ends with its parent."""
    gc.enable()
    with suppress(OSError):
        os.nice(GIVES_WAY)
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _quietly() -> Iterator[None]:
    """While inside, only errors are logged: the dry run would log the start of an engine that does not start."""
    logger = logging.getLogger("hookline")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def launch_all(config: Config, host: PluginHost, card: Card, seen: Any) -> None:
    """Start an engine on a pretended card, if possible with a few layers that launch all kernels, else with all layers.

    seen: called with each variant of a kernel that is launched; see `pretended`.
    """
    from hookline.core.prebuild.dry_run import dry_worker, few_layers

    with seeing_once(seen) as seen_once, pretended(card, seen_once, num_devices=config.num_ranks):
        few = few_layers(config, LEAST_LAYERS, host)
        try:
            dry_worker(config if few is None else with_overrides(config, few), host)
        except HooklineError:
            if few is None:
                raise
            dry_worker(config, host)


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """The configuration with other values in the model's config.json."""
    model = config.model.config
    option: Option = replace(config.model, config=replace(model, hf_overrides={**model.hf_overrides, **overrides}))
    return replace(config, model=option)


def compile_one(
    card: Card, module: str, name: str, specialization: str, before: Sequence[tuple[str, str]] = ()
) -> Outcome:
    """Compile one variant of a kernel. before: modules and names of kernels that an engine launches before this one.

    In Triton 3.6 a kernel's key in the cache may depend on which keys its process computed before it, so they are
    computed in the engine's order. A kernel of ours has the same key in any order; a plugin's need not.
    """
    from triton import knobs

    new, variant = list[bool](), ""

    def _listen(*, src: Any, metadata: Mapping[str, Any], cache_hit: bool, **_: Any) -> None:
        nonlocal variant
        new.append(not cache_hit)
        variant = variant_of(src, metadata)

    knobs.compilation.listener = _listen
    try:
        for of, earlier in before:
            _ = getattr(getattr(importlib.import_module(of), earlier, None), "cache_key", None)  # which Triton keeps
        kernel = getattr(importlib.import_module(module), name)
        with target_of(card):
            build_launcher(kernel.preload(specialization))
    except Exception as error:  # whatever a compiler raises: the engine will find out for itself
        key = json.loads(specialization)["key"]
        return Outcome(False, f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]} ({key})")
    return Outcome(any(new), variant=variant)


def build_launcher(compiled: Any) -> None:
    """Compile the C code by which Triton launches a compiled kernel, if it has any, into Triton's cache as well.

    This needs a C compiler and a library of the driver's name, see `linkable_driver`; else it is done at the start.
    """
    with _unloaded(), suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def build_driver() -> None:
    """Compile Triton's own C code for the driver into its cache, as `build_launcher` does for a kernel."""
    with _unloaded(), suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


@contextmanager
def _unloaded() -> Iterator[None]:
    """Inside, Triton loads no C code that it compiles: nothing is launched here, and there may be no driver."""
    from triton.runtime import build as of_triton

    with patch.object(of_triton, "_load_module_from_path", lambda *_: Mock(), create=True):
        yield
