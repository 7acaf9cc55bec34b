"""Rank 0 in the engine's process against rank 0 apart: times of decode steps and of first tokens, side by side.

A script, not a test. Both engines live at the same time and are measured in turns, so that what else happens on the
machine meets both. Prints medians, and by how much the second differs; on one GPU each takes half of the memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from hookline import LLM, SamplingParams
from hookline.core.engine.engine import Engine

VARIANTS = {"here": {"rank_0": "here"}, "apart": {"rank_0": "apart"}, "ray": {"executor": "ray"}}


def drain(engine: Engine) -> None:
    """Compute until nothing is left."""
    while engine.has_work:
        engine.step()


def step_ms(engine: Engine, num_rows: int, num_steps: int) -> float:
    """Milliseconds of a step in which so many rows decode."""
    params = SamplingParams(temperature=0, max_tokens=num_steps + 40, ignore_eos=True)
    for row in range(num_rows):
        engine.add([row % 90 + 1] * 64, params)
    while len(engine.queue.running) < num_rows or any(one.is_prefilling for one in engine.queue.running.values()):
        engine.step()
    for _ in range(10):
        engine.step()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    spent = time.perf_counter() - start
    drain(engine)
    return 1000 * spent / num_steps


def ttft_ms(engine: Engine, prompt_len: int) -> float:
    """Milliseconds from a request of so many tokens to its only token."""
    ids = [time.perf_counter_ns() % 89 + 1] * prompt_len  # a prompt that no block holds yet
    start = time.perf_counter()
    engine.add(ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    drain(engine)
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a preset, which gets random weights; without it the bundled checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", nargs=2, choices=VARIANTS, default=["here", "apart"])
    given = parser.parse_args()
    sizes = dict(max_num_seqs=max(given.rows), max_model_len=2048, num_blocks=4096, block_size=64, prefix_caching=False)
    if given.device == "cpu":
        sizes |= dict(num_blocks=max(given.rows) * 10)
    model = {"name": given.model, "weights": "random"} if given.model else None
    llms = {
        name: LLM(model=model, device=given.device, tp=given.tp, engine={**sizes, **VARIANTS[name]})
        for name in given.variants
    }
    measures: dict[str, tuple[Any, ...]] = {f"step of {rows} rows": (step_ms, rows, given.steps) for rows in given.rows}
    measures |= {f"first token of {tokens}": (ttft_ms, tokens) for tokens in given.prompts}
    for title, (measure, *arguments) in measures.items():
        found: dict[str, list[float]] = {name: [] for name in llms}
        repeats = 1 if measure is step_ms else 20
        for round_ in range(given.rounds + 1):
            for name in sorted(llms, reverse=round_ % 2 == 1):
                ms = [measure(llms[name].engine, *arguments) for _ in range(repeats)]
                if round_:  # the first one warms up
                    found[name] += ms
        base, other = (statistics.median(found[name]) for name in given.variants)
        spreads = ", ".join(f"{name} {min(ms):.3f} to {max(ms):.3f}" for name, ms in found.items())
        pair = f"{given.variants[0]} {base:.3f} ms, {given.variants[1]} {other:.3f} ms"
        print(f"{title:22} {pair}: {100 * (other / base - 1):+.2f} % ({spreads})", flush=True)
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
