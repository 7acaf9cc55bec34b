"""The first minute of serving, from ready on: first tokens of the first 20 s beside those after, and late work.

python tools/first_minute.py RATE [SECONDS] model=qwen3_0_6b model.weights=random: Poisson arrivals of 64 to 1,024
prompt tokens and 16 to 256 output tokens; the other arguments are overrides of conf/bench.yaml, those of workload.KEY
included. Nothing runs before.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from hookline.core.assembly.compiler_child import begin_early
from hookline.core.bench.command import run_load
from hookline.core.bench.facts import describe, describe_engine
from hookline.core.bench.recorder import Recording
from hookline.core.bench.settings import BenchKeys
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.cli.command import guarded
from hookline.core.config.compose import compose
from hookline.core.config.schema import build
from hookline.core.config.settings import ENGINE_KEYS, validate
from hookline.core.plugin.host import PluginHost

FIRST_S = 20.0
LENGTHS = ("workload.prompt_len=[64,1024]", "workload.output_len=[16,256]")
AS_A_SERVER = "engine.freeze_gc=true"
"""What AsyncLLM and the server do by themselves: else a full garbage collection stops all requests for 0.1 s."""


def first_tokens_ms(recording: Recording, begin_s: float, end_s: float) -> dict[str, float]:
    """Percentiles of the time to the first token of the requests that arrived in this time."""
    waits_s = [
        request.first_token_s - request.arrival_s
        for request in recording.requests
        if begin_s <= request.arrival_s < end_s and request.first_token_s is not None
    ]
    return {f"p{percent}": round(1000 * float(np.percentile(waits_s or [0.0], percent)), 2) for percent in (50, 90, 99)}


def run(arguments: list[str]) -> int:
    numbers = [float(one) for one in arguments if "=" not in one]
    rate, seconds = [*numbers, 60.0][:2]
    host = PluginHost.load()
    load = [f"workload.request_rate={rate}", f"workload.num_prompts={round(rate * seconds)}", *LENGTHS, AS_A_SERVER]
    tree = compose([*load, *(one for one in arguments if "=" in one)], host, BenchKeys, "bench")[0].tree
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    workload = build(WorkloadConfig, tree["workload"], "workload")
    begin_early(config)
    from hookline.core.frontend.llm import LLM  # with torch

    with LLM.from_config(config, host) as llm:
        recording = run_load(llm.engine, workload, 0)
        found = {
            "rate": rate,
            "first_20_s": first_tokens_ms(recording, 0, FIRST_S),
            "after": first_tokens_ms(recording, FIRST_S, float("inf")),
            "late_work": dict(llm.engine.late_work),
        }
        print(json.dumps({**describe(tree), **describe_engine(llm), **found}))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run, None))
