"""Lists what one decode step of a model launches on the device, found on a card that is pretended: needs no GPU.

    python tools/count_launches.py model=gemma3_4b model.weights=random            # 256 decodes
    python tools/count_launches.py --rows 1 model=gpt_oss_20b model.weights=random

A Triton kernel is a launch; so is each operation of torch that computes or copies (a product of cuBLAS may take two).
What a step launches for all layers of a kind is counted with the step. Further arguments are those of hookline run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from hookline.core.config.compose import compose
from hookline.core.plugin.host import PluginHost
from hookline.core.prebuild.dry_run import dry_worker
from hookline.core.prebuild.pretended import CARDS, pretended
from hookline.core.run.settings import RunKeys, validate_run
from hookline.core.step.message import Step

FREE = ("empty", "empty_strided", "empty_like", "new_empty", "prim::device")
"""Operations that launch nothing, besides those that return memory which they were given."""


class Launches(TorchDispatchMode):
    """Counts operations of torch on the device by name."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, given = func._schema.name.removeprefix("aten::"), [one for one in args if isinstance(one, torch.Tensor)]
        first = out[0] if isinstance(out, list | tuple) and out else out
        is_view = isinstance(first, torch.Tensor) and any(_memory(first) == _memory(one) for one in given)
        is_view &= not func._schema.is_mutable
        on_device = any(isinstance(one, torch.Tensor) and one.is_cuda for one in (*given, first))
        if on_device and not is_view and name not in FREE:
            self._found[f"torch {name}"] += 1
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # that of a pretended tensor, too


def decode_step(num_rows: int, row: int, context: int) -> Step:
    """One token of each of so many requests."""
    nothing = np.zeros(0, dtype=np.int64)
    return Step(
        decode_rows=np.full(num_rows, row), chunk_rows=nothing, chunk_starts=nothing, chunk_lens=nothing,
        token_ids_T=nothing, sampled_chunks=nothing, max_context_len=context, all_greedy=False, shared_len=0,
    )  # fmt: skip


def launches_of(arguments: list[str], num_rows: int) -> Counter[str]:
    """Launches of one decode step of so many rows, by name."""
    host, found = PluginHost.load(), Counter[str]()
    plain = ["engine.cuda_graphs=false", "engine.max_model_len=4096"]  # what a graph replays is launched here
    config = validate_run(compose([*plain, *arguments], host, RunKeys)[0].tree, host).config
    with pretended(CARDS["h200"], lambda *_: None), torch.inference_mode():
        worker, _ = dry_worker(config, host)
        hook = knobs.runtime.jit_cache_hook

        def count(*, fn: Any, **given: Any) -> bool:
            found[fn.jit_function.__name__.strip("_").removesuffix("_kernel")] += 1
            return True

        knobs.runtime.jit_cache_hook = count
        with Launches(found):
            worker.launch(decode_step(num_rows, worker.table.padding_row, 1024))
        knobs.runtime.jit_cache_hook = hook
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="decodes of the step")
    options, arguments = parser.parse_known_args()
    found = launches_of(arguments, options.rows)
    for name, number in found.most_common():
        print(f"{number:6} {name}")
    print(f"{found.total():6} in all")


if __name__ == "__main__":
    main()
