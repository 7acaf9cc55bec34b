"""Time in a simulated engine: who waits for whom, with and without overlap. Every figure is worked out by hand."""

import pytest

from hookline.core.bench.driver import drive
from hookline.core.bench.workload import Load, LoadRequest
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.simulate.cost import DECODE, PREFILL, CostModel, Curve, HostCost
from hookline.core.simulate.executor import run_on
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler


def request(num_tokens, max_tokens, arrival_s=0.0):
    return LoadRequest([1] * num_tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), arrival_s)


def cost(host_s=0.0, launches=None, **options):
    """A prompt takes 10 s, a decode step 1 s."""
    return CostModel(Curve([1], [1.0]), Curve([1], [10.0]), host=HostCost(host_s, launch_s=launches or {}), **options)


def driven(model, *requests, **options):
    engine = fake_engine(PlainScheduler(), **options)
    run_on(engine, model)
    engine.time_steps()
    return drive(engine, Load(list(requests)))


def test_without_overlap_the_host_comes_before_each_step():
    recording = driven(cost(host_s=0.5), request(4, 3))
    assert recording.steps["end_s"].tolist() == [10.5, 12.0, 13.5]
    assert recording.steps["device_s"].tolist() == [10.0, 1.0, 1.0]
    assert recording.steps["idle_s"].tolist() == [0.0, 0.5, 0.5]
    assert recording.steps["host_s"].tolist() == [0.5, 0.5, 0.5]


def test_with_overlap_the_host_hides_behind_the_device():
    recording = driven(cost(host_s=0.5, gap_s=0.125), request(4, 4), overlap=True)
    assert recording.steps["end_s"].tolist() == [10.5, 11.625, 12.75, 13.875]
    assert recording.steps["idle_s"].tolist() == [0.0, 0.125, 0.125, 0.125]


def test_with_overlap_a_slow_host_is_what_steps_wait_for():
    recording = driven(cost(host_s=3.0), request(4, 4), overlap=True)
    assert recording.steps["end_s"].tolist() == [13.0, 16.0, 19.0, 20.0]  # tokens are taken after the next launch
    assert recording.steps["idle_s"].tolist() == [0.0, 0.0, 2.0, 2.0]


def test_a_step_of_many_launches_begins_with_them_and_is_not_over_before():
    recording = driven(cost(launches={PREFILL: 4.0, DECODE: 3.0}), request(4, 2))
    assert recording.steps["end_s"].tolist() == [10.0, 13.0]
    assert recording.steps["device_s"].tolist() == [10.0, 3.0]


def test_a_captured_step_begins_after_its_launch():
    recording = driven(cost(launches={DECODE: 3.0}, captures=True), request(600, 2), max_num_batched_tokens=600,
                       max_model_len=1000, num_blocks=200)  # fmt: skip
    assert recording.steps["end_s"].tolist() == [10.0, 14.0]
    assert recording.steps["idle_s"].tolist() == [0.0, 3.0]


def test_a_request_that_comes_later_finds_the_device_free_again():
    recording = driven(cost(host_s=0.5), request(4, 1), request(4, 1, arrival_s=20.0))
    first, second = recording.requests
    assert (first.finish_s, second.start_s, second.finish_s) == (10.5, 20.0, 30.5)


def test_timeouts_and_idle_policies_live_on_the_virtual_clock():
    engine = fake_engine(PlainScheduler())
    clock = run_on(engine, cost())
    engine.add([1, 2], SamplingParams(max_tokens=50), options=RequestOptions(timeout_s=12.5))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert len(outputs[0].token_ids) == 4  # after 10, 11, 12 and 13 seconds
    assert outputs[0].timings.total_s == clock.now() == 13.0
    engine.sleep(7.0)
    assert clock.now() == 20.0


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_simulation_comes_to_the_same_times(overlap):
    runs = [driven(cost(host_s=0.25), request(4, 3), request(8, 5, 3.5), overlap=overlap) for _ in range(2)]
    assert runs[0].steps["end_s"].tolist() == runs[1].steps["end_s"].tolist()
    assert runs[0].requests == runs[1].requests
