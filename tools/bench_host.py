"""What one decode step costs the host: the real engine and policies over an executor that computes nothing.

A script, not a test: microseconds per step of pure decodes, by number of running requests and policy, and with
`--profile` where they go; with `--windows` for a model that has them on 29 of 34 layers. The executor answers with
prepared tokens, so model, device and sampler cost nothing. With `--drafter`, steps have drafts, and those that wait for
the tokens before them are told apart: for how long the device would wait, from the tokens to the next launch.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from typing import Any

import numpy as np
import torch

from hookline.core.contracts import DrafterSpec, Limits
from hookline.core.engine.engine import Engine
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.groups import ALL_TOKENS, CacheGroups
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.sampling_params import UNTRUNCATED, SamplingParams
from hookline.core.speculation.speculation import Speculation
from hookline.core.step.executor import Executor, StepResult
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock
from hookline.core.worker.results.token_transfer import TransferredTokens

VOCAB_SIZE = 151936
PERIOD = 7
"""After so many tokens, texts with drafts repeat themselves."""
EOS = frozenset({151645, 151643})


class NoWork(Executor):
    """An executor whose tokens are there at once."""

    def __init__(self, max_num_seqs: int) -> None:
        self.tokens_R = torch.randint(0, 10000, (max_num_seqs,), generator=torch.Generator().manual_seed(0))

    def launch(self, step: Step) -> Any:
        return TransferredTokens(self.tokens_R[: step.num_sampled])

    def collect(self, handle: TransferredTokens) -> StepResult:
        return StepResult(handle.wait())

    def time_steps(self) -> Clock:
        raise NotImplementedError("there is no device to time")

    def close(self) -> None:
        pass


class Repeating(NoWork):
    """An executor whose token at each position is that of PERIOD positions before; notes when tokens were collected and
    the next step was launched.
    """

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self.length_R = np.ones(max_num_seqs, dtype=np.int64)
        self.collected_s: float | None = None
        self.waits_s: list[float] = []

    def launch(self, step: Step) -> Any:
        if self.collected_s is not None:
            self.waits_s.append(time.perf_counter() - self.collected_s)
        decodes, lens, starts = step.decode_rows, step.chunk_lens, step.chunk_starts
        self.length_R[decodes] += 1
        chunks = step.sampled_chunks
        ends = np.searchsorted(chunks, chunks, side="right")
        behind = ends - np.arange(len(chunks))
        positions = (starts + lens)[chunks] - behind + 1
        self.length_R[step.chunk_rows[chunks]] = positions + 1
        drawn = np.concatenate([self.length_R[decodes] - 1, positions]) % PERIOD
        self.collected_s = None
        return drawn

    def collect(self, handle: Any) -> StepResult:
        self.collected_s = time.perf_counter()
        return StepResult(handle)


def drafting(name: str) -> Speculation:
    """The speculation with a drafter's defaults."""
    entry = PluginHost.load().choose("drafter", name)
    drafter = entry.load()(entry.config() if entry.config is not None else None, DrafterSpec(VOCAB_SIZE, 512, 4096))
    return Speculation(drafter, name, InstalledExtensions(), VOCAB_SIZE, max_num_batched_tokens=16384)


def decoding_engine(
    policy: str,
    num_running: int,
    num_waiting: int,
    *,
    ignore_eos: bool,
    groups: CacheGroups = ALL_TOKENS,
    drafter: str = "",
) -> Engine:
    """An engine whose `num_running` seats are all taken by requests that decode."""
    limits = Limits(num_running, 16384, 4096, 64, num_running * 64 * groups.num_groups, groups.num_groups)
    entry = PluginHost.load().choose("scheduler", policy)
    scheduler = entry.load()(entry.config() if entry.config is not None else None)
    pool = BlockPool(limits.num_blocks, limits.block_size)
    engine_limits = EngineLimits(limits, VOCAB_SIZE, 30.0, EOS, overlap=True)
    executor, speculation = (Repeating(num_running), drafting(drafter)) if drafter else (NoWork(num_running), None)
    engine = Engine(scheduler, executor, pool, engine_limits, groups=groups, decoding=speculation)
    params = SamplingParams(max_tokens=2000, ignore_eos=ignore_eos, **UNTRUNCATED)
    for index in range(num_running + num_waiting):
        length = 100 + index % 64
        engine.add([at % PERIOD for at in range(length)] if drafter else [index] * length, params)
    while len(engine.queue.running) < num_running or any(one.is_prefilling for one in engine.queue.running.values()):
        engine.step()
    return engine


def step_us(engine: Engine, num_steps: int) -> float:
    """Mean microseconds of a step."""
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    return 1e6 * (time.perf_counter() - start) / num_steps


def drafted_us(engine: Engine, num_steps: int) -> tuple[float, float]:
    """Median microseconds from a step's tokens to the launch of the next one, and of a step."""
    executor: Any = engine.executor
    executor.waits_s, executor.collected_s = [], None
    whole_us = step_us(engine, num_steps)
    return 1e6 * statistics.median(executor.waits_s), whole_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also print the functions that take longest at 512")
    parser.add_argument("--windows", action="store_true", help="layers as in Gemma3-4B: windows of 1,024, five full")
    parser.add_argument("--most", type=int, default=512, help="leave out more running requests than so many")
    parser.add_argument(
        "--drafter", default="", help="steps with drafts of this one, of 1 and 32 requests, and no others"
    )
    options = parser.parse_args()
    if options.drafter:
        for num_running in (1, 32):
            best_us = [float("inf")] * 2
            for _ in range(options.repeats):
                engine = decoding_engine("prefill_first", num_running, 0, ignore_eos=True, drafter=options.drafter)
                gc.collect()
                found_us = drafted_us(engine, options.steps)
                best_us = [min(pair) for pair in zip(best_us, found_us, strict=True)]
            told = "{:8.1f} us from tokens to launch, {:8.1f} us a step".format(*best_us)
            print(f"{options.drafter:14} {num_running:4} decoding: {told}")
        return
    groups = CacheGroups((None, *[1024] * 6), (), 0, ()) if options.windows else ALL_TOKENS
    for policy in ("prefill_first", "chunked"):
        for num_running, num_waiting in (1, 0), (16, 0), (64, 0), (256, 0), (512, 0), (512, 64):
            if num_running > options.most:
                continue
            engine = decoding_engine(policy, num_running, num_waiting, ignore_eos=False, groups=groups)
            gc.collect()
            best = min(step_us(engine, options.steps) for _ in range(options.repeats))
            print(f"{policy:14} {num_running:4} decoding, {num_waiting:3} waiting: {best:8.1f} us a step")
    if options.profile:
        engine = decoding_engine("prefill_first", 512, 0, ignore_eos=False)
        with cProfile.Profile() as profile:
            step_us(engine, options.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
