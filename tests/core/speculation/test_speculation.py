"""Steps with drafts, in an engine without a model: the same tokens as without, whatever happens between two steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hookline.core.contracts import Drafter, DraftRow, FullAttention, Observer, Plan, SlidingWindow
from hookline.core.outputs import FinishReason
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.sampling_params import SamplingParams
from hookline.core.speculation.speculation import Speculation
from hookline.core.step.captured import token_sizes
from hookline.core.testing.fakes import check_engine, completion, fake_engine, watched_by
from hookline.core.testing.fakes.engine import next_token
from hookline.core.testing.plain_scheduler import PlainScheduler

VOCAB_SIZE, STOP = 50, 7


class Knowing(Drafter):
    """Proposes the tokens that the fake draws, now and then a wrong one, and now and then none."""

    k, adaptive = 3, False

    def __init__(self):
        self.random = random.Random(0)

    def propose(self, row):
        tokens = row.tokens.tolist()
        for _ in range(self.random.choice([0, *[row.num_drafts] * 4])):
            tokens.append((next_token(row.seed, tokens, VOCAB_SIZE) + (self.random.random() < 0.2)) % VOCAB_SIZE)
        return tokens[len(row.tokens) :]


class Watching:
    """A watcher that ends its request with its fifth token."""

    def __init__(self):
        self.tokens = []

    def see(self, token_id, reason):
        self.tokens.append(token_id)
        return "fifth" if len(self.tokens) == 5 else None


class Iterating(PlainScheduler):
    """Plans with iterators, which can be read once."""

    def plan(self, view):
        plan = super().plan(view)
        decode = [one.id for one in view.running if not one.is_prefilling and one.id not in plan.preempt]
        return Plan(iter(plan.prefill), iter(decode if plan.decode else ()), iter(plan.preempt))


def drafting_engine(scheduler=PlainScheduler, drafter=Knowing, *, on_device=False, **options):
    """on_device: whether the device makes the drafts of steps that decode alone."""
    options = {"overlap": True, "eos_token_ids": [STOP], "max_num_batched_tokens": 32, **options}
    most, guessing = options["max_num_batched_tokens"], drafter()
    parts = drafter(), "knowing", InstalledExtensions(), VOCAB_SIZE
    options["decoding"] = Speculation(*parts, max_num_batched_tokens=most, on_device=on_device)
    engine = fake_engine(scheduler(), vocab_size=VOCAB_SIZE, **options)
    engine.executor.guess = lambda seed, tokens, num_drafts: guessing.propose(
        DraftRow(0, np.array(tokens, dtype=np.int32), 1, num_drafts, seed=seed)
    )
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"num_blocks": 12, "max_num_seqs": 4},
        {"max_num_batched_tokens": 6, "max_num_seqs": 4},
        {"block_size": 1, "num_blocks": 40},
        {"scheduler": Iterating, "num_blocks": 12, "max_num_seqs": 4},
        {"layers": (FullAttention(), SlidingWindow(3)), "num_blocks": 36, "block_size": 2, "max_model_len": 40},
    ],
    ids=["overlap", "in turn", "preemption", "chunks", "short blocks", "iterators", "window"],
)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("seed", range(3))
def test_arrivals_and_aborts_between_steps_change_no_other_token(seed, on_device, options):
    chosen = random.Random(seed)
    engine, prompts, watchers, aborted, outputs = (
        drafting_engine(on_device=on_device, **options), {}, {}, set(), {},
    )  # fmt: skip
    for _ in range(400):
        if chosen.random() < 0.3 and len(prompts) < 40:
            prompt = [chosen.randrange(5) for _ in range(chosen.randrange(1, 9))]
            watcher = Watching() if chosen.random() < 0.2 else None
            id_ = engine.add(prompt, SamplingParams(max_tokens=chosen.randrange(1, 25), seed=1), watcher=watcher)
            prompts[id_], watchers[id_] = prompt, watcher
        if chosen.random() < 0.05 and engine.queue.live:
            aborted.add(one := chosen.choice(list(engine.queue.live)))
            outputs |= {output.request_id: output for output in engine.abort([one])}
        outputs |= {output.request_id: output for output in engine.step()}
        check_engine(engine)
    assert not engine.has_work and outputs.keys() == prompts.keys() and len(outputs) == 40
    for id_, output in outputs.items():
        right = completion(1, prompts[id_], 25, VOCAB_SIZE, [STOP])
        assert output.token_ids == right[: len(output.token_ids)]
        if id_ in aborted:
            assert output.finish_reason is FinishReason.ABORT
        elif output.finish_reason is FinishReason.STOP:
            assert len(output.token_ids) in (len(right), 5 if watchers[id_] else -1)
        else:
            assert output.finish_reason is FinishReason.LENGTH
        if watchers[id_] is not None:
            assert watchers[id_].tokens == output.token_ids
    counts = engine.speculation
    assert counts.num_kept > 20 and counts.num_drafted > counts.num_kept
    assert any(len(step.drafting_rows) for step in engine.executor.steps) == on_device


class Right(Drafter):
    """Proposes the tokens that the fake draws."""

    k, adaptive = 3, False

    def __init__(self):
        pass

    def propose(self, row):
        return completion(row.seed, row.tokens.tolist(), row.num_drafts, VOCAB_SIZE)


@pytest.mark.parametrize("num_prompt_tokens", range(1, 6))
def test_requests_hold_no_more_blocks_of_a_window_however_many_drafts_a_step_keeps(num_prompt_tokens):
    layers = FullAttention(), SlidingWindow(8)
    engine = drafting_engine(drafter=Right, layers=layers, eos_token_ids=[], max_model_len=80)
    engine.add([1] * num_prompt_tokens, SamplingParams(max_tokens=72, seed=1))
    while engine.has_work:
        engine.step()
        check_engine(engine)
        for request in engine.queue.running.values():
            num_windowed = len(engine.cache.held_blocks(request)) - len(request.blocks)
            assert num_windowed <= 4
    assert engine.speculation.num_kept > 40


class Listening(Observer):
    """Notes when it hears of a step."""

    def __init__(self, events):
        self.events = events

    def on_step_end(self, stats):
        self.events.append("told")


def test_steps_overlap_while_the_device_drafts():
    engine, events = drafting_engine(on_device=True, drafter=Right, eos_token_ids=[]), []
    launch, collect = engine.executor.launch, engine.executor.collect
    engine.executor.launch = lambda step: events.append("launched") or launch(step)
    engine.executor.collect = lambda handle: events.append("collected") or collect(handle)
    for _ in range(3):
        engine.add([1, 2, 3], SamplingParams(max_tokens=100, seed=1))
    while not len(engine.executor.steps[-1:]) or not len(engine.executor.steps[-1].drafting_rows):
        engine.step()
    for _ in range(5):
        events.clear()
        engine.step()
        assert events == ["launched", "collected"]
        assert len(engine.executor.steps[-1].drafting_rows) == 3 and not len(engine.executor.steps[-1].shown_rows)
    while engine.has_work:
        engine.step()
    assert engine.speculation.num_kept > 200
    assert sum(engine.speculation.no_drafts.values()) < 20


class Long(Right):
    """Drafts more than the graphs of few requests have room for."""

    k = 30


def test_the_device_makes_no_more_drafts_than_graphs_are_captured_for():
    engine = drafting_engine(on_device=True, drafter=Long, eos_token_ids=[], max_num_batched_tokens=64, max_num_seqs=2)
    engine.add([1, 2, 3], SamplingParams(max_tokens=100, seed=1))
    while engine.has_work:
        engine.step()
    steps = [step for step in engine.executor.steps if len(step.drafting_rows)]
    assert {step.num_tokens for step in steps} == {16} and token_sizes(2, 64)[-1] == 32


def test_the_next_step_is_launched_before_anybody_is_told_of_the_tokens_that_it_needed():
    events = []
    engine = drafting_engine(observers=watched_by(Listening(events)), eos_token_ids=[])
    launch, collect = engine.executor.launch, engine.executor.collect

    def launched(step):
        events.append("launched")
        return launch(step)

    def collected(handle):
        events.append("collected")
        return collect(handle)

    engine.executor.launch, engine.executor.collect = launched, collected
    engine.add([1, 2, 3], SamplingParams(max_tokens=60, seed=1))
    for _ in range(3):
        engine.step()
    for _ in range(5):
        events.clear()
        engine.step()
        assert events == ["collected", "launched", "told"]
    assert engine.speculation.num_kept > 0


class HoldingBack(PlainScheduler):
    """Once a second request has come, preempts the first one, and admits it again when the second one has ended."""

    def plan(self, view):
        others = [one for one in (*view.waiting, *view.running) if one.id]
        if not others:
            return super().plan(view)
        prefill = [(one.id, one.num_prompt_tokens) for one in view.waiting if one.id]
        decode = [] if prefill else [one.id for one in view.running if one.id]
        return Plan(prefill, decode, [one.id for one in view.running if not one.id])


def test_a_preempted_request_that_had_drafts_keeps_no_steps_from_overlapping():
    engine = drafting_engine(HoldingBack, Right, eos_token_ids=[], max_num_batched_tokens=5)
    engine.add([1, 2, 3], SamplingParams(max_tokens=60, seed=1))
    while not engine.speculation.num_kept:
        engine.step()
    for _ in range(3):  # so many that a step has no room for drafts
        engine.add([4], SamplingParams(max_tokens=30, seed=1))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_engine(engine)
    assert engine.speculation.no_drafts["overlap"] > 60
    assert engine.speculation.num_kept > 30
    right = completion(1, [1, 2, 3], 60, VOCAB_SIZE)
    assert outputs[-1].token_ids == right and outputs[-1].num_preemptions == 1
