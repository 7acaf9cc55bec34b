"""Ranges that are declared on the fields of a dataclass."""

from dataclasses import dataclass

import pytest

from hookline.core.config.schema import build
from hookline.core.contracts import bounded
from hookline.core.errors import ConfigError


@dataclass
class Knobs:
    count: int = bounded(16, 1, 32)
    share: float = bounded(0.5, 0, below=1)
    seconds: float = bounded(1.0, above=0)
    limit: int | None = bounded(None, 1)
    offset: float = bounded(0.0)


@dataclass
class Nested:
    knobs: Knobs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "scheduler.count=0 must be at least 1 and at most 32"),
        ({"count": 33}, "scheduler.count=33 must be at least 1 and at most 32"),
        ({"share": 1}, "scheduler.share=1.0 must be at least 0 and below 1"),
        ({"seconds": 0}, "scheduler.seconds=0.0 must be a finite number above 0"),
        ({"seconds": float("inf")}, "scheduler.seconds=inf must be a finite number above 0"),
        ({"limit": 0}, "scheduler.limit=0 must be at least 1, or null"),
        ({"offset": float("nan")}, "scheduler.offset=nan must be finite"),
        ({"offset": float("-inf")}, "scheduler.offset=-inf must be finite"),
        ({"share": float("nan")}, "scheduler.share=nan must be at least 0 and below 1"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_key_value_and_range(values, message):
    with pytest.raises(ConfigError) as error:
        build(Knobs, values, "scheduler")
    assert str(error.value) == message


def test_the_ends_of_a_range_are_part_of_it_and_none_is_outside_of_all_checks():
    knobs = build(Knobs, {"count": 32, "share": 0, "seconds": 1e-9, "limit": None, "offset": -5}, "scheduler")
    assert knobs == Knobs(count=32, share=0.0, seconds=1e-9, limit=None, offset=-5.0)


def test_a_field_without_a_value_has_its_default():
    assert Knobs() == Knobs(16, 0.5, 1.0, None, 0.0)


def test_a_nested_dataclass_is_checked_under_its_full_key():
    with pytest.raises(ConfigError, match=r"^plugin\.knobs\.count=99 must be"):
        build(Nested, {"knobs": {"count": 99}}, "plugin")
