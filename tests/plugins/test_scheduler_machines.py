"""The shipped policies under Hypothesis: random arrivals, aborts and oversize prompts, invariants after each step,
and arrivals that never end, with the gaps that the policies promise."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hookline.core.errors import RequestError
from hookline.core.outputs import FinishReason
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.scheduler_suite import JOININGS, MAX_STEPS, Gaps, endless_steps
from hookline.plugins.schedulers import (
    ChunkedConfig,
    DeadlineConfig,
    FairShareConfig,
    LongestFirstConfig,
    PrefillFirstConfig,
)
from hookline.plugins.schedulers.chunked import Chunked
from hookline.plugins.schedulers.deadline import Deadline
from hookline.plugins.schedulers.fair_share import FairShare
from hookline.plugins.schedulers.longest_first import LongestFirst
from hookline.plugins.schedulers.prefill_first import PrefillFirst
from tests.fuzzing import examples

VOCAB = 20


class EngineMachine(RuleBasedStateMachine):
    scheduler = None

    @initialize(
        num_blocks=st.integers(4, 30),
        block_size=st.sampled_from([1, 2, 3, 8]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 30),
        caching=st.booleans(),
        overlap=st.booleans(),
        joining=st.sampled_from(JOININGS),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, caching, overlap, joining):
        self.engine = fake_engine(
            type(self).scheduler(),
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=48,
            vocab_size=VOCAB,
            eos_token_ids=[0],
            prefix_caching=caching,
            overlap=overlap,
            joining=joining,
        )
        self.now_s = 0.0
        self.engine.clock = lambda: self.now_s
        self.wanted = {}
        self.deadlines = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=60),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 3),
        timeout_s=st.none() | st.integers(1, 4),
    )
    def arrive(self, prompt, max_tokens, min_tokens, ignore_eos, seed, timeout_s):
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), seed=seed, ignore_eos=ignore_eos
        )
        try:
            request_id = self.engine.add(prompt, params, options=RequestOptions(timeout_s=timeout_s))
        except RequestError:
            assert len(prompt) >= self.engine.limits.max_len
            return
        assert len(prompt) < self.engine.limits.max_len
        self.wanted[request_id] = (prompt, params)
        self.deadlines[request_id] = float("inf") if timeout_s is None else self.now_s + timeout_s

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.wanted)))
        self.take(self.engine.abort([request_id, 10**6]))

    @precondition(lambda self: self.engine.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            if self.engine.has_work:
                self.take(self.engine.step())
                check_engine(self.engine)
                assert all(self.deadlines[request_id] > self.now_s for request_id in self.wanted)
                stats = self.engine.last_stats
                limit = self.engine.limits.plan.max_num_batched_tokens
                assert stats is None or stats.num_prefill_tokens + stats.num_decode_tokens <= limit

    @invariant()
    def adds_up(self):
        check_engine(self.engine)

    def take(self, outputs):
        for output in outputs:
            prompt, params = self.wanted.pop(output.request_id)
            is_late = self.deadlines[output.request_id] <= self.now_s
            assert (output.error is not None) <= is_late
            room = min(params.max_tokens, self.engine.limits.max_len - len(prompt))
            if output.finish_reason is not FinishReason.ABORT:
                assert len(output.token_ids) <= room
                if params.min_tokens == 0:
                    stop = [] if params.ignore_eos else [0]
                    assert output.token_ids == completion(params.seed, prompt, room, VOCAB, stop)
                if output.finish_reason is FinishReason.STOP:
                    assert output.token_ids[-1] == 0 and len(output.token_ids) >= params.min_tokens
                else:
                    assert len(output.token_ids) == room

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.take(self.engine.step())
        assert not self.wanted
        assert self.engine.pool.num_free == self.engine.pool.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefillFirst(PrefillFirstConfig()),
        lambda: Chunked(ChunkedConfig()),
        lambda: LongestFirst(LongestFirstConfig()),
        lambda: LongestFirst(LongestFirstConfig(pace=True)),
        lambda: FairShare(FairShareConfig()),
        lambda: Deadline(DeadlineConfig(ttft_s=2.0)),
    ],
    ids=["prefill_first", "chunked", "longest_first", "longest_first paced", "fair_share", "deadline"],
)
def test_engine_and_policy_survive_any_sequence_of_events(make):
    machine = type("Machine", (EngineMachine,), {"scheduler": staticmethod(make)})
    config = settings(
        max_examples=examples(30),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase.settings = config
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=config)


SIZES = st.sampled_from(
    [
        st.tuples(st.integers(1, 10), st.just(1)),
        st.tuples(st.integers(30, 45), st.integers(1, 3)),
        st.tuples(st.integers(1, 45), st.integers(1, 40)),
    ]
).flatmap(lambda sizes: st.lists(sizes, min_size=1, max_size=6))
"""Arrivals in turn, (prompt tokens, max_tokens): short ones for one token, ones longer than a step, all kinds."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "longest_gap"),
    [
        (lambda: PrefillFirst(PrefillFirstConfig()), 16),
        (lambda: PrefillFirst(PrefillFirstConfig(max_prompt_steps=3)), 3),
        (lambda: Chunked(ChunkedConfig()), 0),
        (lambda: LongestFirst(LongestFirstConfig()), 0),
        (lambda: LongestFirst(LongestFirstConfig(pace=True)), 0),
        (lambda: FairShare(FairShareConfig()), 16),
        (lambda: Deadline(DeadlineConfig(default_deadline_s=0.01)), 16),
    ],
    ids=[
        "prefill_first",
        "prefill_first 3",
        "chunked",
        "longest_first",
        "longest_first paced",
        "fair_share",
        "deadline",
    ],
)
@settings(max_examples=examples(10), deadline=None, derandomize=True)
@given(
    sizes=SIZES,
    num_blocks=st.integers(6, 60),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(8, 24),
    caching=st.booleans(),
)
def test_no_running_request_waits_longer_than_promised_while_arrivals_never_end(
    make, longest_gap, sizes, num_blocks, max_num_seqs, budget, caching
):
    engine = fake_engine(
        make(), num_blocks=num_blocks, block_size=8, max_model_len=48, vocab_size=50, prefix_caching=caching,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
    )  # fmt: skip
    engine.add([1, 2], SamplingParams(max_tokens=46, seed=0))
    gaps, halted, seen = Gaps(), set(), set()
    for _ in endless_steps(engine, sizes, 200):
        waiting, running = engine.queue.waiting.values(), engine.queue.running.values()
        assert gaps.longest_after_step(running)[1] <= longest_gap
        still_halted = halted.intersection(engine.queue.waiting)
        is_overtaken = still_halted and any(
            request.num_preemptions == 0 and request.id not in seen for request in running
        )
        assert not is_overtaken, "somebody new was admitted before an answer that was preempted"
        halted = {request.id for request in waiting if request.num_preemptions and request.num_output_tokens}
        seen = set(engine.queue.live) - set(engine.queue.waiting)
