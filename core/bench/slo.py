"""Latency bounds (service level objectives) that a request must keep to count as good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hookline.core.util.ranges import bounded, check_ranges


@dataclass(frozen=True)
class Slo:
    """Latency bounds that a request must keep to count as good, in seconds; None: no bound.

    Raises: ConfigError for a bound that is not above 0.
    """

    ttft_s: float | None = bounded(None, above=0)
    """Time to the first token."""
    tpot_s: float | None = bounded(None, above=0)
    """Mean time per token after the first."""
    e2e_s: float | None = bounded(None, above=0)
    """Time to the last token."""

    def __post_init__(self) -> None:
        check_ranges(Slo, vars(self), "slo")

    @property
    def is_stated(self) -> bool:
        """Whether it bounds anything."""
        return self != Slo()

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, in seconds, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def is_met(self, latencies: Mapping[str, float]) -> bool:
        """Whether a request's latencies keep every bound."""
        return all(latencies[name] <= bound for name, bound in self.bounds.items())
