"""scheduler=fair_share: shares by weight, waits that others do not lengthen, and a memory that stays small."""

import pytest

from hookline.core.testing.fair_service import p99_waits, served_shares
from hookline.plugins.schedulers import FairShareConfig, PrefillFirstConfig
from hookline.plugins.schedulers.fair_share import FairShare
from hookline.plugins.schedulers.prefill_first import PrefillFirst

WEIGHTS = {"a": 3.0, "b": 1.0, "c": 1.0}


def fair_share(**fields):
    return FairShare(FairShareConfig(**{"weights": WEIGHTS, "output_token_cost": 1.0, **fields}))


@pytest.mark.slow
def test_who_waits_is_served_by_weight_though_one_sends_ten_times_as_much():
    shares = served_shares(fair_share(), {"a": 3, "b": 3, "c": 30})
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2}, rel=0.05)


@pytest.mark.slow
def test_nobodys_wait_grows_with_the_load_of_another():
    light, steps = {"a": 0.1, "b": 0.1}, 1500
    few, many = (p99_waits(fair_share(), {**light, "c": rate}, steps) for rate in (1.0, 3.0))
    in_order = p99_waits(PrefillFirst(PrefillFirstConfig()), {**light, "c": 1.0}, steps)
    for tenant in light:
        assert many[tenant] <= few[tenant] + 3 < in_order[tenant] / 10
