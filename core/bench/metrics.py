"""The figures of a benchmark: numbers and distributions, computed from a recording of requests and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hookline.core.bench.latencies import STATISTICS, gaps_s, request_latencies, slo_of, spread
from hookline.core.bench.recorder import Column, Recording, token_times
from hookline.core.bench.slo import Slo
from hookline.core.bench.tag_metrics import by_tag, check_tag_objective, deadlines_met, num_good
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.contracts import DraftCounts, ExtensionCost
from hookline.core.errors import ConfigError
from hookline.core.util.text import near_miss

TIMES = ("host_s", "device_s", "idle_s")


def times_by_kind(steps: Mapping[str, Column]) -> dict[str, Any]:
    """Means in milliseconds for decode, prefill and mixed steps, as far as there are any, and `decode_idle_percent`.

    steps: columns prefill_tokens and decode_rows, and host_s, device_s and idle_s as in core.contracts.StepStats.
    decode_idle_percent: of the time from the end of a decode step to the end of the next one, if that is a decode step
    too, the part that the device waited; None without such a pair.
    """
    decodes, prefills = steps["decode_rows"] > 0, steps["prefill_tokens"] > 0
    kinds = {"decode": decodes & ~prefills, "prefill": prefills & ~decodes, "mixed": decodes & prefills}
    found: dict[str, Any] = {name: _means(steps, chosen) for name, chosen in kinds.items() if chosen.any()}
    return {**found, "decode_idle_percent": _idle_percent(steps, kinds["decode"])}


def _means(steps: Mapping[str, Column], chosen: Column) -> dict[str, float]:
    means = {f"{name.removesuffix('_s')}_ms": round(1000 * float(steps[name][chosen].mean()), 4) for name in TIMES}
    return {"steps": int(chosen.sum()), **means}


def _idle_percent(steps: Mapping[str, Column], decodes: Column) -> float | None:
    follows = decodes[1:] & decodes[:-1]
    idle_s, device_s = steps["idle_s"][1:][follows].sum(), steps["device_s"][1:][follows].sum()
    return round(100 * float(idle_s / (idle_s + device_s)), 2) if follows.any() else None


def time_lines(times: Mapping[str, Any]) -> list[str]:
    """The means as lines of text."""
    lines = [
        f"{kind + ' step':24} host {means['host_ms']:.3f} ms, device {means['device_ms']:.3f} ms, "
        f"idle before it {means['idle_ms']:.3f} ms (means of {means['steps']})"
        for kind, means in times.items()
        if isinstance(means, Mapping)
    ]
    if times["decode_idle_percent"] is not None:
        lines.append(f"{'device idle, decodes':24} {times['decode_idle_percent']} % between one and the next")
    return lines


def extension_costs(costs: Mapping[str, ExtensionCost]) -> dict[str, dict[str, Any]]:
    """The cost of each step extension that ran, by its name: means in microseconds a step.

    device_us: None if no step was timed, as where all are CUDA graphs.
    """
    return {
        name: {
            "steps": cost.num_steps,
            "host_us": round(1e6 * cost.host_s / cost.num_steps, 2),
            "device_us": round(1e6 * cost.device_s / cost.num_timed_steps, 2) if cost.num_timed_steps else None,
        }
        for name, cost in costs.items()
        if cost.num_steps
    }


def cost_lines(costs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The costs of step extensions as lines of text."""
    return [
        f"{'extension ' + name:24} host {cost['host_us']:.1f} us, device "
        f"{'not timed' if cost['device_us'] is None else format(cost['device_us'], '.1f') + ' us'} a step "
        f"(means of {cost['steps']})"
        for name, cost in costs.items()
    ]


def speculation(counts: DraftCounts) -> dict[str, Any]:
    """Counts of drafts since the engine's start. mean_length: tokens that a decode with drafts gave on average, None
    without any. pretended_length: the same of drafters whose drafts are kept whether they are right or not.
    """
    steps = counts.drafted[0] if counts.drafted else 0
    return {
        "drafted": counts.drafted,
        "kept": counts.kept,
        "mean_length": round(1 + counts.num_kept / steps, 3) if steps else None,
        "no_drafts": counts.no_drafts,
        "pretended_length": counts.pretended_length,
    }


def draft_line(found: Mapping[str, Any]) -> str:
    """The drafts as a line of text."""
    kept, drafted, pretended = sum(found["kept"]), sum(found["drafted"]), found["pretended_length"]
    told = f"{'drafts':24} {kept} of {drafted} kept, {found['mean_length']} tokens of a decode with drafts"
    return told if pretended is None else f"{told}; SYNTHETIC: pretended, answers are not the model's"


NUMBERS = (
    "seconds",
    "output_tok_s",
    "prompt_tok_s",
    "requests_s",
    "goodput_s",
    "prompt_tokens",
    "output_tokens",
    "refused",
    "steps",
    "prefill_tokens",
    "cached_tokens",
    "prefix_hit_rate",
    "preemptions",
)
MACHINE = ("start_to_first_token_s", "peak_memory_gib", "peak_host_memory_gib")
"""Numbers that a benchmark adds to its recording's numbers."""
DISTRIBUTIONS = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "running", "waiting", "pool_usage", "busy_s", *TIMES)


def summarise(recording: Recording, slo: Slo) -> dict[str, Any]:
    """Every figure of a recording: NUMBERS, DISTRIBUTIONS as mappings of STATISTICS, step_times; None if undefined.

    deadlines_met and by_tag are there only if requests have deadlines, or tags. slo: of requests that bring none.
    """
    served = [request for request in recording.requests if request.first_token_s is not None]
    latencies = [request_latencies(request) for request in served]
    times_s, starts = token_times(recording)
    return {
        **_numbers(recording, slo, latencies),
        **{name: spread([one[name] for one in latencies]) for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s")},
        "itl_s": spread(gaps_s(times_s, starts)),
        "running": spread(recording.steps["running"]),
        "waiting": spread(recording.steps["waiting"]),
        "pool_usage": spread(pool_usage(recording)),
        **{name: spread(recording.steps[name]) for name in ("busy_s", *TIMES)},
        "step_times": _step_times(recording),
        **_if_any("deadlines_met", deadlines_met(recording.requests)),
        **_if_any("by_tag", by_tag(recording, slo)),
    }


def pool_usage(recording: Recording) -> Column:
    """Share of the blocks that requests hold after each step; empty if the number of blocks is unknown."""
    if not recording.num_blocks:
        return np.empty(0)
    used: Column = 1 - recording.steps["free_blocks"] / recording.num_blocks
    return used


def _if_any(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None or value == {} else {name: value}


def _step_times(recording: Recording) -> dict[str, Any] | None:
    """Means by kind of step; None if the engine did not time the device."""
    steps = recording.steps
    computes = steps["decode_rows"] + steps["prefill_tokens"] > 0
    return None if np.isnan(steps["device_s"][computes]).any() else times_by_kind(steps)


def _numbers(recording: Recording, slo: Slo, latencies: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    requests, seconds = recording.requests, recording.seconds
    served = [request for request in requests if request.first_token_s is not None]
    prompt_tokens = sum(request.prompt_tokens for request in served)
    output_tokens = sum(request.output_tokens for request in served)
    cached_tokens = sum(request.cached_tokens for request in served)
    has_bounds = slo.is_stated or any(slo_of(request, slo).is_stated for request in requests)
    return {
        "seconds": round(seconds, 4),
        "output_tok_s": round(output_tokens / seconds, 1),
        "prompt_tok_s": round(prompt_tokens / seconds, 1),
        "requests_s": round(len(served) / seconds, 3),
        "goodput_s": round(num_good(served, latencies, slo) / seconds, 3) if has_bounds else None,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "refused": sum(request.error is not None for request in requests),
        "steps": len(recording.steps["end_s"]),
        "prefill_tokens": int(recording.steps["prefill_tokens"].sum()),
        "cached_tokens": cached_tokens,
        "prefix_hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
        "preemptions": int(recording.steps["preemptions"].sum()),
    }


def check_objective(name: str, slo: Slo, workload: WorkloadConfig | None = None) -> None:
    """Refuse an objective that no result has, before anything runs.

    Raises: ConfigError with the near miss and what is available.
    """
    workload = workload or WorkloadConfig()
    if name.startswith("by_tag."):
        check_tag_objective(name, workload)
        return
    own = ["deadlines_met"] if any(one.deadline_s is not None for one in workload.classes) or workload.trace else []
    numbers = [*NUMBERS, *own]
    names = [*numbers, *MACHINE, *(f"{one}.{statistic}" for one in DISTRIBUTIONS for statistic in STATISTICS)]
    if name not in names:
        available = f"{', '.join(numbers)}, and {' '.join(STATISTICS)} of {', '.join(DISTRIBUTIONS)}"
        raise ConfigError(f"no metric named objective={name}.{near_miss(name, names)} Available: {available}")
    has_bounds = slo.is_stated or any(one.slo.is_stated for one in workload.classes)
    if name == "goodput_s" and not has_bounds:
        raise ConfigError("objective=goodput_s needs an objective of service; set slo.ttft_s, slo.tpot_s or slo.e2e_s")
