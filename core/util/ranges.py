"""Ranges of numbers: a dataclass declares them on its fields, and one function checks them all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hookline.core.errors import ConfigError, shown
from hookline.core.util.text import joined

_RANGE = "hookline.range"


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    excludes_low: bool
    excludes_high: bool

    def holds(self, value: float) -> bool:
        """Whether the range has the value; no range has NaN or the infinities."""
        is_above = self.low < value if self.excludes_low else self.low <= value
        is_below = value < self.high if self.excludes_high else value <= self.high
        return is_above and is_below and abs(value) < math.inf

    def text(self, value: float) -> str:
        """The range in words, for an error: "at least 1 and at most 8"."""
        low = f"{'above' if self.excludes_low else 'at least'} {self.low}" if self.low > -math.inf else ""
        high = f"{'below' if self.excludes_high else 'at most'} {self.high}" if self.high < math.inf else ""
        if low and not high and isinstance(value, float):
            return f"a finite number {low if self.excludes_low else f'of {low}'}"
        return " and ".join(filter(None, (low, high))) or "finite"


def bounded(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field for a number in a range, which is checked together with the configuration.

    `limit: int = bounded(16, 1)` is 16 unless set, and at least 1.
    low, high: bounds that the range includes. above, below: bounds that it excludes, given in their place. NaN and the
    infinities are outside every range; None, where the field's type allows it, is always accepted.
    """
    limits = _Range(
        low if above is None else above, high if below is None else below, above is not None, below is not None
    )
    return field(default=default, metadata={_RANGE: limits})


def check_ranges(cls: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse a value outside the range that its field of the dataclass `cls` declares. `prefix` names `cls` in errors.

    Raises: ConfigError naming the key, the value and the range.
    """
    for one in fields(cls):
        limits, value = one.metadata.get(_RANGE), values.get(one.name)
        if limits is not None and value is not None and not limits.holds(value):
            or_null = ", or null" if one.default is None else ""
            raise ConfigError(f"{joined(prefix, one.name)}={shown(value)} must be {limits.text(value)}{or_null}")
