"""Compiles kernels for cards that are not here until their shared memory is known, and fails if a card has less.

    python tools/fit_kernels.py                                                       # PLAN, as .ci/run does
    python tools/fit_kernels.py --card rtx4090 --of "model=qwen3_1_7b engine.batch_invariant=true"

Compiled is what engines launch until they are ready, as in compare_kernels.py, but neither to machine code nor for
captured graphs, which launch two small kernels more. A variant is compiled once for all cards whose compute capability
begins with the same number, and a kernel without a matrix product for the first card alone: such a kernel asks for as
much on every card. The exit code is 1 if a kernel does not fit its card, 2 if one does not compile.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.compare_kernels import Launch, described, launches_of, source_digest

MODELS = ("qwen3_1_7b", "qwen3_8b", "gpt_oss_20b", "qwen3_30b_a3b", "gemma4_26b_a4b")
"""Gemma 4 is the one with heads of 512."""
WIDE_HEADS, EXPERTS = ("gemma3_4b",), ("qwen3_30b_a3b",)
"""With heads of 256, and of width 2,048 with experts: those that ask for most, where time does not allow all."""
QUANTISED = ("qwen3_30b_a3b quantization=fp8_block",)
"""For the oldest card, which has no type for these values: pointers to them do not compile there."""
LATENT = ("deepseek_v2_lite",)
"""Whose attention has kernels of its own."""
NARROW = ("qwen3_1_7b",)
"""Of width 2,048 without experts; its kernels are those of narrower Qwen3 models, too."""
PLAN = {
    "rtx4090": MODELS, "rtx5090": (*WIDE_HEADS, *EXPERTS), "b200": EXPERTS, "h100": (*EXPERTS, *LATENT),
    "a100": (*EXPERTS, *QUANTISED), "rtx3090": (*WIDE_HEADS, *NARROW),
}  # fmt: skip
"""Models of each card, in ordinary and in batch-invariant mode: two minutes on two cores. The most come first."""
ONLY_ORDINARY = ("gpt_oss_20b", *QUANTISED, *LATENT)
"""Models that have no batch-invariant mode, or none that time allows."""
IMPORTED_ONCE = (
    "hookline.core.prebuild.dry_run", "hookline.plugins.kernels.triton_backend", "triton", "triton.experimental.gluon",
    "torch._dynamo", "torch._inductor.config", "sympy", "hydra.main",
)  # fmt: skip
"""What a dry run imports is imported before the processes are forked: each would take three seconds for it."""
PART = 5
"""Configurations whose launches one process finds."""
EAGER = "engine.cuda_graphs=false"
NO_EFFECT = ("LATE",)
"""Constants of kernels that say when the next kernel starts, and do not change what a kernel keeps."""


@dataclass
class Fits:
    """What the kernels of a card ask for.

    most: bytes of the kernel that asks for most, and its name. over, failed: a line for each variant that does not fit,
    and that does not compile.
    """

    card: str
    num_variants: int = 0
    num_compiled: int = 0
    most: tuple[int, str] = (0, "")
    over: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Fits) -> None:
        """Count in what other kernels ask for on this card."""
        self.num_variants += other.num_variants
        self.num_compiled += other.num_compiled
        self.most = max(self.most, other.most)
        self.over += other.over
        self.failed += other.failed


class Stopped(Exception):
    """Raised where a compiler need not go on. Arguments: what was compiled, its bytes, whether it has a product."""


@contextmanager
def stopping(options: Any, known: Mapping[str, int], kind: str) -> Iterator[None]:
    """Inside, Triton raises Stopped once a kernel's shared memory is known: at once if its code is among `known`."""
    from triton._C.libtriton import nvidia
    from triton.backends.nvidia.compiler import CUDABackend

    make_ttir, make_llir, code = CUDABackend.make_ttir, CUDABackend.make_llir, [("", False)]

    def made_ttir(module: Any, *given: Any) -> Any:
        module = make_ttir(module, *given)
        text = str(module)
        code[0] = f"{kind} {source_digest(text, options)}", "tt.dot" in text
        if code[0][0] in known:
            raise Stopped(code[0][0], known[code[0][0]], code[0][1])
        return module

    def made_llir(backend: Any, module: Any, *given: Any) -> Any:
        def allocated(passes: Any, *_: Any) -> None:  # all passes up to the one that follows allocation
            passes.run(module, "allocated")
            raise Stopped(code[0][0], module.get_int_attr("ttg.shared"), code[0][1])

        with patch.object(nvidia.passes.ttgpuir, "add_to_llvmir", allocated):
            return make_llir(backend, module, *given)

    with (
        patch.object(CUDABackend, "make_ttir", staticmethod(made_ttir)),
        patch.object(CUDABackend, "make_llir", made_llir),
    ):
        yield


def fits(launches: Mapping[str, Sequence[Launch]]) -> dict[str, Fits]:
    """What one kernel asks for on each card, of what is launched there; cards in the plan's order.

    All its cards in one process, which knows what it has compiled; processes share the kernels.
    """
    from hookline.core.prebuild.pretended import card_named, target_of

    known, plain, found = dict[str, int](), False, dict[str, Fits]()
    told_before = dict[str, int]()  # bytes by what a variant is compiled for: it need not even be traced again
    for card_name, of_card in launches.items():
        card, done = card_named(card_name), set[str]()
        fit, kind = found.setdefault(card_name, Fits(card_name, len(of_card))), str(card.compute_capability[0])
        for number, (module, name, specialization) in enumerate(of_card):
            given = json.loads(specialization)
            told = " ".join(word for word in described(given).split() if word.partition("=")[0] not in NO_EFFECT)
            if told in done or plain:
                continue
            done.add(told)
            # Not all cards of a generation have values of 8 bits: kernels of those may compile for one of them alone.
            variant = f"{kind if 'fp8' not in told else card.compute_capability} {told}"
            kernel = getattr(importlib.import_module(module), name)
            if not number:
                kernel.device_caches.clear()  # they hold the target of the card before
            try:
                if variant not in told_before:
                    with target_of(card), stopping(given["options"], known, kind):
                        kernel.preload(specialization)
            except Stopped as stopped:
                code, told_before[variant], has_product = stopped.args
                fit.num_compiled += code not in known
                known[code] = told_before[variant]
                plain = not has_product
            except Exception as error:  # whatever a compiler raises
                fit.failed.append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]} ({told})")
                continue
            num_bytes = told_before[variant]
            fit.most = max(fit.most, (num_bytes, name))
            if num_bytes > card.shared_memory_bytes:
                fit.over.append(f"{name} asks for {num_bytes:,} bytes of shared memory ({told})")
    return found


def launches_on(card: str, configurations: Sequence[str]) -> list[Launch]:
    """What these overrides launch on a card, found in one process: it does once what dry runs share."""
    return [launch for overrides in configurations for launch in launches_of(overrides, card)]


def parts_of(plan: Mapping[str, Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    """Cards with some of their overrides each, at most PART, so that processes end at about the same time."""
    parts = [(card, plan[card][at : at + PART]) for card in plan for at in range(0, len(plan[card]), PART)]
    return sorted(parts, key=lambda part: -len(part[1]))


def check(plan: Mapping[str, Sequence[str]], num_processes: int) -> list[Fits]:
    """All cards of the plan, whose values are overrides: first what is launched, then each kernel for all its cards."""
    from hookline.core.config.compose import compose
    from hookline.core.plugin.host import PluginHost
    from hookline.core.run.settings import RunKeys

    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    compose(["model.weights=random"], PluginHost.load(), RunKeys)  # imports what each process would import by itself
    gc.freeze()
    found = {card: Fits(card) for card in plan}
    context, parts = multiprocessing.get_context("fork"), parts_of(plan)
    kernels = defaultdict[tuple[str, str], dict[str, list[Launch]]](dict)
    with context.Pool(num_processes, maxtasksperchild=1) as pool:  # launches remember the card
        for (card, _), launches in zip(parts, pool.starmap(launches_on, parts, chunksize=1), strict=True):
            for launch in launches:
                of_card = kernels[launch[:2]].setdefault(card, [])
                if launch not in of_card:
                    of_card.append(launch)
    most_first = sorted(kernels.values(), key=lambda cards: -sum(map(len, cards.values())))
    with context.Pool(num_processes) as pool:
        for of_kernel in pool.imap_unordered(fits, most_first):
            for fit in of_kernel.values():
                found[fit.card].add(fit)
    return list(found.values())


def report(found: Sequence[Fits]) -> int:
    """Print a line for each card and each kernel that does not fit, and return the exit code."""
    from hookline.core.prebuild.pretended import CARDS

    print(f"{'card':8} {'capability':>10} {'variants':>8} {'compiled':>8} {'most bytes':>10} {'has':>8}  of")
    for one in found:
        card, (num_bytes, name) = CARDS[one.card], one.most
        capability, has = ".".join(map(str, card.compute_capability)), card.shared_memory_bytes
        print(
            f"{one.card:8} {capability:>10} {one.num_variants:8} {one.num_compiled:8} {num_bytes:10,} {has:8,}  {name}"
        )
    for one in found:
        for line in one.over:
            print(f"{one.card} has {CARDS[one.card].shared_memory_bytes:,}: {line}")
        for line in one.failed:
            print(f"{one.card}, not compiled: {line}")
    return 2 if any(one.failed for one in found) else 1 if any(one.over for one in found) else 0


def overrides_of(models: Sequence[str]) -> list[str]:
    """Of these models in all modes that they have."""
    invariant = [f"model={name} {EAGER} engine.batch_invariant=true" for name in models if name not in ONLY_ORDINARY]
    return [*(f"model={name} {EAGER}" for name in models), *invariant]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", action="append", help="a card in place of those of the plan")
    parser.add_argument("--of", action="append", help="overrides, or a file whose launch() launches kernels")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    plan = {card: options.of or overrides_of(PLAN.get(card, MODELS)) for card in options.card or PLAN}
    started = time.perf_counter()
    # A kernel that was compiled before would be read, and its memory not be known.
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        code = report(check(plan, options.processes))
    print(f"{time.perf_counter() - started:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
