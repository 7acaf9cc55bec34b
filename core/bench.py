"""`python -m core.bench workload=NAME`: the speed of a configuration under a load, as a table and one JSON line.

Bare at import. Start-up and a warm-up request are measured apart; the best of the timed repetitions counts. A prompt
is a list of token ids and no text is made, so the engine alone is timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.engine import Engine, StepStats
    from core.llm import LLM
    from core.plugin_host import PluginHost
    from core.workload import Load, WorkloadConfig

BENCH_KEYS = ("workload", "repeats", "result")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, as `core.run` does."""
    from core.run import guarded

    return guarded(_run, arguments)


def _run(arguments: list[str]) -> int:
    from core.compose import compose
    from core.plugin_host import PluginHost
    from core.run import is_sweep
    from core.sweep import run_jobs

    host = PluginHost.load()
    host.log_problems()
    jobs = compose(arguments, host, config_name="bench")
    if not jobs:
        return 0
    if is_sweep(arguments):
        return run_jobs(jobs, "core.bench", "result")
    print_result(measure(jobs[0].tree, host), jobs[0].tree.get("result"))
    return 0


def measure(tree: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    """Build the engine a tree describes, run its workload and return the result line.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from core.config import ENGINE_KEYS, validate
    from core.errors import ConfigError
    from core.llm import LLM
    from core.profiling import Profile, profiled
    from core.schema import build
    from core.workload import WorkloadConfig

    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    profile = Profile.of(tree)
    workload: WorkloadConfig = build(WorkloadConfig, tree.get("workload") or {}, "workload")
    repeats = tree.get("repeats", 2)
    if not isinstance(repeats, int) or repeats < 1:
        raise ConfigError(f"repeats={repeats!r} must be a whole number of at least 1")
    with LLM.from_config(config, host) as llm:
        start_s = first_token_s(llm)
        runs = [time_load(llm.engine, workload, repetition) for repetition in range(repeats)]
        best = min(runs, key=lambda run: run["seconds"])
        if profile is not None:  # apart, since tracing takes time
            with profiled(llm, profile):
                time_load(llm.engine, workload, repeats)
        return {**describe(llm, workload), "start_to_first_token_s": round(start_s, 3), **best}


def first_token_s(llm: LLM) -> float:
    """Seconds from the start of this process to the first token, which this draws."""
    from core.sampling import SamplingParams

    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
    started = process_age_s()
    llm.generate([[4, 5, 6]], SamplingParams(max_tokens=8, ignore_eos=True))
    return started


def process_age_s() -> float:
    """Seconds since this process was started, imports included; since the first call where the system cannot tell."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        import os

        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()


def time_load(engine: Engine, workload: WorkloadConfig, repetition: int) -> dict[str, Any]:
    """Run one repetition to its end; throughput in tokens per second."""
    from core.step_times import times_by_kind
    from core.workload import draw_load

    engine.time_steps()
    steps: list[StepStats] = []
    load = draw_load(workload, engine.limits.vocab_size, repetition)
    counts = {"steps": 0, "prefill_tokens": 0, "cached_tokens": 0, "preemptions": 0}
    last = engine.last_stats
    started = time.perf_counter()
    _add(engine, load)
    while engine.has_work:
        engine.step()
        stats = engine.last_stats
        assert stats is not None
        counts["steps"] += 1
        if stats is not last:
            steps.append(stats)
        last = stats
        counts["prefill_tokens"] += stats.num_prefill_tokens
        counts["cached_tokens"] += stats.num_cached_tokens
        counts["preemptions"] += stats.num_preemptions
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 4),
        "output_tok_s": round(load.num_output_tokens / seconds, 1),
        "prompt_tok_s": round(load.num_prompt_tokens / seconds, 1),
        "prompt_tokens": load.num_prompt_tokens,
        "output_tokens": load.num_output_tokens,
        **counts,
        "step_times": times_by_kind(columns(steps)),
    }


def columns(steps: Sequence[StepStats]) -> dict[str, Any]:
    """What `core.step_times` wants to know of each step."""
    import numpy as np

    names = {"prefill_tokens": "num_prefill_tokens", "decode_rows": "num_decode_tokens"}
    names |= {name: name for name in ("host_s", "device_s", "idle_s")}
    table = {column: [getattr(stats, name) for stats in steps] for column, name in names.items()}
    return {column: np.array(values, dtype=np.float64) for column, values in table.items()}


def _add(engine: Engine, load: Load) -> None:
    for prompt, params in zip(load.prompts, load.params, strict=True):
        engine.add(prompt, params)


def describe(llm: LLM, workload: WorkloadConfig) -> dict[str, Any]:
    """What was measured: options, engine keys, versions and the device."""
    from importlib.metadata import version

    import torch

    config = llm.config
    on_gpu = llm.device.type == "cuda"
    return {
        "model": config.model.config.checkpoint,
        "weights": config.model.config.weights,
        "scheduler": config.scheduler.name,
        "sampler": config.sampler.name,
        "kernels": llm.kernels_name,
        "engine": asdict(config.engine),
        "workload": asdict(workload),
        "device": torch.cuda.get_device_name(llm.device) if on_gpu else f"cpu, {torch.get_num_threads()} threads",
        "peak_memory_gib": round(torch.cuda.max_memory_reserved(llm.device) / 2**30, 2) if on_gpu else None,
        "versions": {name: version(name) for name in ("hookline", "torch")},
    }


def print_result(result: Mapping[str, Any], path: str | None) -> None:
    """A table and the JSON line; the line also goes to the end of `path`."""
    import json

    from core.step_times import time_lines

    shown = ("seconds", "output_tok_s", "prompt_tok_s", "steps", "cached_tokens", "preemptions")
    for key in ("device", "kernels", "scheduler", *shown, "start_to_first_token_s"):
        print(f"{key:24} {result[key]}")
    print(*time_lines(result["step_times"]), sep="\n")
    line = json.dumps(result)
    print(line)
    if path:
        with Path(path).open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
