"""The policy against Hookline's conformance suite, and the order in which it admits."""

from __future__ import annotations

import pytest
from hookline_sjf import ShortestJobFirstConfig
from hookline_sjf.policy import ShortestJobFirst

from hookline.core.contracts import ALL, Limits, SchedulerView
from hookline.core.errors import ConfigError
from hookline.core.sampling_params import SamplingParams
from hookline.core.scheduling import MAX_PROMPT_STEPS
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.installed import installed_config
from hookline.core.testing.scheduler_suite import SchedulerSuite, drain


class TestShortestJobFirst(SchedulerSuite):
    max_gap_steps = MAX_PROMPT_STEPS

    def make(self) -> ShortestJobFirst:
        return ShortestJobFirst(ShortestJobFirstConfig())


class Waiting:
    """A request that waits. Sizes are tokens."""

    is_prefilling = False
    num_computed_tokens = 0

    def __init__(self, id: int, num_prompt_tokens: int, max_tokens: int, arrival_s: float) -> None:
        self.id, self.arrival_s, self.max_tokens = id, arrival_s, max_tokens
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens


class Plenty:
    """A ledger with room for everybody."""

    num_free = 1000

    def num_uncomputed_tokens(self, request: Waiting) -> int:
        return request.num_tokens

    def cost(self, request: Waiting, num_tokens: int) -> int:
        return 1

    def take(self, request: Waiting, num_tokens: int) -> bool:
        return True


def admitted(waiting: list[Waiting], max_num_seqs: int, **fields: float) -> list[int]:
    policy = ShortestJobFirst(ShortestJobFirstConfig(**fields))
    return [id_ for id_, _ in policy.plan(look(waiting, max_num_seqs)).prefill]


def look(waiting: list[Waiting], max_num_seqs: int) -> SchedulerView:
    limits = Limits(max_num_seqs, 10_000, 4096, 16, 1000)
    return SchedulerView(waiting=waiting, running=[], prefilling=[], limits=limits, budget=Plenty(), now_s=100.0)


def test_the_smallest_job_is_admitted_first_and_output_counts_as_much_as_prompt() -> None:
    waiting = [Waiting(0, 500, 10, 0.0), Waiting(1, 20, 400, 0.0), Waiting(2, 30, 30, 0.0)]
    assert admitted(waiting, max_num_seqs=2) == [2, 1]


def test_a_long_job_is_passed_by_only_until_its_age_makes_up_for_its_size() -> None:
    long = Waiting(0, 1000, 0, arrival_s=0.0)
    late, later = Waiting(1, 100, 0, arrival_s=8.9), Waiting(2, 100, 0, arrival_s=9.1)
    assert admitted([long, late, later], max_num_seqs=3, ageing_tokens_per_s=100.0) == [1, 0, 2]


def test_short_jobs_end_first_whatever_the_order_of_arrival() -> None:
    engine = fake_engine(ShortestJobFirst(ShortestJobFirstConfig()), max_num_seqs=1, num_blocks=32)
    sizes = {engine.add([1] * size, SamplingParams(max_tokens=2, seed=0)): size for size in (40, 8, 24)}
    assert [sizes[output.request_id] for output in drain(engine)] == [8, 24, 40]


def test_with_nothing_to_admit_everybody_decodes() -> None:
    assert ShortestJobFirst(ShortestJobFirstConfig()).plan(look([], max_num_seqs=4)).decode is ALL


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_ageing_that_would_let_jobs_starve_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.ageing_tokens_per_s=.* must be a finite number above 0"):
        installed_config(scheduler={"name": "sjf", "ageing_tokens_per_s": value})


@pytest.mark.parametrize(("preset", "ageing"), [("sjf", 1000.0), ("sjf_patient", 100.0), ("sjf_impatient", 10_000.0)])
def test_the_installed_presets_set_the_ageing(preset: str, ageing: float) -> None:
    config = installed_config(scheduler=preset)
    assert (config.scheduler.name, config.scheduler.config.ageing_tokens_per_s) == ("sjf", ageing)
