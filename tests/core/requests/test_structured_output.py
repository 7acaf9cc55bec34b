"""Requests with a grammar in an engine without a model: compiling, masks, ends, faults, and everybody else."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from hookline.core.contracts import StructuredOutputs
from hookline.core.errors import RequestError, RequestFault
from hookline.core.outputs import FinishReason
from hookline.core.plugin.registry import GRAMMARS, Entry, Origin
from hookline.core.request_options import RequestOptions
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.requests.structured_output import GrammarChoice, StructuredOutput
from hookline.core.sampling_params import SamplingParams
from hookline.core.speculation.speculation import Speculation
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_grammar import PlainGrammar, PlainGrammars, PlainMatcher, small_vocabulary
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain
from hookline.core.util.arrays import num_mask_words

VOCABULARY = small_vocabulary()
VOCAB_SIZE = len(VOCABULARY.tokens)
STOP = min(VOCABULARY.stop_ids)
TEXTS = ("yes", "no", "yes sir", "né")
HERE = __name__


class Odd(PlainMatcher):
    """Raises, lies or dawdles where the first text of its choice says so; the others are left alone."""

    def fill(self, mask_W):
        if self.grammar.language[0] == b"raise in fill" and self.taken:
            mask_W[:] = -1
            raise OddGrammars.error("boom")
        if self.grammar.language[0] == b"slow":
            time.sleep(0.01)
        super().fill(mask_W)

    def advance(self, tokens):
        if self.grammar.language[0] == b"raise in advance":
            raise OddGrammars.error("boom")
        if self.grammar.language[0] == b"give up in advance":
            raise RequestError("too many states")
        return super().advance(tokens)


class OddGrammars(PlainGrammars):
    """Made of Odd; compiles of "wait" last until `gate` is set."""

    gate = threading.Event()
    error: ClassVar[type[BaseException]] = ValueError

    @property
    def matcher_class(self):
        return Odd

    def compile(self, wanted):
        if "wait" in wanted.value:
            assert self.gate.wait(20)
        if "raise in compile" in wanted.value:
            raise OddGrammars.error("boom")
        return super().compile(wanted)


class FillsAtOnce(OddGrammars):
    """A back end that fills all rows in one call."""

    def fill(self, matchers, masks_NW):
        for matcher, mask_W in zip(matchers, masks_NW, strict=True):
            matcher.fill(mask_W)


@pytest.fixture(params=[OddGrammars, FillsAtOnce])
def backend(request):
    OddGrammars.gate = threading.Event()
    return request.param


def make_engine(backend=OddGrammars, scheduler=None, compile_s=5.0, num_threads=1, drafter=None, **options):
    entry = Entry(GRAMMARS, "odd", f"{backend.__module__}:{backend.__name__}", Origin("theirs", "m", "their-dist", "1"))
    structured_output = StructuredOutput(
        lambda: GrammarChoice(entry),
        VOCAB_SIZE,
        vocabulary=lambda: VOCABULARY,
        compile_s=compile_s,
        num_threads=num_threads,
    )
    options = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [STOP], "late": structured_output, **options}
    if drafter is not None:
        parts = drafter, "theirs", InstalledExtensions(), VOCAB_SIZE, structured_output
        most = options.setdefault("max_num_batched_tokens", 32)
        options["decoding"] = Speculation(*parts, max_num_batched_tokens=most)
    return fake_engine(scheduler or PlainScheduler(), **options)


def choice(*texts, max_tokens=20, after=None, **options):
    return SamplingParams(
        max_tokens=max_tokens, structured_outputs=StructuredOutputs(choice=texts, after=after), **options
    )


def text_of(output):
    return b"".join(VOCABULARY.tokens[one] for one in output.token_ids if one not in VOCABULARY.stop_ids).decode()


def served(engine, requests):
    """The outputs in order of the requests, with the engine's state checked after each step."""
    ids = [engine.add(prompt, params) for prompt, params in requests]
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output
        check_engine(engine)
    return [found[one] for one in ids]


@pytest.mark.parametrize("overlap", [False, True])
def test_each_completion_is_one_of_its_choices(backend, overlap):
    outputs = served(
        make_engine(backend, overlap=overlap), [([1, 2, seed], choice(*TEXTS, seed=seed)) for seed in range(30)]
    )
    assert all(output.finish_reason is FinishReason.STOP for output in outputs)
    texts = {text_of(output) for output in outputs}
    assert texts <= set(TEXTS) and len(texts) > 2


@pytest.mark.parametrize("overlap", [False, True])
def test_plain_requests_beside_structured_ones_get_the_same_tokens(backend, overlap):
    mixed = [
        ([1, 2, seed], choice(*TEXTS, seed=seed) if seed % 2 else SamplingParams(seed=seed, max_tokens=9))
        for seed in range(12)
    ]
    outputs = served(make_engine(backend, overlap=overlap), mixed)
    for (prompt, params), output in list(zip(mixed, outputs, strict=True))[::2]:
        assert output.token_ids == completion(params.seed, prompt, 9, VOCAB_SIZE, [STOP])


def test_overlap_and_preemption_change_no_token(backend):
    requests = [
        ([*range(1, 9), seed], choice(*(f"{seed} {'a' * length}" for length in range(8, 24)), seed=seed))
        for seed in range(8)
    ]
    plain = [output.token_ids for output in served(make_engine(backend), requests)]
    tight = {"num_blocks": 16, "overlap": True, "max_num_batched_tokens": 8}
    outputs = served(make_engine(backend, **tight), requests)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] == plain


def test_a_request_waits_for_its_grammar_and_holds_up_nobody(backend):
    engine = make_engine(backend)
    slow = engine.add([1, 2], choice("wait", "yes"))
    quick = engine.add([1, 2], SamplingParams(max_tokens=3, seed=1))
    found = []
    while not found:
        found += engine.step()
        check_engine(engine)
    assert [output.request_id for output in found] == [quick]
    assert slow in engine.queue.compiling and engine.num_waiting == 1
    backend.gate.set()
    assert [text_of(output) for output in drain(engine)] in (["wait"], ["yes"])


@pytest.mark.slow
def test_a_compile_that_takes_too_long_ends_its_requests_alone(backend):
    engine = make_engine(backend, compile_s=0.05)
    ids = [engine.add([1, 2], choice("wait")), engine.add([3], choice("wait"))]
    waits_in_vain = engine.add([3], choice("behind the one that never ends"))
    outputs = {output.request_id: output for output in drain(engine)}
    for id_ in ids:
        assert outputs[id_].finish_reason is FinishReason.ERROR
        assert outputs[id_].error == (
            "sampling.structured_outputs.choice: compiling it takes longer than 0.05 s, which is the most it may take; "
            "make it smaller"
        )
    held_up = outputs[waits_in_vain]
    assert held_up.finish_reason is FinishReason.ABORT and held_up.error == (
        "sampling.structured_outputs.choice: all threads are held up by grammars that take longer than 0.05 s; try "
        "again later"
    )
    for _ in range(3):  # asks again, and is compiled once
        engine.add([3], choice("behind the one that never ends"))
        assert drain(engine)[0].error == held_up.error
    pool = engine.state.late._pool
    assert pool.num_queued == 1
    backend.gate.set()
    pool.limit_s = 60.0
    (served_late,) = served(engine, [([3], choice("behind the one that never ends", seed=1, max_tokens=60))])
    assert text_of(served_late) == "behind the one that never ends"


@pytest.mark.slow
def test_a_compile_that_only_waits_for_a_processor_is_not_too_slow(backend):
    engine = make_engine(backend, compile_s=0.2)
    engine.add([1, 2], choice("wait"))
    timer = threading.Timer(0.6, backend.gate.set)
    timer.start()
    (output,) = drain(engine)
    assert text_of(output) == "wait"


@pytest.mark.slow
def test_a_grammar_that_took_too_long_holds_up_no_second_thread_and_is_served_once_it_is_compiled(backend, monkeypatch):
    compiled, compile_ = [], backend.compile

    def compile_and_tell(self, wanted):
        if wanted.value[0] in ("wait", "quick"):  # and not what an engine of an earlier test still has to compile
            compiled.append(wanted.value[0])
        return compile_(self, wanted)

    monkeypatch.setattr(backend, "compile", compile_and_tell)
    engine = make_engine(backend, compile_s=0.05, num_threads=3)
    engine.add([1, 2], choice("wait"))
    assert "takes longer than 0.05 s" in drain(engine)[0].error
    for _ in range(3):
        with pytest.raises(RequestError, match="takes longer than"):
            engine.add([1, 2], choice("wait"))
    engine.state.late._pool.limit_s = 60.0  # for the quick one, on a busy machine
    (quick,) = served(engine, [([1], choice("quick", seed=1))])
    assert text_of(quick) == "quick" and compiled == ["wait", "quick"]
    backend.gate.set()
    until = time.monotonic() + 20
    while engine.state.late._given_up:
        assert not list(engine.state.late.opened()) and time.monotonic() < until
        time.sleep(0.001)
    assert engine.state.late._cached_bytes > 0
    (late,) = served(engine, [([1], choice("wait", seed=1))])
    assert text_of(late) == "wait" and compiled == ["wait", "quick"]


def test_slow_grammars_of_one_tenant_leave_a_thread_to_another(backend):
    engine = make_engine(backend, compile_s=60.0, num_threads=3)
    slow = [
        engine.add([1], choice("wait", str(number)), options=RequestOptions(tags={"tenant": "a"}))
        for number in range(20)
    ]
    quick = engine.add([1], choice("quick"), options=RequestOptions(tags={"tenant": "b"}))
    also_untagged = engine.add([1], choice("yes"))
    found = []
    while len(found) < 2:
        found += engine.step()
    assert {output.request_id for output in found} == {quick, also_untagged}
    assert engine.state.late._pool.num_queued == 18 and engine.num_waiting == 20
    backend.gate.set()
    assert {output.request_id for output in drain(engine)} == set(slow)


def test_a_grammar_that_two_tenants_want_is_compiled_once_in_the_first_turn_that_comes(backend, monkeypatch):
    compiled, compile_ = [], backend.compile

    def compile_and_tell(self, wanted):
        compiled.append(wanted.value[0])
        return compile_(self, wanted)

    monkeypatch.setattr(backend, "compile", compile_and_tell)
    engine = make_engine(backend, compile_s=60.0, num_threads=2)
    for text in ("wait", "both"):
        engine.add([1], choice(text, "of a"), options=RequestOptions(tags={"tenant": "a"}))
    others = engine.add([1], choice("both", "of a"), options=RequestOptions(tags={"tenant": "b"}))
    found = []
    while not found:
        found += engine.step()
    assert others in [output.request_id for output in found]
    backend.gate.set()
    drain(engine)
    assert sorted(one for one in compiled if one in ("wait", "both")) == ["both", "wait"]


@pytest.mark.slow
def test_a_grammar_that_has_begun_since_it_was_given_up_is_waited_for(backend, monkeypatch):
    """Told to try again later, a caller comes back while it is being compiled."""
    compile_, has_begun, may_end = backend.compile, threading.Event(), threading.Event()

    def compile_slowly(self, wanted):
        if wanted.value[0] == "later":
            has_begun.set()
            assert may_end.wait(20)
        return compile_(self, wanted)

    monkeypatch.setattr(backend, "compile", compile_slowly)
    engine = make_engine(backend, compile_s=0.05)
    engine.add([1], choice("wait"))
    engine.add([1], choice("later"))
    assert any("try again later" in output.error for output in drain(engine))
    engine.state.late._pool.limit_s = 60.0
    backend.gate.set()
    assert has_begun.wait(20)
    id_ = engine.add([1], choice("later", seed=1))
    may_end.set()
    (output,) = drain(engine)
    assert output.request_id == id_ and text_of(output) == "later"


@pytest.mark.parametrize("place", ["compile", "fill", "advance"])
@pytest.mark.parametrize(("overlap", "error"), [(False, ValueError), (True, SystemExit)])
def test_a_back_end_that_raises_ends_that_request_alone_and_is_named(backend, place, overlap, error, monkeypatch):
    monkeypatch.setattr(OddGrammars, "error", error)
    requests = [([1, 2, seed], choice(*TEXTS, seed=seed)) for seed in range(3)]
    expected = [output.token_ids for output in served(make_engine(backend), requests)]
    requests.insert(1, ([1], choice(f"raise in {place}", seed=9)))
    outputs = served(make_engine(backend, overlap=overlap), requests)
    faulty = outputs.pop(1)
    assert faulty.finish_reason is FinishReason.ERROR
    blame = f"grammars 'odd' of plugin 'theirs' (their-dist 1) fails in {place}: {error.__name__}: boom"
    assert re.fullmatch(rf"{re.escape(blame)} \({Path(__file__).name}:\d+\)", faulty.error) and faulty.is_fault
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("place", "of", "method", "fault"),
    [
        ("compile", OddGrammars, lambda *_: None, "breaks its contract in compile: it returned None, not a Grammar"),
        ("matcher", PlainGrammar, lambda *_: 3, "breaks its contract in matcher: it returned 3, not a GrammarMatcher"),
        ("advance", Odd, lambda *_: None, "breaks its contract in advance: it returned None, not a bool"),
        ("__init__", OddGrammars, lambda *_: 1 / 0, "fails in __init__: ZeroDivisionError: division by zero ("),
        ("fil", OddGrammars, lambda *_: None, "does not keep its contract: its fil is not in the contract."),
    ],
)
def test_what_a_back_end_returns_or_lacks_is_named_in_one_line(monkeypatch, place, of, method, fault):
    monkeypatch.setattr(of, place, method, raising=False)
    (faulty,) = served(make_engine(), [([1], choice("yes"))])
    assert faulty.error.startswith(f"grammars 'odd' of plugin 'theirs' (their-dist 1) {fault}")


def test_a_back_end_that_cannot_be_made_is_at_fault(backend, monkeypatch):
    def fail(self, *arguments):
        raise ValueError("boom")

    monkeypatch.setattr(backend, "__init__", fail)
    (faulty,) = served(make_engine(backend), [([1], choice("yes"))])
    assert faulty.is_fault and "fails in __init__: ValueError: boom" in faulty.error


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_without_an_allowed_token_ends_before_one_is_drawn(backend, overlap, monkeypatch):
    monkeypatch.setattr(Odd, "fill", lambda self, mask_W: None)
    monkeypatch.setattr(Odd, "advance", lambda self, tokens: True)
    faulty, other = served(make_engine(backend, overlap=overlap), [([1], choice("yes")), ([2], SamplingParams(seed=1))])
    assert faulty.finish_reason is FinishReason.ERROR and not faulty.token_ids
    place = "sampling.structured_outputs.choice"
    assert faulty.error == f"{place}: no token fits here (masks by grammars 'odd' of plugin 'theirs' (their-dist 1))"
    assert other.finish_reason is FinishReason.LENGTH


def test_a_grammar_that_reaches_a_limit_when_a_token_is_taken_says_which(backend):
    faulty, other = served(make_engine(backend), [([1], choice("give up in advance")), ([2], choice("yes"))])
    assert faulty.finish_reason is FinishReason.ERROR and text_of(other) == "yes"
    assert faulty.error == "sampling.structured_outputs.choice: too many states"


def test_nothing_is_allowed_where_filling_a_mask_failed(backend):
    engine = make_engine(backend)
    constraints = []
    for text in ("yes", "raise in fill"):
        engine.add([1], choice(text))
        while engine.queue.compiling:
            engine.state.late.opened(is_idle=True)
            engine.let_in_compiled()
        constraints.append(next(reversed(engine.queue.live.values())).late)
    constraints[1].take(VOCABULARY.encode("r")[0])
    masks_NW = np.full((2, num_mask_words(VOCAB_SIZE)), -1, dtype=np.int32)
    engine.state.late.fill(constraints, masks_NW)
    assert masks_NW[0].any() and not masks_NW[1].any()
    assert constraints[0].fault is None and "fails in fill" in str(constraints[1].fault)


def test_a_mask_is_never_late(backend):
    """With overlap, a fill that takes long delays the draw, and never comes after it."""
    requests = [([1, 2, seed], choice("slow", "slow down", "slower", seed=seed)) for seed in range(4)]
    outputs = served(make_engine(backend, overlap=True), requests)
    assert {text_of(output) for output in outputs} <= {"slow", "slow down", "slower"}


def test_what_other_parameters_leave_nothing_of_ends_with_an_error(backend):
    """min_tokens forbids the end, and the grammar everything else: nothing is drawn that does not fit."""
    (output,) = served(make_engine(backend), [([1], choice("yes", "yes sir", min_tokens=19, seed=1))])
    assert output.finish_reason in (FinishReason.ERROR, FinishReason.STOP)
    assert text_of(output) in ("yes", "yes sir")


def test_min_tokens_goes_on_where_the_grammar_can():
    outputs = served(make_engine(), [([seed], choice("a", "aaaaaaaa", min_tokens=4, seed=seed)) for seed in range(8)])
    assert {text_of(output) for output in outputs if output.finish_reason is FinishReason.STOP} == {"aaaaaaaa"}


def test_a_stop_token_that_is_text_is_drawn_where_the_text_is_complete_alone():
    letter = ord("s")
    outputs = served(
        make_engine(), [([seed], choice("s", "yes", stop_token_ids=(letter,), seed=seed)) for seed in range(8)]
    )
    for output in outputs:
        assert output.finish_reason is FinishReason.ERROR or text_of(output) in ("yes", "yess", "s")
        assert letter not in output.token_ids[:-1]


def test_a_grammar_begins_behind_the_text_that_it_comes_after():
    outputs = served(
        make_engine(), [([seed], choice("yes", "no", after="ab", max_tokens=4000, seed=seed)) for seed in range(4)]
    )
    for output in (one for one in outputs if one.finish_reason is FinishReason.STOP):
        data = b"".join(VOCABULARY.tokens[one] for one in output.token_ids if one != STOP)
        _, end, rest = data.partition(b"ab")
        assert end and rest in (b"yes", b"no") and STOP not in output.token_ids[:-1]


def test_a_grammar_begins_behind_the_token_that_it_comes_after():
    mark = STOP + 1
    outputs = served(
        make_engine(), [([seed], choice("yes", "no", after=mark, max_tokens=4000, seed=seed)) for seed in range(3)]
    )
    stopped = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert stopped
    for output in stopped:
        place = output.token_ids.index(mark)
        assert b"".join(VOCABULARY.tokens[one] for one in output.token_ids[place + 1 :] if one != STOP) in (
            b"yes",
            b"no",
        )


def test_an_equal_form_is_compiled_once_and_kept(backend, monkeypatch):
    engine, compiled = make_engine(backend), []
    compile_ = backend.compile
    monkeypatch.setattr(backend, "compile", lambda self, wanted: compiled.append(wanted) or compile_(self, wanted))
    for _ in range(3):
        served(engine, [([1, 2, seed], choice(*TEXTS, seed=seed)) for seed in range(3)])
    assert len(compiled) == 1


def test_what_is_kept_has_a_bound(backend):
    engine = make_engine(backend)
    grammars = engine.state.late
    grammars._cache_bytes = 3000
    served(engine, [([1], choice(f"number {number}", seed=1)) for number in range(20)])
    assert 1 <= len(grammars._cache) <= 5 and grammars._cached_bytes <= 3000


def test_a_form_that_is_refused_is_refused_at_once_the_next_time(backend):
    engine = make_engine(backend)
    params = SamplingParams(structured_outputs={"regex": "a+"})
    (output,) = served(engine, [([1], params)])
    line = "sampling.structured_outputs.regex: this back end supports choice alone, not regex"
    assert (output.finish_reason, output.error, output.token_ids) == (FinishReason.ERROR, line, [])
    assert not output.is_fault
    with pytest.raises(RequestError, match="supports choice alone, not"):
        engine.add([1], params)
    check_engine(engine)


def test_a_request_that_waits_for_its_grammar_can_be_aborted_and_times_out(backend):
    engine = make_engine(backend)
    aborted, late = (
        engine.add([1], choice("wait")),
        engine.add([2], choice("wait"), options=RequestOptions(timeout_s=0.02)),
    )
    assert [output.request_id for output in engine.abort([aborted])] == [aborted]
    (output,) = drain(engine)
    assert (output.request_id, output.finish_reason) == (late, FinishReason.ABORT)
    assert not engine.has_work
    backend.gate.set()


def test_an_engine_without_a_back_end_refuses_in_one_line():
    with pytest.raises(RequestError, match="this engine has no grammar back end"):
        fake_engine(PlainScheduler()).add([1], choice("yes"))


class MadeInAThread(OddGrammars):
    """Notes the threads that it is made in; fails in the first one if `fails`."""

    made_in: tuple[threading.Thread, ...] = ()
    fails = False

    def __init__(self, config, vocabulary):
        type(self).made_in += (threading.current_thread(),)
        if self.fails and len(self.made_in) == 1:
            raise ValueError("boom")
        super().__init__(config, vocabulary)


@pytest.mark.parametrize("fails", [False, True])
def test_a_back_end_can_be_made_before_the_first_request_and_beside_the_caller(fails, monkeypatch):
    monkeypatch.setattr(MadeInAThread, "made_in", ())
    monkeypatch.setattr(MadeInAThread, "fails", fails)
    engine = make_engine(MadeInAThread)
    structured_output = engine.state.late
    assert not structured_output.is_preparing
    structured_output.prepare()
    assert structured_output.is_preparing
    structured_output.wait_until_prepared()
    assert structured_output.is_ready is not fails and not structured_output.is_preparing
    (output,) = served(engine, [([1, 2], choice("yes"))])
    assert text_of(output) == "yes"  # if it failed, it was made once more
    assert len(MadeInAThread.made_in) == 1 + fails and threading.main_thread() not in MadeInAThread.made_in


def test_without_a_back_end_nothing_is_prepared_and_a_request_hears_why():
    def choose():
        raise RequestError("none is installed")

    structured_output = StructuredOutput(choose, VOCAB_SIZE, vocabulary=lambda: VOCABULARY)
    structured_output.prepare()
    structured_output.wait_until_prepared()
    assert not structured_output.is_ready and not structured_output.is_preparing
    engine = fake_engine(PlainScheduler(), vocab_size=VOCAB_SIZE, late=structured_output)
    with pytest.raises(RequestError, match="none is installed"):
        engine.add([1, 2], choice("yes"))


def test_completions_of_one_prompt_have_matchers_of_their_own(backend):
    engine = make_engine(backend)
    first, *others = choice(*TEXTS, seed=3, n=6).each()
    ids = [engine.add([1, 2], first)]
    ids += [engine.add([1, 2], one, like=ids[0]) for one in others]
    outputs = drain(engine)
    assert sorted(output.request_id for output in outputs) == ids
    assert all(text_of(output) in TEXTS for output in outputs)


def test_the_masks_of_a_step_are_asked_for_only_if_a_request_has_a_grammar():
    engine = make_engine()
    engine.executor.release = None
    assert served(engine, [([1, 2], SamplingParams(seed=1, max_tokens=4))])[0].token_ids
    assert engine.state.late._choice is None


def test_padding_of_the_vocabulary_is_forbidden_whatever_the_back_end_says(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(Odd, "fill", lambda self, mask_W: mask_W.fill(-1))
    engine.add([1], choice("yes"))
    drain(engine)
    masks = engine.executor.masks[0]
    known = max(token_id for token_id, token in enumerate(VOCABULARY.tokens) if token)
    allowed = [token_id for token_id in range(32 * len(masks)) if masks[token_id // 32] >> token_id % 32 & 1]
    assert allowed == list(range(known + 1))


def test_structured_outputs_replace_those_of_a_params_object():
    assert replace(choice("yes"), structured_outputs=None).structured_outputs is None


class Notes:
    """A watcher that notes when it sees a token."""

    def __init__(self, events):
        self.events = events

    def see(self, token_id, reason):
        self.events.append("text")


def test_with_overlap_the_next_draws_are_released_before_texts_and_outputs_are_made():
    engine, events = make_engine(overlap=True), []
    for seed in range(3):
        engine.add([1, 2, seed], choice("aaaaaaaa", seed=seed), watcher=Notes(events))
    release, collect = engine.executor.release, engine.executor.collect
    engine.executor.release = lambda *arguments: events.append("release") or release(*arguments)
    engine.executor.collect = lambda handle: events.append("collect") or collect(handle)
    assert [text_of(output) for output in drain(engine)] == ["aaaaaaaa"] * 3
    middle = events[events.index("collect") :]
    assert middle[:6] == ["collect", "release", "text", "text", "text", "collect"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fault_in_the_drawing_half_of_a_step_ends_its_request_alone(backend, overlap):
    """Faults of logits processors are found when the masks are there: the others compute the step again."""
    requests = [([1, 2, seed], choice(*TEXTS, seed=seed)) for seed in range(4)]
    requests.append(([9], SamplingParams(max_tokens=6, seed=9)))
    expected = [output.token_ids for output in served(make_engine(backend), requests)]
    engine = make_engine(backend, overlap=overlap)
    ids = [engine.add(prompt, params) for prompt, params in requests]
    release, calls = engine.executor.release, []

    def failing(handle, num_rows):
        calls.append(num_rows)
        if len(calls) == 2:
            raise RequestFault("processor 'odd' fails", rows=[engine.queue.live[ids[1]].row])
        release(handle, num_rows)

    engine.executor.release = failing
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        check_engine(engine)
    faulty = outputs.pop(ids.pop(1))
    assert faulty.finish_reason is FinishReason.ERROR and "processor 'odd' fails" in faulty.error
    del expected[1]
    assert [outputs[id_].token_ids for id_ in ids] == expected
