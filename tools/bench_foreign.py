"""A policy from elsewhere (examples/hookline-sjf, installed) beside the built-in one, in the same engine.

python tools/bench_foreign.py --host      an executor that computes nothing: CPU time of a step, overlap on
python tools/bench_foreign.py             a GPU: Qwen3-0.6B with random weights, policies swapped in between
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from bench_host import NoWork
from hookline_sjf import ShortestJobFirstConfig
from hookline_sjf.policy import ShortestJobFirst

from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.contracts import Limits
from hookline.core.engine.engine import Engine
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.requests.admission import EngineLimits
from hookline.core.sampling_params import UNTRUNCATED, SamplingParams
from hookline.plugins.schedulers import PrefillFirstConfig
from hookline.plugins.schedulers.prefill_first import PrefillFirst

BLOCKS, BLOCK_SIZE = 60_000, 16
HOST_LOADS = {
    "32 requests": (32, 32, (512, 512), (512, 512)),
    "256 requests": (256, 256, (100, 1024), (100, 1024)),
    "1,024 requests, 256 at a time": (1024, 256, (100, 500), (50, 200)),
}
"""Requests, seats, and the range of prompt and output lengths in tokens."""
GPU_LOADS = {
    "batch32": WorkloadConfig(num_prompts=32, prompt_len=(512, 512), output_len=(512, 512)),
    "128 requests, 32 at a time": WorkloadConfig(num_prompts=128, prompt_len=(64, 512), output_len=(32, 256)),
}
REPETITIONS = 5


def policies() -> list[Any]:
    return [PrefillFirst(PrefillFirstConfig()), ShortestJobFirst(ShortestJobFirstConfig())]


def host_us(policy: Any, count: int, seats: int, prompt: tuple[int, int], output: tuple[int, int]) -> float:
    limits = EngineLimits(Limits(seats, 16_384, 4096, BLOCK_SIZE, BLOCKS), 50_000, 30.0, frozenset(), overlap=True)
    engine, rng = Engine(policy, NoWork(seats), BlockPool(BLOCKS, BLOCK_SIZE, caching=True), limits), random.Random(0)
    for _ in range(count):
        params = SamplingParams(max_tokens=rng.randint(*output), seed=0, ignore_eos=True, **UNTRUNCATED)
        engine.add([rng.randrange(50_000) for _ in range(rng.randint(*prompt))], params)
    started, num_steps = time.process_time(), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    return (time.process_time() - started) / num_steps * 1e6


def gpu_seconds(engine: Engine, policy: Any, workload: WorkloadConfig, repetition: int) -> float:
    engine.scheduler = policy
    for request in draw_load(workload, engine.limits.vocab_size, repetition).requests:
        engine.add(request.tokens, request.params)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def on_host() -> None:
    for name, sizes in HOST_LOADS.items():
        best = [min(host_us(policies()[which], *sizes) for _ in range(REPETITIONS)) for which in (0, 1)]
        print(f"{name}: prefill_first {best[0]:.1f} us a step, sjf {best[1]:.1f}, ratio {best[1] / best[0]:.3f}")


def on_gpu() -> None:
    from hookline import LLM

    model = {"name": "qwen3_0_6b", "weights": "random"}
    with LLM(model=model, engine={"max_num_seqs": 32, "max_model_len": 2048}) as llm:
        for name, workload in GPU_LOADS.items():
            gpu_seconds(llm.engine, policies()[0], workload, 0)
            runs = [
                [gpu_seconds(llm.engine, policy, workload, 2 * repetition + which) for which, policy in pair]
                for repetition in range(1, REPETITIONS)
                for pair in [list(enumerate(policies()))]
            ]
            best = [min(column) for column in zip(*runs, strict=True)]
            tokens = draw_load(workload, llm.engine.limits.vocab_size).num_output_tokens
            speeds = [tokens / seconds for seconds in best]
            print(
                f"{name}: prefill_first {speeds[0]:.0f} tok/s, sjf {speeds[1]:.0f}, ratio {speeds[1] / speeds[0]:.3f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    on_host() if parser.parse_args().host else on_gpu()
