"""Compiles every Triton kernel that an engine of a configuration launches, over processes, into Triton's own cache.

A dry run on a pretended card finds the kernels; each is handed to a process as soon as it is found. What the cache has
already is read and not compiled. Needs no GPU. The processes are forked, so it belongs into a process without threads.
"""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from hookline.core.config.settings import Config
from hookline.core.errors import HooklineError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import Option
from hookline.core.prebuild.pretended import Card, pretended, target_of

LEAST_LAYERS = 2
"""Of a model whose layers are alike: the last one differs from those before it in what it computes."""


@dataclass(frozen=True)
class Built:
    """What a build came to. failed: what could not be compiled, one line each."""

    num_kernels: int
    num_compiled: int
    seconds: float
    failed: tuple[str, ...] = ()


def build(config: Config, host: PluginHost, card: Card, num_processes: int) -> Built:
    """Compile what an engine of this configuration launches on such a card.

    Raises: PluginError, ConfigError or CheckpointError, as an engine does that does not fit.
    """
    importlib.import_module("triton")  # once, and not in each of the processes
    started, pending = time.perf_counter(), list[Future[tuple[bool, str | None]]]()
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as pool:
        for _ in range(num_processes):
            pool.submit(int)  # so that all processes are there before this one pretends anything

        pool.submit(build_driver)

        def seen(kernel: Any, specialization: str) -> None:
            pending.append(pool.submit(compile_one, card, kernel.__module__, kernel.__name__, specialization))

        with _quietly():
            launch_all(config, host, card, seen)
        done = [one.result() for one in pending]
    failed = tuple(error for _, error in done if error is not None)
    return Built(len(done), sum(is_new for is_new, _ in done), time.perf_counter() - started, failed)


@contextmanager
def _quietly() -> Iterator[None]:
    """No engine starts, so nothing is to be read of its start."""
    logger = logging.getLogger("hookline")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def launch_all(config: Config, host: PluginHost, card: Card, seen: Any) -> None:
    """Start an engine on a pretended card, with as many layers as have to be looked at, else with all."""
    from hookline.core.prebuild.dry_run import dry_worker, num_unlike_layers

    with pretended(card, seen, num_devices=config.tp):
        layers = num_unlike_layers(config, LEAST_LAYERS)
        try:
            dry_worker(config if layers is None else with_layers(config, layers), host)
        except HooklineError:
            if layers is None:
                raise
            dry_worker(config, host)


def with_layers(config: Config, num_layers: int) -> Config:
    """The same with a model of so many layers."""
    model = config.model.config
    overrides = {**model.hf_overrides, "num_hidden_layers": num_layers}
    option: Option = replace(config.model, config=replace(model, hf_overrides=overrides))
    return replace(config, model=option)


def compile_one(card: Card, module: str, name: str, specialization: str) -> tuple[bool, str | None]:
    """Compile one variant of a kernel: whether the cache did not have it, and what went wrong, if anything did."""
    from triton import knobs

    new: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        new.append(not cache_hit)

    knobs.compilation.listener = listen
    try:
        kernel = getattr(importlib.import_module(module), name)
        with target_of(card):
            build_launcher(kernel.preload(specialization))
    except Exception as error:  # whatever a compiler raises: the engine will find out for itself
        key = json.loads(specialization)["key"]
        return False, f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]} ({key})"
    return any(new), None


def build_launcher(compiled: Any) -> None:
    """Compile what launches a kernel of such arguments, where Triton makes C code of it, into its cache as well.

    Needs the driver's library, which an image that is built without a GPU may lack: then it is done at the start.
    """
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def build_driver() -> None:
    """The same for Triton's own part of the driver."""
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
