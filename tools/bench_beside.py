"""Hookline beside a peer on one machine: the same workloads and open loops, each engine in a process of its own.

python tools/bench_beside.py [WORKLOAD ...] [RATE ...] [peer=vllm] [model=qwen3_0_6b] [max_num_seqs=512]: names pick
workloads, numbers are requests per second of open loops of 400 requests; then comes the table. Weights are random, in
the shape of the preset or of a config.json; prompts are token ids, the same for both. First and best of two runs: the
first is what a user sees. A peer is "module:Class" with the methods of `Hookline` below; vllm is here, and is left out
if not installed. peer=none runs Hookline alone, whose keys of `engine` can be set: freeze_gc=false. workload.KEY=VALUE
changes all workloads and open loops.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hookline.core.bench.command import make_load
from hookline.core.bench.workload import Load, WorkloadConfig
from hookline.core.config.schema import build
from hookline.core.plugin.presets import CONF

WORKLOADS = ("single", "batch32", "mixed256", "short1024", "shared_prefix", "prefill")
PEERS = {"hookline": "tools.bench_beside:Hookline", "vllm": "tools.bench_beside:Vllm"}
NUM_OPEN, RUNS = 400, 2
RESULT = "RESULT "
"""Begins the lines that the parent reads."""
OF_ALL = "workload."
NO_CHANGES: Mapping[str, Any] = {}


class Hookline:
    """An engine under test. shape: a config.json; sizes: limits by Hookline's names."""

    def __init__(self, shape: dict[str, Any], sizes: dict[str, Any]) -> None:
        from hookline import AsyncLLM

        model = {"name": "qwen3_moe" if "num_experts" in shape else "qwen3", "weights": "random", "random_shape": shape}
        self.llm = AsyncLLM(model={**model, "checkpoint": ""}, engine=sizes)

    async def stream(self, prompt: list[int], num_tokens: int, seen: Any) -> None:
        """Complete one prompt with exactly so many tokens; `seen(count)` whenever some have come."""
        from hookline import SamplingParams

        params = SamplingParams(max_tokens=num_tokens, temperature=0.6, ignore_eos=True)
        async for delta in self.llm.stream(prompt, params):
            seen(len(delta.token_ids))

    def close(self) -> None:
        """End."""
        self.llm.close()


class Vllm:
    """The same of vLLM."""

    def __init__(self, shape: dict[str, Any], sizes: dict[str, Any]) -> None:
        vllm: Any = importlib.import_module("vllm")

        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text(json.dumps(shape))
        names = {"max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens"}
        limits = {theirs: sizes[ours] for ours, theirs in names.items()}
        arguments = vllm.AsyncEngineArgs(
            model=self._folder.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=sizes["max_model_len"], gpu_memory_utilization=0.9, **limits,
        )  # fmt: skip
        self._params, self._count = vllm.SamplingParams, 0
        self._engine = vllm.AsyncLLMEngine.from_engine_args(arguments)

    async def stream(self, prompt: list[int], num_tokens: int, seen: Any) -> None:
        self._count += 1
        params = self._params(max_tokens=num_tokens, temperature=0.6, ignore_eos=True, detokenize=False)
        so_far = 0
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, str(self._count)):
            count = len(output.outputs[0].token_ids)
            seen(count - so_far)
            so_far = count

    def close(self) -> None:
        self._engine.shutdown()


async def serve(engine: Any, load: Load) -> dict[str, Any]:
    """Send a load's requests when they arrive; tokens per second, and times of first tokens and of gaps in ms."""
    begun = time.perf_counter()
    firsts: list[float] = []
    gaps: list[float] = []

    async def one(request: Any) -> None:
        await asyncio.sleep(max(0.0, begun + request.arrival_s - time.perf_counter()))
        last = begun + request.arrival_s
        is_first = True

        def seen(count: int) -> None:
            nonlocal last, is_first
            now = time.perf_counter()
            if count:
                (firsts if is_first else gaps).append(1000 * (now - last))
                last, is_first = now, False

        await engine.stream(request.tokens, request.params.max_tokens, seen)

    await asyncio.gather(*(one(request) for request in load.requests))
    seconds = time.perf_counter() - begun
    return {
        "output_tok_s": load.num_output_tokens / seconds,
        "prompt_tok_s": load.num_prompt_tokens / seconds,
        "ttft_ms": percentiles(firsts),
        "gap_ms": percentiles(gaps),
    }


def percentiles(values: list[float]) -> list[float]:
    """The 50th, 90th and 99th."""
    return [round(float(one), 2) for one in np.percentile(values or [0.0], [50, 90, 99])]


def loads(name: str, vocab_size: int, changes: Mapping[str, Any] = NO_CHANGES) -> list[Load]:
    """A load for each run of a workload, or of an open loop if the name is a number."""
    if name in WORKLOADS:
        values = yaml.safe_load((CONF / "workload" / f"{name}.yaml").read_text())
    else:
        lengths = {"prompt_len": [64, 1024], "output_len": [16, 256]}
        values = {"num_prompts": NUM_OPEN, "request_rate": float(name), **lengths}
    workload = build(WorkloadConfig, {**values, **changes}, "workload")
    return [make_load(workload, vocab_size, repetition) for repetition in range(RUNS)]


def measure(
    side: str, target: str, names: list[str], shape: dict[str, Any], sizes: dict[str, Any], changes: Mapping[str, Any]
) -> None:
    """In the process of one engine: print a result for each workload."""
    begun = time.perf_counter()
    module, _, attribute = target.partition(":")

    async def run() -> None:
        engine = getattr(importlib.import_module(module), attribute)(shape, sizes)
        await engine.stream([1, 2, 3], 1, lambda count: None)
        tell(side, "ready", {"seconds": time.perf_counter() - begun})
        for name in names:
            runs = [await serve(engine, load) for load in loads(name, shape["vocab_size"], changes)]
            tell(side, name, {"first": runs[0], "best": max(runs, key=lambda one: one["output_tok_s"])})
        engine.close()

    asyncio.run(run())


def tell(side: str, name: str, found: dict[str, Any]) -> None:
    print(RESULT + json.dumps({"side": side, "name": name, **found}), flush=True)


def run_side(
    side: str,
    target: str,
    names: list[str],
    preset: str,
    sizes: dict[str, Any],
    changes: Mapping[str, Any] = NO_CHANGES,
) -> dict[str, Any]:
    """Results of one engine by workload, from a process of its own."""
    task = json.dumps([side, target, names, shape_of(preset), sizes, dict(changes)])
    root = str(Path(__file__).parents[1])  # behind an installed hookline, which the tree must not hide
    boot = (
        f"import sys, json; sys.path.append({root!r}); from tools.bench_beside import measure; "
        "measure(*json.loads(sys.argv[1]))"
    )
    found: dict[str, Any] = {}
    with subprocess.Popen([sys.executable, "-c", boot, task], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT):
                print(line.strip(), flush=True)
                record = json.loads(line.removeprefix(RESULT))
                found[record["name"]] = record
    if process.returncode:
        print(f"{side} ended with exit code {process.returncode}", file=sys.stderr)
    return found


def shape_of(preset: str) -> dict[str, Any]:
    """The config.json of a model's preset, or the one at this path."""
    if preset.endswith(".json"):
        return dict(json.loads(Path(preset).read_text()))
    return dict(yaml.safe_load((CONF / "model" / f"{preset}.yaml").read_text())["random_shape"])


def table(names: list[str], sides: dict[str, dict[str, Any]]) -> list[str]:
    """The rows of TARGETS: tokens per second of the first and the best run, and of open loops the waits."""
    first, second = sides
    lines = [f"| | {first}: first, best | {second}: first, best | ratio: first, best |", "|---|---|---|---|"]
    for name in names:
        records = [sides[side].get(name) for side in sides]
        kind = "prompt_tok_s" if name == "prefill" else "output_tok_s"
        cells = ["–" if one is None else f"{one['first'][kind]:,.0f}, {one['best'][kind]:,.0f}" for one in records]
        theirs, ours = records
        ratio = "–"
        if theirs is not None and ours is not None:
            ratio = ", ".join(f"{ours[run][kind] / theirs[run][kind]:.2f}" for run in ("first", "best"))
        lines.append(f"| {name if name in WORKLOADS else name + '/s'} | {cells[0]} | {cells[1]} | {ratio} |")
        if name not in WORKLOADS:
            for what, key in (("first token", "ttft_ms"), ("gap", "gap_ms")):
                waits = [_waits(one, key) for one in records]
                lines.append(f"| {name}/s, {what} p50/p90/p99 ms, first run | {waits[0]} | {waits[1]} | |")
    return lines


def _waits(record: dict[str, Any] | None, key: str) -> str:
    return "–" if record is None else " / ".join(f"{one:.1f}" for one in record["first"][key])


def main(arguments: list[str]) -> int:
    settings = dict(one.split("=", 1) for one in arguments if "=" in one)
    names = [one for one in arguments if "=" not in one] or [*WORKLOADS, "40", "120"]
    peer, preset = settings.pop("peer", "vllm"), settings.pop("model", "qwen3_0_6b")
    given = {name: yaml.safe_load(value) for name, value in settings.items()}
    changes = {name.removeprefix(OF_ALL): value for name, value in given.items() if name.startswith(OF_ALL)}
    sizes: dict[str, Any] = {"max_num_seqs": 512, "max_num_batched_tokens": 16384, "max_model_len": 4096}
    sizes |= {name: value for name, value in given.items() if not name.startswith(OF_ALL)}
    if peer == "none":
        measure("hookline", f"{__name__}:Hookline", names, shape_of(preset), sizes, changes)
        return 0
    sides: dict[str, dict[str, Any]] = {peer: {}, "hookline": {}}
    target = PEERS.get(peer, peer)
    if peer in PEERS and importlib.util.find_spec(peer) is None:
        print(f"{peer} is not installed, so it is missing from the table: pip install {peer}", file=sys.stderr)
    else:
        sides[peer] = run_side(peer, target, names, preset, sizes, changes)
    sides["hookline"] = run_side("hookline", PEERS["hookline"], names, preset, sizes, changes)
    print(*table(names, sides), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
