"""What stands between an engine and its executor passes on what it does not note."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from hookline import LLM
from hookline.core.bench.command import run_load
from hookline.core.bench.driver import drive
from hookline.core.bench.recorder import StepRecorder, token_times
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from tests.core.speculation.test_speculation import drafting_engine

FIRST_STEPS = """
import sys
from types import SimpleNamespace
from hookline.core.bench.driver import drive
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.step.message import READ_WIDTH, Step
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.util.arrays import ints
from hookline.core.worker.results.prompt_readers import PromptReaders

engine, load = fake_engine(PlainScheduler()), draw_load(WorkloadConfig(num_prompts=2, output_len=(3, 3)), 50)
readers, read = PromptReaders(), ints([0, 1, *[0] * (READ_WIDTH - 2)])
readers.add({1: SimpleNamespace(reads_last=True)})
step = Step(chunk_rows=ints([2]), chunk_starts=ints([0]), chunk_lens=ints([4]), reads=read, read_lens=ints([0]))
before = set(sys.modules)
drive(engine, load)
(group,) = readers.groups(step)
assert (group.reader, group.tokens.tolist()) == (1, [3])
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_the_first_steps_import_nothing_which_would_be_taken_for_their_time():
    done = subprocess.run([sys.executable, "-c", FIRST_STEPS], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


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


def test_each_token_of_a_step_in_which_the_device_drafts_has_its_time():
    engine = drafting_engine(on_device=True, eos_token_ids=[])
    recording = drive(engine, draw_load(WorkloadConfig(num_prompts=3, prompt_len=[5, 9], output_len=[30, 40]), 50))
    times_s, starts = token_times(recording)
    assert np.diff(starts).tolist() == [request.output_tokens for request in recording.requests]
    steps = recording.steps
    num_drawn = steps["num_drawn"].sum()  # also of steps that were launched before it was known that a request is over
    assert engine.speculation.num_kept > 0 and len(times_s) <= num_drawn <= len(times_s) + 3
    assert (steps["decode_rows"] % 4 == 0)[-10:].all() and (steps["decode_context_tokens"][-10:] > 100).all()
