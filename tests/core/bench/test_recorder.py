"""What stands between an engine and its executor passes on what it does not note."""

from itertools import pairwise

import numpy as np
import pytest

from hookline import LLM
from hookline.core.bench.command import run_load
from hookline.core.bench.recorder import StepRecorder, token_times
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler


def test_who_asks_to_hear_of_a_stuck_step_is_heard_while_steps_are_recorded():
    engine, told = fake_engine(PlainScheduler()), []
    engine.executor.tell_if_stuck = told.append
    with StepRecorder(engine, lambda: 0.0):
        engine.tell_if_stuck(print)
    assert told == [print]


@pytest.mark.parametrize("drafter", ["suffix", "synthetic"])
def test_each_token_of_a_step_with_drafts_has_its_time(drafter):
    workload = WorkloadConfig(num_prompts=3, prompt_len=[20, 24], output_len=[30, 40])
    with LLM(device="cpu", dtype="float32", drafter=drafter) as llm:
        recording = run_load(llm.engine, workload)
        kept = llm.engine.speculation.num_kept
    times_s, starts = token_times(recording)
    assert np.diff(starts).tolist() == [request.output_tokens for request in recording.requests]
    assert all(30 <= request.output_tokens <= 40 for request in recording.requests)
    assert kept > 0 and recording.steps["num_drawn"].sum() == len(times_s)
    assert (recording.steps["num_drawn"] > 3).any()
    for first, end in pairwise(starts):
        assert (np.diff(times_s[first:end]) >= 0).all()
