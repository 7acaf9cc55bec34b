"""Workloads of conf/workload in one process, for one configuration: a table, and one JSON line each.

python tools/bench_all.py [WORKLOAD ...] model=qwen3_0_6b model.weights=random: names pick workloads, none means the six
of docs/benchmarks.md; other arguments are overrides of conf/bench.yaml, workload.KEY one of every workload. The prefix
cache is emptied before each repetition. Shown are the best repetition and what the first one, which is a user's first,
has of its speed; of open loops also latencies.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import yaml

from hookline.core.bench.command import run_load
from hookline.core.bench.facts import describe, describe_engine, first_token_s
from hookline.core.bench.metrics import summarise, time_lines
from hookline.core.bench.settings import BenchKeys
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.cli.command import guarded
from hookline.core.config.compose import compose
from hookline.core.config.schema import build
from hookline.core.config.settings import ENGINE_KEYS, validate
from hookline.core.frontend.llm import LLM
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF
from hookline.core.util.garbage import settled

WORKLOADS = ("single", "batch32", "mixed256", "short1024", "shared_prefix", "prefill")
PRESETS = {path.stem for path in (CONF / "workload").glob("*.yaml")}
OF_ALL = "workload."
LATENCIES = {"first token": "ttft_s", "per token": "tpot_s", "between tokens": "itl_s"}
"""What is shown of loads whose requests arrive one after the other."""


def preset(name: str) -> dict[str, Any]:
    """The values of a workload, those of the one that it stands on included."""
    values: dict[str, Any] = yaml.safe_load((CONF / "workload" / f"{name}.yaml").read_text())
    base = values.pop("defaults", ["_self_"])[0]
    return values if base == "_self_" else {**preset(base), **values}


def shown_ms(spread: dict[str, float | None]) -> str:
    """Two percentiles of a distribution in seconds."""
    return " and ".join("-" if (value := spread[one]) is None else f"{1000 * value:.1f}" for one in ("p50", "p99"))


def run(arguments: list[str]) -> int:
    names = [argument for argument in arguments if argument in PRESETS] or WORKLOADS
    changes = dict(one.removeprefix(OF_ALL).split("=", 1) for one in arguments if one.startswith(OF_ALL))
    changes = {key: yaml.safe_load(value) for key, value in changes.items()}
    workloads = {name: build(WorkloadConfig, {**preset(name), **changes}, "workload") for name in names}
    host = PluginHost.load()
    arguments = [one for one in arguments if one not in PRESETS and not one.startswith(OF_ALL)]
    tree = compose(arguments, host, BenchKeys, "bench")[0].tree
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    rows = []
    with LLM.from_config(config, host) as llm, settled():
        start_s = first_token_s(llm)
        for name, workload in workloads.items():
            runs = [
                summarise(run_load(llm.engine, workload, repetition), Slo()) for repetition in range(tree["repeats"])
            ]
            best = min(runs, key=lambda metrics: metrics["seconds"])
            rows.append((name, runs[0], best))
            ran = describe({**tree, "workload": asdict(workload)})
            found = {"name": name, "metrics": best, "first": runs[0]}
            print(json.dumps({**ran, **describe_engine(llm), **found}))
    print(f"start to first token {start_s:.1f} s; kernels {llm.kernels_name}")
    for name, first, best in rows:
        mean_ms = 1000 * best["seconds"] / best["steps"]
        print(
            f"{name:14} {best['output_tok_s']:>10,.0f} output tok/s {best['prompt_tok_s']:>11,.0f} prompt tok/s, "
            f"first run {best['seconds'] / first['seconds']:.3f} of that; "
            f"{best['steps']:5} steps of {mean_ms:7.3f} ms, {best['cached_tokens']} cached"
        )
        if workloads[name].request_rate is not None:
            print("; ".join(f"{what} {shown_ms(best[key])}" for what, key in LATENCIES.items()) + " ms (p50, p99)")
        print(*time_lines(best["step_times"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run, None))
