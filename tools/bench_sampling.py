"""What sampling parameters cost: the batch32 workload with several of them beside plain sampling, in one process.

python tools/bench_sampling.py model=qwen3_0_6b model.weights=random; arguments are overrides of conf/config.yaml. Each
line is the best of three; what is captured on first use is captured before. --profile prints the kernels of a step.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from typing import Any

from hookline.core.cli.command import guarded
from hookline.core.config.compose import compose
from hookline.core.config.settings import ENGINE_KEYS, validate
from hookline.core.frontend.llm import LLM
from hookline.core.plugin.host import PluginHost
from hookline.core.run.settings import RunKeys
from hookline.core.sampling_params import UNTRUNCATED, SamplingParams

PENALTIES = dict(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
TRUNCATION = dict(top_k=50, top_p=0.9)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": dict(top_k=50),
    "top_k top_p": TRUNCATION,
    "penalties": PENALTIES,
    "logprobs=5": dict(logprobs=5),
    "top_k top_p penalties logprobs=5": {**TRUNCATION, **PENALTIES, "logprobs": 5},
    "top_p": dict(top_p=0.9),
    "min_p": dict(min_p=0.1),
    "bias and bad words": dict(logit_bias={5: 1.0}, bad_words=((7, 8),)),
    "plain again": {},
}
NUM_PROMPTS, LENGTH, REPEATS = 32, 512, 3


def run(arguments: list[str]) -> int:
    is_profiled = "--profile" in arguments
    host = PluginHost.load()
    tree = compose([one for one in arguments if one != "--profile"], host, RunKeys)[0].tree
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    with LLM.from_config(config, host) as llm:
        plain_s = 0.0
        for name, options in CASES.items():
            params = SamplingParams(temperature=0.6, max_tokens=LENGTH, ignore_eos=True, **{**UNTRUNCATED, **options})
            generate(llm, replace(params, max_tokens=4))
            seconds = min(generate(llm, params) for _ in range(REPEATS))
            plain_s = plain_s or seconds
            rate, step_ms = NUM_PROMPTS * LENGTH / seconds, 1000 * seconds / LENGTH
            print(
                f"{name:34} {rate:>9,.0f} tok/s {step_ms:7.3f} ms a step {100 * plain_s / seconds:6.1f} %", flush=True
            )
        if is_profiled:
            profile(llm)
    return 0


def generate(llm: LLM, params: SamplingParams) -> float:
    """Seconds to complete all prompts."""
    engine, rng = llm.engine, random.Random(0)
    engine.pool.reset_cache()
    prompts = [[rng.randrange(4000) for _ in range(LENGTH)] for _ in range(NUM_PROMPTS)]
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(prompt, replace(params, seed=number))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


def profile(llm: LLM) -> None:
    """Print what the kernels of the fullest case take."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    options = CASES["top_k top_p penalties logprobs=5"]
    params = SamplingParams(temperature=0.6, max_tokens=40, ignore_eos=True, **{**UNTRUNCATED, **options})
    with torch_profile(activities=[ProfilerActivity.CUDA]) as trace:
        generate(llm, params)
    print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))


if __name__ == "__main__":
    sys.exit(guarded(run, None))
