"""Throughput on a CPU beside transformers: the same checkpoint, prompts, dtype and thread count, in one process.

A script, not a test: it prints both figures and their ratio, and checks that the greedy tokens agree. transformers runs
the prompts as one left-padded batch; Hookline runs them as requests of mixed lengths.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hookline import LLM, SamplingParams
from hookline.core.sampling_params import UNTRUNCATED

BUNDLED = Path(__file__).parent.parent / "plugins/models/qwen3_tiny"


def draw_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Prompts of mixed lengths, log-uniform from 8 to `longest` tokens, the first of them the longest."""
    rng = random.Random(0)
    lengths = [longest, *(round(8 * (longest / 8) ** rng.random()) for _ in range(count - 1))]
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def run_transformers(model: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of a left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[:, width:].tolist()


def run_hookline(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of separate requests; the prefix cache is emptied first, so that no run feeds on another."""
    llm.engine.pool.reset_cache()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **UNTRUNCATED)
    return [output.token_ids for output in llm.generate(prompts, params)]


def best_of(repeats: int, run: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds of the fastest run, its result) after one warm-up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default=str(BUNDLED))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with LLM(options.checkpoint) as llm:
        for count in (1, 16):
            prompts = draw_prompts(count, options.longest, model.config.vocab_size)
            theirs, wanted = best_of(options.repeats, lambda: run_transformers(model, prompts, options.tokens))  # noqa: B023
            ours, got = best_of(options.repeats, lambda: run_hookline(llm, prompts, options.tokens))  # noqa: B023
            same = sum(a == b for a, b in zip(got, wanted, strict=True))
            tokens = count * options.tokens
            print(
                f"{count:2} prompts x {options.tokens} tokens: transformers {tokens / theirs:8.1f} tok/s, "
                f"hookline {tokens / ours:8.1f} tok/s, ratio {theirs / ours:.2f}; equal outputs {same}/{count}"
            )


if __name__ == "__main__":
    main()
