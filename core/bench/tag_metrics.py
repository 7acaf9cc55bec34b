"""The figures of a benchmark by tag: of the requests of one tenant, or of one class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.core.bench.latencies import STATISTICS, request_latencies, slo_of, spread
from hookline.core.bench.recorder import Recording, RequestRecord
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.errors import ConfigError
from hookline.core.sweep.results import objective_value

TAG_NUMBERS = (
    "requests",
    "refused",
    "prompt_tokens",
    "output_tokens",
    "output_tok_s",
    "output_share",
    "requests_s",
    "goodput_s",
    "slo_met",
    "deadlines_met",
    "prefix_hit_rate",
    "preemptions",
)
TAG_DISTRIBUTIONS = ("ttft_s", "tpot_s", "e2e_s", "queue_s")


def by_tag(recording: Recording, slo: Slo) -> dict[str, dict[str, Any]]:
    """Tag's key -> its value -> TAG_NUMBERS, and TAG_DISTRIBUTIONS as mappings of STATISTICS; empty without tags.

    A request counts under each of its tags; one without a key counts under none of its values.
    """
    members: dict[str, dict[str, list[RequestRecord]]] = {}
    for request in recording.requests:
        for key, value in request.tags.items():
            members.setdefault(key, {}).setdefault(value, []).append(request)
    total = sum(request.output_tokens for request in recording.requests if request.first_token_s is not None)
    return {
        key: {value: _figures(requests, slo, recording.seconds, total) for value, requests in sorted(values.items())}
        for key, values in sorted(members.items())
    }


def _figures(requests: Sequence[RequestRecord], slo: Slo, seconds: float, total_tokens: int) -> dict[str, Any]:
    served = [request for request in requests if request.first_token_s is not None]
    latencies = [request_latencies(request) for request in served]
    prompt_tokens, output_tokens, cached_tokens = (
        sum(getattr(request, name) for request in served)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    bounded = [slo_of(request, slo) for request in requests if slo_of(request, slo).is_stated]
    good = num_good(served, latencies, slo)
    return {
        "requests": len(requests),
        "refused": sum(request.error is not None for request in requests),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tok_s": round(output_tokens / seconds, 1),
        "output_share": round(output_tokens / total_tokens, 4) if total_tokens else None,
        "requests_s": round(len(served) / seconds, 3),
        "goodput_s": round(good / seconds, 3) if bounded else None,
        "slo_met": round(good / len(bounded), 4) if bounded else None,
        "deadlines_met": deadlines_met(requests),
        "prefix_hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0,
        "preemptions": sum(request.preemptions for request in requests),
        **{name: spread([one[name] for one in latencies]) for name in TAG_DISTRIBUTIONS},
    }


def num_good(served: Sequence[RequestRecord], latencies: Sequence[Mapping[str, float]], slo: Slo) -> int:
    """How many of these requests have bounds, and kept all of them. slo: bounds of requests without their own."""
    pairs = [(slo_of(request, slo), one) for request, one in zip(served, latencies, strict=True)]
    return sum(own.is_stated and own.is_met(one) for own, one in pairs)


def deadlines_met(requests: Sequence[RequestRecord]) -> float | None:
    """The share of the requests with a deadline, refused ones included, that were done by it; None without any."""
    wanted = [request for request in requests if request.deadline_s is not None]
    met = [
        request.finish_s is not None and request.finish_s - request.arrival_s <= (request.deadline_s or 0.0)
        for request in wanted
    ]
    return round(sum(met) / len(met), 4) if met else None


SHOWN = {
    "requests": "requests",
    "output_tok_s": "tok/s",
    "output_share": "share",
    "ttft_s.p50": "ttft p50",
    "ttft_s.p99": "ttft p99",
    "tpot_s.p50": "tpot p50",
    "queue_s.p99": "queue p99",
    "goodput_s": "goodput",
    "slo_met": "slo met",
    "deadlines_met": "deadlines",
}
"""Of each tag, for a terminal; each in its column."""


def tag_lines(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The main figures of `by_tag` as lines of text, their heads first."""
    head = f"{'':24}" + "".join(f" {title:>10}" for title in SHOWN.values())
    rows = [
        f"{f'{key}={value}':24}" + "".join(f" {_shown(objective_value(numbers, name)):>10}" for name in SHOWN)
        for key, values in figures.items()
        for value, numbers in values.items()
    ]
    return [head, *rows]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}".rstrip("0").rstrip(".")


def check_tag_objective(name: str, workload: WorkloadConfig) -> None:
    """Refuse an objective by_tag.KEY.VALUE.FIGURE that no result can have. The tags of a trace are not known yet.

    Raises: ConfigError with what is available.
    """
    figures = [*TAG_NUMBERS, *(f"{one}.{statistic}" for one in TAG_DISTRIBUTIONS for statistic in STATISTICS)]
    known = sorted({f"{key}.{value}" for one in workload.classes for key, value in one.tags.items()})
    is_known = any(name == f"by_tag.{tag}.{figure}" for tag in known for figure in figures)
    if is_known or (workload.trace and any(name.endswith(f".{figure}") for figure in figures)):
        return
    available = f"{', '.join(TAG_NUMBERS)}, and {' '.join(STATISTICS)} of {', '.join(TAG_DISTRIBUTIONS)}"
    raise ConfigError(
        f"no metric named objective={name}; by_tag.KEY.VALUE.FIGURE takes a tag of workload.classes "
        f"({', '.join(known) or 'there is none'}) and one of {available}"
    )
