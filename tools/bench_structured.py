"""What requests with a JSON schema cost the host between two draws: the real engine and back end, and no model.

    python tools/bench_structured.py --tokenizer CHECKPOINT [--schema batch32_records] [--rows 32]

The device is idle from the last draw until the masks of the next one are there, less its forward pass. Printed are the
milliseconds of a step: `chain`, from the tokens' arrival to the release of the next draws; `launch`, from that release
to the next step's launch, which the draw itself hides; and `rest`, all other work.
Tokens are drawn at random from the masks, outside of what is measured.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hookline.core.contracts import Limits, StructuredOutputs
from hookline.core.engine.engine import Engine
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.structured_output import GrammarChoice, StructuredOutput
from hookline.core.sampling_params import UNTRUNCATED, SamplingParams
from hookline.core.step.executor import Executor, StepResult
from hookline.core.step.message import Step
from hookline.core.step.timing import Clock
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.token_bytes import grammar_vocabulary
from hookline.core.util.arrays import WordArray, num_mask_words

ROOT = Path(__file__).resolve().parents[1]
EOS = frozenset({151645, 151643})
PARTS = ("chain", "launch", "rest")


class DrawsByMasks(Executor):
    """An executor that draws any token that a mask allows, and notes when the engine did what."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.masks = np.zeros((max_num_seqs, num_mask_words(vocab_size)), dtype=np.int32)
        self.rng = np.random.default_rng(0)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.chains: list[float] = []
        self.since, self.profile = time.perf_counter(), cProfile.Profile()
        self.is_profiled = False

    def note(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self.since
        if part == "chain":
            self.chains.append(1e3 * (now - self.since))
        self.since = now

    def launch(self, step: Step) -> Any:
        self.note("launch")
        return [] if len(step.late_draws) else [17] * step.num_sampled

    def late_rows(self, num_rows: int) -> WordArray:
        return self.masks[:num_rows]

    def release(self, handle: Any, num_rows: int) -> None:
        if self.is_profiled:
            self.profile.disable()
        self.note("chain")
        for mask_W in self.masks[:num_rows]:
            allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
            handle.append(int(self.rng.choice(allowed)))
        self.since = time.perf_counter()

    def collect(self, handle: Any) -> StepResult:
        self.note("rest")
        if self.is_profiled:
            self.profile.enable()
        return StepResult(np.array(handle, dtype=np.int64))

    def time_steps(self) -> Clock:
        raise NotImplementedError("there is no device to time")

    def close(self) -> None:
        pass


def make_engine(codec: Codec, vocab_size: int, num_rows: int, options: dict[str, Any]) -> tuple[Engine, DrawsByMasks]:
    """An engine for so many requests at a time. options: of the grammar back end."""
    host = PluginHost.load()
    policy, grammars = host.choose("scheduler", "prefill_first"), host.choose("grammars", "llguidance")
    assert grammars.config is not None
    choice = GrammarChoice(grammars, grammars.config(**options))
    structured = StructuredOutput(
        lambda: choice, vocab_size, vocabulary=partial(grammar_vocabulary, codec, EOS, vocab_size)
    )
    limits = Limits(num_rows, 16384, 4096, 64, num_rows * 64)
    executor = DrawsByMasks(num_rows, vocab_size)
    pool = BlockPool(limits.num_blocks, limits.block_size)
    scheduler = policy.load()(policy.config() if policy.config is not None else None)
    engine_limits = EngineLimits(limits, vocab_size, 30.0, EOS, overlap=True)
    return Engine(scheduler, executor, pool, engine_limits, late=structured), executor


def percentiles(values: list[float]) -> dict[str, float]:
    shares = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: float(np.percentile(values, share)) for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--schema", default="batch32_records", help="a workload of conf/workload with a json_schema")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, help="see grammars.num_threads")
    parser.add_argument("--profile", action="store_true", help="also print what the chain is made of")
    options = parser.parse_args()
    told = {"num_threads": options.threads}
    engine, executor = make_engine(Codec(options.tokenizer), options.vocab_size, options.rows, told)
    schema = yaml.safe_load((ROOT / f"conf/workload/{options.schema}.yaml").read_text())["json_schema"]
    wanted = StructuredOutputs(json=schema)
    for index in range(options.rows):
        params = SamplingParams(max_tokens=2000, structured_outputs=wanted, ignore_eos=True, **UNTRUNCATED)
        engine.add([index] * 100, params)
    while len(engine.queue.running) < options.rows or any(one.is_prefilling for one in engine.queue.running.values()):
        engine.step()
    best = dict.fromkeys(PARTS, float("inf"))
    for _ in range(3):
        executor.chains.clear()
        executor.seconds, executor.since = dict.fromkeys(PARTS, 0.0), time.perf_counter()
        for _ in range(options.steps):
            engine.step()
        best = {part: min(best[part], 1e3 * executor.seconds[part] / options.steps) for part in PARTS}
    print(f"{options.schema}, {options.rows} rows: " + ", ".join(f"{part} {best[part]:.3f}" for part in PARTS) + " ms")
    chains = ", ".join(f"{name} {value:.2f}" for name, value in percentiles(executor.chains).items())
    print(f"chain of the last {options.steps} steps: {chains} ms")
    if options.profile:
        executor.is_profiled = True
        for _ in range(options.steps):
            engine.step()
        pstats.Stats(executor.profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
