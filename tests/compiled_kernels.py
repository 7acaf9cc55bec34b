"""Compiles variants of three kernels in two processes, then launches them as an engine would, once from the cache and
once from an export that was moved; prints what was compiled.

A process of its own, since it pretends to have a card, and since the suite runs Triton's interpreter.
Arguments: a folder in which it makes others.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from hookline.core.assembly.exported_kernels import use_exported
from hookline.core.assembly.kernel_build import key_of
from hookline.core.prebuild.build import build_driver, compile_one
from hookline.core.prebuild.driver_library import linkable_driver
from hookline.core.prebuild.pretended import CARDS, pretended
from hookline.core.warm.export import compiled_into
from hookline.core.worker.startup.late_work import variant_of
from hookline.plugins.kernels.experts import triton_routing
from hookline.plugins.kernels.norms import triton_gates, triton_norms


def launch() -> None:
    """Three kernels, one of them in two variants."""
    x_TD = torch.empty(4, 256, dtype=torch.bfloat16, device="cuda")
    triton_norms.rms_norm(x_TD, x_TD[0], 1e-6)
    triton_norms.rms_norm(x_TD[:, :64], x_TD[0, :64], 1e-6)
    triton_gates.gated_mul(x_TD)
    triton_routing.route_experts(x_TD, 2, True)


def forget() -> None:
    """Have Triton forget what this process has launched, so that it asks its cache again."""
    for module in (triton_norms, triton_gates, triton_routing):
        for one in vars(module).values():
            if isinstance(one, JITFunction):
                one.device_caches.clear()


def main() -> None:
    card, launched, heard = CARDS["h200"], list[tuple[str, str, str]](), list[tuple[str, bool]]()
    keys, folder = list[str](), Path(sys.argv[1])

    def seen(kernel: Any, specialization: str) -> None:
        launched.append((kernel.__module__, kernel.__name__, specialization))

    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def listen(*, src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
        heard.append((variant_of(src, metadata), cache_hit))

    def asked(*, fn: Any, compile: Any, **_: Any) -> bool:
        keys.append(key_of(fn.jit_function, compile["specialization_data"]))
        return False

    def launch_here() -> None:
        forget()
        with pretended(card, lambda *_: None), patch.object(JITFunction, "run", only_compile):
            knobs.runtime.jit_cache_hook = asked
            launch()

    with pretended(card, seen):
        launch()
    with compiled_into(folder / "export", "a test"):
        with linkable_driver(), ProcessPoolExecutor(2, get_context("fork")) as pool:
            built = [one.result() for one in [pool.submit(compile_one, card, *of) for of in launched]]
            pool.submit(build_driver).result()
        knobs.compilation.listener = listen
        launch_here()
    moved, own = (folder / "export").rename(folder / "moved"), folder / "own"
    os.environ["TRITON_CACHE_DIR"] = str(own)
    use_exported(str(moved))
    launch_here()
    told = [key_of(SimpleNamespace(__module__=module, __name__=name), of) for module, name, of in launched]
    print(json.dumps({
        "built": built, "launched": heard, "told": told, "asked": keys, "written": own.exists(),
        "suffixes": sorted({path.suffix for path in moved.rglob("*") if path.is_file()}),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
