"""The output_processor under Hypothesis: whatever happens, each request has one end, and its pieces are its text."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hookline.core.errors import RequestError
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.outputs import FinishReason
from hookline.core.request_options import RequestOptions
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from tests.core.frontend.test_output_processor import Letters
from tests.core.util.test_stop_strings import letter_by_letter
from tests.fuzzing import examples

VOCAB = 6
STOPS = ["A", "AB", "BA", "CDC", "FFE", "DD"]
ENOUGH_STEPS = 3000


class Caller:
    """Collects the Deltas of one request and holds its end to what it must be."""

    def __init__(self, prompt, params, is_cumulative):
        self.prompt, self.params, self.is_cumulative = prompt, params, is_cumulative
        self.text, self.ids, self.output = "", [], None

    def receive(self, delta):
        assert self.output is None, "new_deltas after the end"
        assert not self.is_cumulative or delta.text.startswith(self.text)
        self.text = delta.text if self.is_cumulative else self.text + delta.text
        self.ids += delta.token_ids
        self.output = delta.output
        if delta.output is not None:
            self.check(delta.output)

    def check(self, output):
        free = Letters().decode(completion(self.params.seed, self.prompt, self.params.max_tokens, VOCAB))
        assert (self.text, self.ids) == (output.text, output.token_ids)
        assert free.startswith(Letters().decode(output.token_ids))
        text, stop = letter_by_letter(free, self.params.stop, self.params.include_stop_str_in_output)
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (output.text, output.stop_reason) == (text, stop)
            assert (output.finish_reason is FinishReason.STOP) == (stop is not None)
        else:
            assert free.startswith(output.text) and output.stop_reason is None


class DeskMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(8, 24), overlap=st.booleans(), queue=st.none() | st.integers(1, 6))
    def start(self, num_blocks, overlap, queue):
        sizes = {"num_blocks": num_blocks, "block_size": 2, "max_num_seqs": 3, "max_model_len": 16}
        options = {"vocab_size": VOCAB, "overlap": overlap, "max_queued_requests": queue}
        self.output_processor = OutputProcessor(fake_engine(PlainScheduler(), **sizes, **options), Letters())
        self.engine, self.now_s, self.open = self.output_processor.engine, 0.0, {}
        self.engine.clock = lambda: self.now_s

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        values=st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 9),
                "seed": st.integers(0, 5),
                "stop": st.lists(st.sampled_from(STOPS), max_size=2),
                "include_stop_str_in_output": st.booleans(),
                "n": st.integers(1, 3),
            }
        ),
        follows=st.booleans(),
        is_cumulative=st.booleans(),
        timeout_s=st.none() | st.integers(1, 9),
    )
    def add(self, prompt, values, follows, is_cumulative, timeout_s):
        params, before = SamplingParams(**values), set(self.engine.queue.live)
        limit = self.engine.limits.max_queued_requests
        is_full = limit is not None and len(self.engine.queue.waiting) + params.n > limit
        callers = [Caller(prompt, one, is_cumulative) for one in params.each()]
        try:
            send = lambda delta: callers[delta.index].receive(delta)  # noqa: E731
            options = {"follows": follows, "is_cumulative": is_cumulative}
            options["options"] = RequestOptions(timeout_s=timeout_s)
            ids = self.output_processor.add(prompt, params, send, **options)
        except RequestError:
            assert is_full and set(self.engine.queue.live) == before
            return
        assert not is_full
        self.open.update(zip(ids, callers, strict=True))

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.output_processor.step()
            check_engine(self.engine)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_gone=st.booleans())
    def end(self, data, is_gone):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.open)), unique=True, min_size=1))
        # Those that a broken step ended are gone already, and hear of it with the next one.
        leaving = [self.open[id_] for id_ in ids if id_ in self.engine.queue.live]
        if not is_gone:
            self.output_processor.abort([*ids, 10**6])
            assert all(caller.output is not None for caller in leaving)
            return
        self.output_processor.forget([*ids, 10**6])
        for id_ in ids:
            del self.open[id_]
        assert not set(ids) & set(self.engine.queue.live)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.engine.queue.waiting or self.engine.queue.running)
    @rule()
    def break_off(self):
        self.engine.executor.launch = lambda step: 1 / 0
        try:
            self.output_processor.step()
        except ZeroDivisionError:
            assert not self.engine.queue.live
        finally:
            del self.engine.executor.launch

    @invariant()
    def adds_up(self):
        if hasattr(self, "output_processor"):
            check_engine(self.engine)
            self.open = {id_: caller for id_, caller in self.open.items() if caller.output is None}
            assert set(self.engine.queue.live) <= set(self.open)
            assert len(self.output_processor) == len(self.open)

    def teardown(self):
        if hasattr(self, "output_processor"):
            for _ in range(ENOUGH_STEPS):
                if not len(self.output_processor):
                    break
                self.output_processor.step()
            self.adds_up()
            assert not self.open and self.engine.pool.num_free == self.engine.pool.num_blocks


@pytest.mark.slow
def test_every_request_has_one_end_and_its_pieces_are_its_text():
    config = settings(
        max_examples=examples(40),
        report_multiple_bugs=False,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(DeskMachine, settings=config)
