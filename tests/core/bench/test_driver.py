"""Loads on a fake engine under a clock of our own: who arrives when, what is recorded, and what it amounts to."""

import math

import numpy as np
import pytest

from hookline.core.bench.driver import drive
from hookline.core.bench.files import read_recording, write_recording
from hookline.core.bench.latencies import STATISTICS, spread
from hookline.core.bench.metrics import DISTRIBUTIONS, NUMBERS, check_objective, summarise
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import Load, LoadRequest, WorkloadConfig, draw_load
from hookline.core.errors import ConfigError
from hookline.core.sampling_params import SamplingParams
from hookline.core.sweep.results import objective_value
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler

STEP_S = 1.0


class ManualClock:
    """Every launched step takes a second; sleeping takes what it takes."""

    def __init__(self):
        self.time_s, self.slept = 100.0, []

    def now(self):
        return self.time_s

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time_s += seconds


def engine_on(clock, **options):
    engine = fake_engine(PlainScheduler(), **options)
    engine.clock, engine.sleep = clock.now, clock.sleep
    launch = engine.executor.launch

    def timed(step):
        clock.time_s += STEP_S
        return launch(step)

    engine.executor.launch = timed
    return engine


def request(tokens, max_tokens, arrival_s=0.0, follows=None):
    return LoadRequest(list(tokens), SamplingParams(max_tokens=max_tokens, ignore_eos=True), arrival_s, follows)


def driven(*requests, **options):
    clock = ManualClock()
    engine = engine_on(clock, **options)
    return drive(engine, Load(list(requests))), engine, clock


def test_a_request_arrives_when_it_is_due_and_an_idle_engine_sleeps_until_then():
    recording, _, clock = driven(request([1, 2, 3], 2), request([4, 5], 1, arrival_s=7.5))
    first, second = recording.requests
    assert (first.start_s, first.first_token_s, first.finish_s) == (0.0, 1.0, 2.0)
    assert clock.slept == [5.5]
    assert (second.arrival_s, second.start_s, second.finish_s) == (7.5, 7.5, 8.5)


def test_waiting_counts_from_when_the_request_was_due_not_from_when_the_step_ended():
    recording, _, _ = driven(request([1], 3), request([2], 1, arrival_s=0.25))
    late = recording.requests[1]
    assert late.arrival_s == 0.25
    assert late.start_s == 1.0  # the first step was under way
    assert summarise(recording, Slo())["queue_s"]["max"] == 0.75


def test_a_later_turn_repeats_what_was_said_and_waits_for_its_reader():
    recording, _, _ = driven(request([1, 2, 3, 4, 5], 3), request([9], 2, arrival_s=4.0, follows=0))
    first, second = recording.requests
    assert second.arrival_s == first.finish_s + 4.0
    assert second.prompt_tokens == 5 + 3 + 1
    assert second.cached_tokens == 4  # one block of four; the answer's last token has no keys and values yet
    assert second.follows == 0


def test_a_refused_request_is_recorded_and_takes_its_later_turns_with_it():
    recording, engine, _ = driven(
        request([1], 2), request([], 2), request([5], 1, follows=1), request([6], 1, follows=2)
    )
    assert recording.requests[0].error is None
    assert "the prompt is empty" in recording.requests[1].error
    assert recording.requests[2].error == recording.requests[3].error == "the turn before was refused"
    assert summarise(recording, Slo())["refused"] == 3
    assert not engine.has_work


def test_steps_hold_what_the_scheduler_decided():
    recording, _, _ = driven(request(range(1, 7), 3), request([7, 8], 1), max_num_batched_tokens=8)
    steps = recording.steps
    assert steps["prefill_tokens"].tolist() == [8, 0, 0]
    assert steps["prefill_chunks"].tolist() == [2, 0, 0]
    assert steps["prefill_pairs"].tolist() == [21 + 3, 0, 0]
    assert steps["decode_rows"].tolist() == [0, 1, 1]
    assert steps["decode_context_tokens"].tolist() == [0, 7, 8]
    assert steps["num_drawn"].tolist() == [2, 1, 1]
    assert recording.drawn.tolist() == [0, 1, 0, 0]
    assert recording.chunk_request.tolist() == [0, 1]
    assert recording.chunk_tokens.tolist() == [6, 2]
    assert steps["busy_s"].tolist() == [1.0, 1.0, 1.0]
    assert steps["end_s"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_crowd_with_preemptions_is_recorded_token_for_token(overlap):
    load = draw_load(WorkloadConfig(num_prompts=30, prompt_len=(3, 30), output_len=(1, 20), request_rate=0.5), 50)
    clock = ManualClock()
    recording = drive(engine_on(clock, num_blocks=24, overlap=overlap), load)
    assert recording.steps["preemptions"].sum() > 0
    drawn = np.bincount(recording.drawn, minlength=30)
    for place, record in enumerate(recording.requests):
        assert record.output_tokens == drawn[place] == load.requests[place].params.max_tokens
        assert record.arrival_s <= record.start_s < record.first_token_s <= record.finish_s
    assert recording.steps["num_drawn"].sum() == sum(record.output_tokens for record in recording.requests)
    computed = recording.steps["prefill_tokens"].sum() + sum(record.cached_tokens for record in recording.requests)
    assert computed >= sum(record.prompt_tokens for record in recording.requests)


def test_all_times_are_those_of_the_engines_clock():
    clock, timings = ManualClock(), []
    engine = engine_on(clock)
    step = engine.step

    def watched():
        outputs = step()
        timings.extend(output.timings for output in outputs)
        return outputs

    engine.step = watched
    drive(engine, Load([request([1], 3), request([2], 1, arrival_s=0.25)]))
    late, first = timings
    assert (first.arrival_s, first.scheduled_s, first.first_token_s, first.finished_s) == (100.0, 100.0, 101.0, 104.0)
    assert (late.arrival_s, late.scheduled_s) == (100.25, 101.0)  # due during the first step
    assert engine.last_stats.step_s == STEP_S == engine.last_stats.launch_s


def test_the_engine_keeps_its_own_executor_afterwards():
    clock = ManualClock()
    engine = engine_on(clock)
    executor = engine.executor
    drive(engine, Load([request([1], 1)]))
    assert engine.executor is executor


def test_requests_of_someone_else_are_served_and_not_counted():
    clock = ManualClock()
    engine = engine_on(clock)
    engine.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    recording = drive(engine, Load([request([4], 2)]))
    assert sorted(set(recording.drawn.tolist())) == [-1, 0]
    assert summarise(recording, Slo())["output_tokens"] == 2


# --- figures


def test_latencies_and_goodput_of_a_load_worked_out_by_hand():
    # A runs from 0 to 3; B is due at 0.5 and gets its tokens at 2, 3 and 4.
    recording, _, _ = driven(request([1, 2], 3), request([3], 3, arrival_s=0.5))
    metrics = summarise(recording, Slo(ttft_s=1.2))
    assert metrics["seconds"] == recording.seconds
    assert metrics["ttft_s"] == {"mean": 1.25, "p50": 1.25, "p90": 1.45, "p99": 1.495, "max": 1.5}
    assert recording.requests[1].first_token_s == 2.0
    assert metrics["output_tokens"] == 6
    assert metrics["output_tok_s"] == round(6 / recording.seconds, 1)
    assert metrics["goodput_s"] == round(1 / recording.seconds, 3)
    assert summarise(recording, Slo(ttft_s=1.5, e2e_s=99.0))["goodput_s"] == round(2 / recording.seconds, 3)
    assert summarise(recording, Slo())["goodput_s"] is None


def test_gaps_between_tokens_never_span_two_requests():
    recording, _, _ = driven(request([1], 3), request([2], 1, arrival_s=50.0), request([3], 2, arrival_s=90.0))
    metrics = summarise(recording, Slo())
    assert metrics["itl_s"] == dict.fromkeys(STATISTICS, 1.0)
    assert metrics["tpot_s"]["max"] == 1.0


def test_metrics_are_exactly_the_documented_ones():
    recording, _, _ = driven(request([1], 2))
    metrics = summarise(recording, Slo())
    assert set(metrics) == {*NUMBERS, *DISTRIBUTIONS, "step_times"}


def test_pool_usage_and_prefix_hits():
    shared = list(range(8))
    recording, _, _ = driven(request([*shared, 20], 1), request([*shared, 21], 1, arrival_s=5.0), num_blocks=16)
    metrics = summarise(recording, Slo())
    assert metrics["cached_tokens"] == 8
    assert metrics["prefix_hit_rate"] == round(8 / 18, 4)
    assert metrics["pool_usage"]["max"] <= 3 / 16


def test_what_is_not_known_of_a_step_counts_nowhere():
    assert spread([1.0, math.nan, 3.0])["mean"] == 2.0
    assert spread([math.nan]) is None


def test_an_objective_is_a_figure_by_name():
    recording, _, _ = driven(request([1], 2))
    metrics = summarise(recording, Slo())
    assert objective_value(metrics, "ttft_s.p99") == metrics["ttft_s"]["p99"]
    assert objective_value(metrics, "output_tok_s") == metrics["output_tok_s"]
    assert objective_value(metrics, "goodput_s") is None
    check_objective("itl_s.mean", Slo())
    with pytest.raises(ConfigError, match=r"no metric named objective=output_toks. Did you mean 'output_tok_s'"):
        check_objective("output_toks", Slo())
    with pytest.raises(ConfigError, match="objective=goodput_s needs an objective of service; set slo"):
        check_objective("goodput_s", Slo())


def test_a_bound_of_zero_is_refused():
    with pytest.raises(ConfigError, match=r"slo.tpot_s=0 must be above 0, or null"):
        Slo(tpot_s=0)


# --- files


def test_a_recording_comes_back_from_its_files_as_it_was(tmp_path):
    load = draw_load(WorkloadConfig(num_prompts=20, prompt_len=(3, 30), request_rate=0.7, turns=(1, 3)), 50)
    clock = ManualClock()
    written = drive(engine_on(clock, num_blocks=40), load)
    written.steps["step_s"][1] = math.nan
    write_recording(written, tmp_path / "new")
    read = read_recording(tmp_path / "new")
    assert set(read.steps) == set(written.steps)
    for name, column in written.steps.items():
        np.testing.assert_allclose(read.steps[name], column, atol=1e-6)
        assert read.steps[name].dtype == column.dtype
    for name in ("drawn", "chunk_request", "chunk_tokens"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    assert [one.finish_s for one in read.requests] == pytest.approx(
        [one.finish_s for one in written.requests], abs=1e-6
    )
    assert (read.num_blocks, read.block_size, read.seconds) == (written.num_blocks, 4, written.seconds)
    assert summarise(read, Slo())["output_tokens"] == summarise(written, Slo())["output_tokens"]


def test_missing_records_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"steps.npz cannot be read"):
        read_recording(tmp_path)
