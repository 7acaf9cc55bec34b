"""scheduler=fair_share: shares by weight, waits that others do not lengthen, and a memory that stays small."""

import random

import pytest

from hookline import LLM
from hookline.core.config.schema import build
from hookline.core.config.settings import validate
from hookline.core.errors import ConfigError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.simulate.cost import read_cost
from hookline.core.simulate.engine import simulated_engine
from hookline.core.testing.fair_service import add_for, p99_waits, served_shares, shared_engine
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.scheduler_suite import drain
from hookline.core.testing.scheduler_suite.policy_memory import footprint
from hookline.plugins.schedulers import FairShareConfig, PrefillFirstConfig
from hookline.plugins.schedulers import fair_share as fair_share_module
from hookline.plugins.schedulers.fair_share import FairShare
from hookline.plugins.schedulers.prefill_first import PrefillFirst

WEIGHTS = {"a": 3.0, "b": 1.0, "c": 1.0}


def fair_share(**fields):
    return FairShare(FairShareConfig(**{"weights": WEIGHTS, "output_token_cost": 1.0, **fields}))


@pytest.mark.slow
def test_who_waits_is_served_by_weight_though_one_sends_ten_times_as_much():
    shares = served_shares(shared_engine(fair_share()), {"a": 3, "b": 3, "c": 30}, 2000)
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2}, rel=0.05)


@pytest.mark.slow
def test_nobodys_wait_grows_with_the_load_of_another():
    light, steps = {"a": 0.1, "b": 0.1}, 800
    few, many = (p99_waits(shared_engine(fair_share()), {**light, "c": rate}, steps) for rate in (1.0, 2.0))
    in_order = p99_waits(shared_engine(PrefillFirst(PrefillFirstConfig())), {**light, "c": 1.0}, steps)
    for tenant in light:
        assert many[tenant] <= few[tenant] + 3 < in_order[tenant] / 10


def test_of_two_tenants_the_one_that_was_served_less_goes_first():
    engine = fake_engine(fair_share(), max_num_seqs=1)
    for tenant in ("b", "c", "b", "c", "a"):
        engine.add(
            [1] * 8,
            SamplingParams(max_tokens=4, seed=1, ignore_eos=True),
            options=RequestOptions(tags={"tenant": tenant}),
        )
    assert [output.tags["tenant"] for output in drain(engine)] == ["a", "b", "c", "b", "c"]


@pytest.mark.slow
def test_who_was_idle_has_saved_nothing_up():
    engine = shared_engine(fair_share(weights={}))
    shares = served_shares(engine, {"a": 4, "b": 4}, 300)
    assert shares["a"] == pytest.approx(0.5, abs=0.03)
    served_shares(engine, {"a": 4}, 300)
    assert served_shares(engine, {"a": 4, "b": 4}, 300)["b"] == pytest.approx(0.5, abs=0.05)


def test_cached_tokens_are_free():
    engine = fake_engine(fair_share(weights={}), max_num_seqs=1, block_size=4)
    shared = [1] * 24
    for tenant, prompt in [("a", shared), ("b", [2] * 24), ("a", [*shared, 3]), ("a", [*shared, 4]), ("b", [2] * 3)]:
        engine.add(prompt, SamplingParams(max_tokens=1, seed=1), options=RequestOptions(tags={"tenant": tenant}))
    assert [output.tags["tenant"] for output in drain(engine)] == ["a", "b", "a", "b", "a"]


@pytest.mark.slow
def test_tenants_that_never_come_back_leave_little_behind(monkeypatch):
    monkeypatch.setattr(fair_share_module, "MAX_IDLE_TENANTS", 50)
    policy = fair_share()
    engine, rng = shared_engine(policy), random.Random(0)
    for index in range(300):
        add_for(engine, f"tenant {index}", rng)
        add_for(engine, "first", rng)
        engine.step()
    assert 50 <= len(policy._idle) <= 120
    drain(engine)
    assert footprint(policy) < 60


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ConfigError, match=r"scheduler\.weights\.acme=.* must be a finite number above 0"):
        build(FairShareConfig, {"weights": {"acme": weight}}, "scheduler")


BACKLOG = {"a": 3, "b": 3, "c": 30}
ENGINE = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 160, "num_blocks": 200}
COST = CONF / "cost_models/h200_qwen3_0_6b.json"
OPTION = {"name": "fair_share", "weights": WEIGHTS, "output_token_cost": 1.0}


@pytest.mark.slow
def test_shares_follow_the_weights_in_a_simulation():
    host = PluginHost.load()
    config = validate({"scheduler": OPTION, "engine": ENGINE}, host)
    engine = simulated_engine(config, read_cost(COST), host)
    shares = served_shares(engine, BACKLOG, 1500)
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2}, rel=0.05)


@pytest.mark.slow
def test_in_a_simulation_nobodys_wait_grows_with_the_load_of_another():
    host = PluginHost.load()
    config, cost = validate({"scheduler": OPTION, "engine": ENGINE}, host), read_cost(COST)
    light = {"a": 0.1, "b": 0.1}
    few, many = (p99_waits(simulated_engine(config, cost, host), {**light, "c": rate}, 400) for rate in (1.0, 4.0))
    for tenant in light:
        assert many[tenant] <= few[tenant] + 3 < few["c"] / 10


@pytest.mark.slow
def test_shares_follow_the_weights_on_a_real_engine():
    with LLM(scheduler=OPTION, engine={**ENGINE, "overlap": True}) as llm:
        shares = served_shares(llm.engine, BACKLOG, 300)
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2}, rel=0.05)
