"""scheduler=deadline: who goes first, steps that running requests can wait for, and goodput beside the others."""

import pytest

from hookline.core.bench.driver import drive
from hookline.core.bench.metrics import summarise
from hookline.core.bench.settings import Slo
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.config.settings import validate
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.simulate.cost import read_cost
from hookline.core.simulate.engine import simulated_engine
from hookline.core.simulate.executor import VirtualClock
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.scheduler_suite import look
from hookline.plugins.schedulers import DeadlineConfig
from hookline.plugins.schedulers.deadline import Deadline
from hookline.plugins.schedulers.step_costs import DecodeCosts, PromptCosts


def params(max_tokens=4):
    return SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)


def engine_at_zero(**fields):
    """An engine with one seat, on a virtual clock."""
    engine, clock = fake_engine(Deadline(DeadlineConfig(**fields)), max_num_seqs=1), VirtualClock()
    engine.clock, engine.sleep = clock.now, clock.sleep
    return engine, clock


def first_planned(engine):
    return engine.scheduler.plan(look(engine)).prefill[0][0]


def test_the_earliest_deadline_goes_first_and_ttft_stands_in_for_none():
    engine, _ = engine_at_zero(ttft_s=5.0)
    without = engine.add([1, 2], params())
    assert first_planned(engine) == without
    later = engine.add([1, 2], params(), options=RequestOptions(deadline_s=9.0))
    assert first_planned(engine) == without
    sooner = engine.add([1, 2], params(), options=RequestOptions(deadline_s=2.0))
    assert first_planned(engine) == sooner and later not in engine.queue.running


def test_a_default_deadline_stands_in_for_none():
    engine, _ = engine_at_zero(ttft_s=0.1, default_deadline_s=8.0)
    engine.add([1, 2], params())
    sooner = engine.add([1, 2], params(), options=RequestOptions(deadline_s=7.0))
    assert first_planned(engine) == sooner


def test_who_cannot_be_in_time_waits_for_who_can():
    engine, clock = engine_at_zero(ttft_s=1.0)
    late = engine.add([1, 2], params())
    clock.sleep(1.5)
    new = engine.add([1, 2], params())
    assert first_planned(engine) == new
    clock.sleep(1.5)
    assert first_planned(engine) == late, "both are late"


def test_the_late_get_their_share_while_others_keep_arriving():
    engine, clock = engine_at_zero(ttft_s=100.0, late_share=0.2)
    late = engine.add([1, 2], params(1))
    clock.sleep(200.0)
    steps = 0
    while late in engine.queue.live:
        engine.add([1, 2], params(1))
        engine.step()
        clock.sleep(0.01)
        steps += 1
    assert 5 <= steps <= 12


def test_the_largest_is_passed_over_when_not_all_can_be_in_time():
    engine, _ = engine_at_zero(ttft_s=1.0)
    policy = engine.scheduler
    policy._costs.throughput.learn(10, 0.2)  # 20 ms a token
    large = engine.add([1] * 30, params())
    small = [engine.add([2] * 10, params()) for _ in range(3)]
    order = [request.id for request in (policy._note(look(engine)), policy._by_due_time(look(engine)))[1]]
    assert order == [*small, large]


def test_the_costs_of_decodes_are_learned_from_steps():
    costs = DecodeCosts()
    for rows in (1, 4, 9, 30, 2, 17, 60, 33, 5, 50) * 6:
        costs.learn(rows, rows * 100, 0.002 + rows * 30e-6)
    assert costs.seconds(40) == pytest.approx(0.0032, rel=0.1)
    costs.learn(40, 4000, 5.0)
    assert costs.seconds(40) < 0.005, "one step that took long for another reason"


def test_the_best_size_of_prompt_steps_is_the_smallest_that_is_about_as_cheap_as_any():
    costs = PromptCosts()
    for _ in range(2):
        for num_tokens, seconds in [(100, 0.002), (512, 0.002), (1024, 0.012), (4096, 0.013)]:
            costs.learn(num_tokens, seconds)
    assert costs.best_size(16_384) == 512
    assert costs.best_size(128) == 128
    assert not costs.is_known(2048) and costs.seconds(2048) == 0.013


def test_a_first_step_that_compiled_a_kernel_is_soon_forgotten():
    costs = PromptCosts()
    for seconds in (0.5, 0.002, 0.002):
        costs.learn(512, seconds)
    assert costs.seconds(512) == pytest.approx(0.002)


SLO = Slo(ttft_s=0.2, tpot_s=0.02)


def simulated(scheduler, num_prompts, request_rate):
    """The figures of a Poisson load as in conf/workload/poisson.yaml, on an H200 as conf/cost_models has it."""
    host = PluginHost.load()
    config = validate({"scheduler": scheduler, "engine": {"max_num_seqs": 512}}, host)
    engine = simulated_engine(config, read_cost(CONF / "cost_models/h200_qwen3_0_6b.json"), host)
    load = WorkloadConfig(
        num_prompts=num_prompts, prompt_len=(64, 1024), output_len=(16, 256), length_distribution="lognormal",
        request_rate=request_rate,
    )  # fmt: skip
    return summarise(drive(engine, draw_load(load, engine.limits.vocab_size, 0)), SLO)


@pytest.mark.slow
def test_under_overload_more_requests_are_in_time_than_with_the_others():
    goodput = {name: simulated(name, 2400, 500.0)["goodput_s"] for name in ("deadline", "chunked", "longest_first")}
    assert goodput["deadline"] > 1.3 * max(goodput["chunked"], goodput["longest_first"])


@pytest.mark.slow
def test_running_requests_keep_their_time_per_token_and_first_tokens_come_at_once_where_there_is_room():
    figures = simulated("deadline", 300, 100.0)
    assert figures["tpot_s"]["max"] < 0.02 and figures["ttft_s"]["p99"] < 0.03
    assert simulated("deadline", 600, 600.0)["tpot_s"]["p99"] < 0.02
