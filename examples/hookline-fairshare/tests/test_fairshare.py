"""The policy against Hookline's conformance suite, and what each tenant gets."""

from __future__ import annotations

import pytest
from hookline_fairshare import DeficitRoundRobinConfig
from hookline_fairshare.policy import DeficitRoundRobin

from hookline import LLM
from hookline.core.errors import ConfigError
from hookline.core.scheduling import MAX_PROMPT_STEPS
from hookline.core.testing.fair_service import p99_waits, served_shares, shared_engine
from hookline.core.testing.installed import installed_config
from hookline.core.testing.scheduler_suite import SchedulerSuite

WEIGHTS = {"a": 3.0, "b": 1.0, "c": 1.0}


class TestDeficitRoundRobin(SchedulerSuite):
    max_gap_steps = MAX_PROMPT_STEPS

    def make(self) -> DeficitRoundRobin:
        return DeficitRoundRobin(DeficitRoundRobinConfig())


def policy(**fields: int) -> DeficitRoundRobin:
    return DeficitRoundRobin(DeficitRoundRobinConfig(weights=WEIGHTS, **fields))


def test_who_waits_is_served_by_weight_though_one_sends_ten_times_as_much() -> None:
    shares = served_shares(shared_engine(policy()), {"a": 3, "b": 3, "c": 30}, 2000)
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2}, rel=0.05)


def test_shares_follow_the_weights_on_a_real_engine() -> None:
    option = {"name": "deficit_round_robin", "weights": WEIGHTS, "quantum": 64}
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 160, "num_blocks": 200}
    with LLM(scheduler=option, engine=engine) as llm:
        shares = served_shares(llm.engine, {"a": 3, "b": 3, "c": 30}, 400)
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2}, rel=0.05)


def test_nobodys_wait_grows_with_the_load_of_another() -> None:
    few, many = (p99_waits(shared_engine(policy()), {"a": 0.1, "b": 0.1, "c": rate}, 800) for rate in (1.0, 2.0))
    assert many["a"] <= few["a"] + 5 and many["b"] <= few["b"] + 5


def test_who_does_not_wait_saves_nothing_up() -> None:
    one = policy()
    served_shares(shared_engine(one), {"a": 2, "b": 2}, 300)
    assert one.accounts["a"] != 0
    served_shares(shared_engine(one), {"b": 2}, 300)
    assert one.accounts.get("a", 0.0) <= 0


def test_the_installed_option_takes_weights() -> None:
    config = installed_config(scheduler={"name": "deficit_round_robin", "weights": {"acme": 2}})
    assert config.scheduler.config.weights == {"acme": 2.0}


def test_a_quantum_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.quantum=0 must be at least 1"):
        installed_config(scheduler={"name": "deficit_round_robin", "quantum": 0})
