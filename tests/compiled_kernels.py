"""Compiles variants of three kernels in two processes, then launches them as an engine would; prints what was compiled.

A process of its own, since it pretends to have a card, and since the suite runs Triton's interpreter.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from hookline.core.assembly.kernel_build import key_of
from hookline.core.prebuild.build import compile_one
from hookline.core.prebuild.pretended import CARDS, pretended
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


def main() -> None:
    card, launched, heard = CARDS["h200"], list[tuple[str, str, str]](), list[tuple[str, bool]]()
    keys = list[str]()

    def seen(kernel: Any, specialization: str) -> None:
        launched.append((kernel.__module__, kernel.__name__, specialization))

    with pretended(card, seen):
        launch()
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        built = [one.result() for one in [pool.submit(compile_one, card, *of) for of in launched]]
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def listen(*, src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
        heard.append((variant_of(src, metadata), cache_hit))

    knobs.compilation.listener = listen

    def asked(*, fn: Any, compile: Any, **_: Any) -> bool:
        keys.append(key_of(fn.jit_function, compile["specialization_data"]))
        return False

    with pretended(card, seen), patch.object(JITFunction, "run", only_compile):
        knobs.runtime.jit_cache_hook = asked
        launch()
    told = [key_of(SimpleNamespace(__module__=module, __name__=name), of) for module, name, of in launched]
    print(json.dumps({"built": built, "launched": heard, "told": told, "asked": keys}))


if __name__ == "__main__":
    main()
