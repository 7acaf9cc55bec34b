"""`hookline simulate workload=NAME`: predicts a benchmark's figures by a cost model of the step; no model, no GPU.

The same command line, sweeps, figures and result lines as `hookline bench`, and the same scheduler, block pool and
engine; only time is modelled. docs/simulation.md explains the cost models. Bare at import, and never imports torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.core.cli.output import say

if TYPE_CHECKING:
    from hookline.core.bench.command import Bench
    from hookline.core.bench.recorder import Recording
    from hookline.core.plugin.host import PluginHost
    from hookline.core.simulate.cost import CostModel

FAR = 2
"""Steps with more than this many times the tokens of the largest measured step cause a warning."""
SUFFIX = ".json"
"""Suffix of files with cost models."""
_log = logging.getLogger("hookline")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, as `hookline run` does."""
    from hookline.core.cli.command import guarded

    return guarded(_run, arguments)


def _run(arguments: list[str]) -> int:
    from hookline.core.bench.command import run_benchmarks
    from hookline.core.simulate.settings import SimulateKeys

    return run_benchmarks(arguments, "simulate", measure, SimulateKeys)


def measure(tree: Mapping[str, Any], host: PluginHost) -> tuple[dict[str, Any], Recording]:
    """Simulate the benchmark a tree describes; returns the result line and the best repetition's record.

    Raises: HooklineError for whatever keeps the engine from starting or running.
    """
    from hookline.core.bench.command import outcome, run_load, validate_bench
    from hookline.core.bench.facts import describe
    from hookline.core.bench.metrics import MACHINE, summarise
    from hookline.core.errors import ConfigError
    from hookline.core.simulate.engine import check_machine, simulated_engine
    from hookline.core.simulate.settings import SimulateKeys
    from hookline.core.util.process import called_as

    bench = validate_bench(tree, host, SimulateKeys)
    if bench.profile is not None:
        raise ConfigError("profile has no effect in a simulation: nothing is computed that could be traced")
    if bench.address is not None:
        raise ConfigError(f"url has no effect in a simulation: no server is asked; {called_as('bench')} does")
    cost = cost_model(tree)
    check_machine(tree, bench.config, cost, host)
    with closing(simulated_engine(bench.config, cost, host)) as engine:
        started = time.perf_counter()
        runs = [run_load(engine, bench.workload, repetition) for repetition in range(bench.repeats)]
    wall_s = time.perf_counter() - started
    warn_beyond(cost, runs)
    best = min(runs, key=lambda run: run.seconds)
    metrics = {**summarise(best, bench.slo), **dict.fromkeys(MACHINE)}
    simulated = {"cost": cost_name(tree), **_speed(runs, wall_s)}
    described = {**describe(tree), **_describe_engine(bench, engine.limits, cost)}
    return {**described, **outcome(bench, metrics), "simulated": simulated}, best


def predict(cost: CostModel, config: Mapping[str, Any], num_blocks: int | None = None) -> dict[str, Any]:
    """The figures of a benchmark's result line, predicted from its `config`.

    num_blocks: of the pool, if the machine decided it.
    """
    from hookline.core.bench.command import run_load, validate_bench
    from hookline.core.bench.metrics import summarise
    from hookline.core.plugin.host import PluginHost
    from hookline.core.simulate.engine import simulated_engine

    host = PluginHost.load()
    tree = {**config, "engine": {**config["engine"], "num_blocks": config["engine"].get("num_blocks") or num_blocks}}
    given = {key: value for key, value in tree.items() if value is not None}
    bench = validate_bench(given, host)
    with closing(simulated_engine(bench.config, cost, host)) as engine:
        recording = run_load(engine, bench.workload)
    return summarise(recording, bench.slo)


def cost_model(tree: Mapping[str, Any]) -> CostModel:
    """The cost model of the keys `cost` or `fit`, and `host_s`; `save` writes it.

    Raises: ConfigError naming the key and what it must be.
    """
    from dataclasses import replace

    from hookline.core.errors import ConfigError, shown
    from hookline.core.sampling_params import as_float
    from hookline.core.simulate.cost import CostModel, HostCost, cost_of, read_cost, write_cost
    from hookline.core.simulate.settings import SimulateKeys
    from hookline.core.util.files import path_of

    cost, fit, save, host_s = (tree.get(key) for key in ("cost", "fit", "save", "host_s"))
    saved = None if save is None else _checked_save(save)
    if fit is not None:
        if cost != SimulateKeys.cost:
            raise ConfigError(f"cost={cost} has no effect beside fit={fit}; give cost or fit, not both")
        from hookline.core.simulate.fit import fit_cost, read_measured

        model = fit_cost([one for folder in str(fit).split(",") for one in read_measured(path_of(folder))])
        decode, prompt = model.origin["range"]["decode"], model.origin["range"]["prompt"]
        _log.info(
            "fit=%s is based on %d decode steps of %d to %d rows and %d steps with prompts of %d to %d tokens",
            *(fit, *decode.values(), *prompt.values()),
        )
    elif isinstance(cost, Mapping):
        model = cost_of(cost, "cost")
    else:
        model = read_cost(_cost_path(str(cost)))
    if host_s is not None:
        if not 0 <= as_float(host_s) < math.inf:
            raise ConfigError(f"host_s={shown(host_s)} must be a finite number of seconds, at least 0, or null")
        model = replace(model, host=HostCost(step_s=float(host_s)))
    if saved is not None:
        write_cost(model, saved)
    assert isinstance(model, CostModel)
    return model


def _checked_save(save: object) -> Path:
    from hookline.core.errors import ConfigError
    from hookline.core.util.files import check_writable, path_of

    path = path_of(save)
    if path.suffix != SUFFIX:
        raise ConfigError(f"save={save}: the name must end in {SUFFIX}, as cost= takes it")
    check_writable(path, "save")
    return path


def _cost_path(name: str) -> Path:
    """The path of a file, which may be the name of a file in conf/cost_models."""
    from hookline.core.errors import ConfigError
    from hookline.core.plugin.presets import CONF
    from hookline.core.util.files import path_of
    from hookline.core.util.text import near_miss

    if Path(name).suffix == SUFFIX:
        return path_of(name)
    known = sorted(one.stem for one in (CONF / "cost_models").glob("*.json"))
    if name not in known:
        raise ConfigError(
            f"no cost model named cost={name}.{near_miss(name, known)} Available: {', '.join(known)}; "
            "or give a .json file, or fit=FOLDER with a benchmark's records"
        )
    return CONF / "cost_models" / f"{name}.json"


def cost_name(tree: Mapping[str, Any]) -> str:
    """The origin of the cost model, in a word."""
    if tree.get("fit") is not None:
        return f"fit={tree['fit']}"
    return "given" if isinstance(tree.get("cost"), Mapping) else str(tree.get("cost"))


def _speed(runs: Sequence[Recording], wall_s: float) -> dict[str, float]:
    """The speed of the simulation itself, including the drawing of loads."""
    num_requests, num_steps = (
        sum(len(run.requests) for run in runs),
        sum(len(run.steps["end_s"]) for run in runs),
    )
    say(
        f"simulated {num_requests} requests in {num_steps} steps in {wall_s:.2f} s, "
        f"{num_requests / wall_s:,.0f} requests/s"
    )
    return {"wall_s": round(wall_s, 3), "requests_per_wall_s": round(num_requests / wall_s, 1)}


def warn_beyond(cost: CostModel, runs: Sequence[Recording]) -> None:
    """Warn if steps were far larger than the measured steps that the cost model was fitted to. A cost model given as
    coefficients has no measured steps, and no warning.
    """
    for name, what in (
        ("decode", "decode steps of up to %d rows"),
        ("prompt", "steps with prompts of up to %d tokens"),
    ):
        measured = cost.origin.get("range", {}).get(name)
        most = max(_most_tokens(run.steps, with_prompts=name == "prompt") for run in runs)
        if measured is not None and most > FAR * measured["most"]:
            _log.warning(
                f"simulated {what}; the cost model was fitted to at most %d, so their times are a guess: record a "
                "benchmark with such steps and fit again",
                *(most, measured["most"]),
            )


def _most_tokens(steps: Mapping[str, Any], *, with_prompts: bool) -> int:
    """Tokens of the largest step with prompts, and of the largest step without."""
    num_tokens = steps["decode_rows"] + steps["prefill_tokens"]
    return int(num_tokens[(steps["prefill_tokens"] > 0) == with_prompts].max(initial=0))


def _describe_engine(bench: Bench, limits: Any, cost: CostModel) -> dict[str, Any]:
    """The configuration of the engine as it resulted on this machine."""
    from hookline.core.bench.facts import group_facts
    from hookline.core.simulate.engine import as_configured, cache_groups

    cost = as_configured(cost, bench.config.engine)
    return {
        "device": f"simulated {cost.origin.get('device', 'device')}",
        "kernels": str(cost.origin.get("kernels", "given")),
        "captured": {
            "decodes": cost.captures,
            "prompts": cost.captures and cost.captures_prompts,
            "prompt_tokens": cost.captured_prompt_tokens,
            "joined_decodes": cost.captured_joined_decodes,
        },
        "scheduler": bench.config.scheduler.name,
        "block_size": limits.plan.block_size,
        "num_blocks": limits.plan.num_blocks,
        "cache_groups": group_facts(cache_groups(cost.origin)),
        "vocab_size": limits.vocab_size,
        "overlap": limits.overlap,
    }
