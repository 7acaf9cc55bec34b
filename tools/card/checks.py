"""The checks: which tools each runs with which arguments, in the order of their worth."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.card import tables
from tools.card.jobs import ROOT, SECONDS_LEFT, Job
from tools.card.tables import INVARIANT, SIX, STRUCTURED, Row

SMALL = ("engine.max_num_seqs=8", "engine.cpu_cache_gib=0.1", "repeats=1")
SMALL_LOAD = (
    "workload.num_prompts=2",
    "workload.prompt_len=[4,8]",
    "workload.output_len=[3,4]",
    "workload.shared_prefix_len=0",
)


GRAMMARS = {
    "as it is": (),
    "one thread": ("grammars.num_threads=1",),
}
DECODES = {
    "gemma3_4b": (),
    "llama3_8b": (),
    "gpt_oss_20b": (),
    "qwen3_next_80b_a3b": ("model.hf_overrides.num_hidden_layers=12",),
    "qwen3_8b": (),
}
"""Presets, and what fits them into the memory of one card."""
OPEN_RATE = 60
"""Requests per second of the open loop of `shapes`."""


def engine(options: argparse.Namespace, preset: str = "qwen3_0_6b") -> list[str]:
    """Overrides for the engine of a check: the preset's shape with random weights, or the bundled checkpoint."""
    model = SMALL if options.small else (f"model={preset}", "model.weights=random")
    return [*model, f"device={options.device}", *(SMALL_LOAD if options.small else ()), *options.overrides]


def first_minute(options: argparse.Namespace, rate: int, seconds: float) -> list[str]:
    return ["tools/first_minute.py", *(("4", "0.5") if options.small else (str(rate), str(seconds))), *engine(options)]


def start_jobs(options: argparse.Namespace) -> list[Job]:
    caches = {name: str(options.scratch / name) for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
    labels = ("cold", "warm", "warm again")[: 2 if options.small else 3]
    return [Job(label, first_minute(options, 40, 2), caches) for label in labels]


def workloads_jobs(options: argparse.Namespace) -> list[Job]:
    here: tuple[dict[str, str], Path] = {}, ROOT
    trees = {"now": here}
    if options.before is not None:
        trees = {"before": other_tree(options.before, options.scratch), "now": here}
    bench = ["tools/bench_all.py", *(SIX[::5] if options.small else SIX), *engine(options)]
    host = ["tools/bench_host.py", *(("--steps", "2", "--repeats", "1", "--most", "16") if options.small else ())]
    turns = options.turns or len(trees)
    jobs = [Job(label, bench, *tree) for _ in range(turns) for label, tree in trees.items()]
    return [*jobs, *(Job(label, host, *tree) for label, tree in trees.items())]


def other_tree(given: Path, folder: Path) -> tuple[dict[str, str], Path]:
    """Environment and root of another tree: a wheel, or a folder with tools/ and either a wheel or the package."""
    wheels, package = [given] if given.suffix == ".whl" else sorted(given.glob("*.whl")), given
    if wheels:
        package = folder / "before"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(package)]
        subprocess.run([*pip, *map(str, wheels)], check=True)
    path = os.pathsep.join([str(package.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}, given.resolve() if (given / "tools").is_dir() else ROOT


def grammars_jobs(options: argparse.Namespace) -> list[Job]:
    tokenizer = [f"model.tokenizer={options.tokenizer.resolve()}"] if options.tokenizer else []
    common = ["grammars=llguidance", *tokenizer, *engine(options)]
    commands = {
        label: ["tools/bench_all.py", *STRUCTURED[: 2 if keys else 3], *keys, *common]
        for label, keys in GRAMMARS.items()
    }
    return [Job(label, command) for _ in range(options.turns or 2) for label, command in commands.items()]


def decode_jobs(options: argparse.Namespace) -> list[Job]:
    if options.small:
        lengths = ["--rows", "2", "--prompt", "4", "--tokens", "16", "--kernels"]
        return [Job("the bundled checkpoint", ["tools/bench_decode.py", *lengths, *engine(options)])]
    shapes = options.shapes or DECODES
    return [
        Job(one, ["tools/bench_decode.py", "--kernels", *engine(options, one), *DECODES.get(one, ())]) for one in shapes
    ]


def shapes_jobs(options: argparse.Namespace) -> list[Job]:
    names = [*(INVARIANT[:1] if options.small else INVARIANT)]
    repeats = [] if options.small else ["repeats=2"]
    shapes = options.shapes or ("qwen3_8b", "qwen3_30b_a3b")
    jobs = [Job(one, ["tools/bench_all.py", *names, *engine(options, one), *repeats]) for one in shapes]
    rate = f"workload.request_rate={OPEN_RATE}"
    open_loop = ["tools/bench_all.py", "poisson", rate, *engine(options, shapes[0]), *repeats]
    return [*jobs, Job(f"{shapes[0]} {OPEN_RATE}/s", open_loop)]


def invariance_jobs(options: argparse.Namespace) -> list[Job]:
    bench = ["tools/bench_all.py", *INVARIANT, *engine(options)]
    modes = [("off", "false"), ("on", "true")] * (options.turns or 1)
    jobs = [Job(label, [*bench, f"engine.batch_invariant={value}"]) for label, value in modes]
    chosen = ["-k", "random_batches or without_the_mode"]
    tests = ["tools/gpu_tests.py", "--seconds", SECONDS_LEFT, "tests/test_gpu_batch_invariant.py", "--", "-s", *chosen]
    return [*jobs, Job("bits", tests, {"HOOKLINE_BATCHES": str(options.batches)})]


def serving_jobs(options: argparse.Namespace) -> list[Job]:
    load = ["120", "workload.num_prompts=1200"]
    if options.small:
        tiny = f"model={ROOT}/plugins/models/qwen3_tiny/config.json"
        load = ["120", tiny, "max_num_seqs=8", "max_model_len=2048", *SMALL_LOAD]
    beside = ["tools/bench_beside.py", "peer=none", *load]
    values = [f"freeze_gc={value}" for value in ("true", "false")]
    jobs = [Job(one, [*beside, one]) for _ in range(options.turns or 1) for one in values]
    rates = (40,) if options.small else (40, 120, 250)
    return [*jobs, *(Job(f"{rate}/s", first_minute(options, rate, 60)) for rate in rates)]


def tests_jobs(options: argparse.Namespace) -> list[Job]:
    first = ["--from", options.first] if options.first else []
    processes = ["--processes", str(max(1, min(8, (os.cpu_count() or 1) // 2)))]
    return [Job("tests", ["tools/gpu_tests.py", "--seconds", SECONDS_LEFT, *processes, *first, *options.overrides])]


@dataclass(frozen=True)
class Check:
    """help: what it shows. jobs: in the order of their worth. table: of the jobs, as far as they were run."""

    help: str
    budget_s: int
    jobs: Callable[[argparse.Namespace], list[Job]]
    table: Callable[[list[Job]], list[Row]]


CHECKS = {
    "start": Check("nothing compiled until ready, then warm", 100, start_jobs, tables.start_table),
    "workloads": Check("six workloads, host time, --before", 240, workloads_jobs, tables.workloads_table),
    "grammars": Check("batch32 with schemas beside plain", 140, grammars_jobs, tables.grammars_table),
    "decode": Check("decode steps beside their floors", 240, decode_jobs, tables.decode_table),
    "shapes": Check("three workloads of larger models, an open loop", 260, shapes_jobs, tables.shapes_table),
    "invariance": Check("batch-invariant: speed and bits", 300, invariance_jobs, tables.invariance_table),
    "serving": Check("AsyncLLM's waits, first minutes", 310, serving_jobs, tables.serving_table),
    "tests": Check("the GPU tests, those of kernels in several processes", 500, tests_jobs, tables.tests_table),
}
