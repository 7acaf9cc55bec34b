"""Requests with text over a fake engine: streams, stop strings, several completions, and callers that leave."""

import numpy as np
import pytest

from hookline.core.engine.engine import Engine
from hookline.core.errors import PluginError, QueueFullError, RequestError
from hookline.core.frontend.generation import Asked, Call
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.outputs import FinishReason, merge_completions
from hookline.core.request_options import RequestOptions
from hookline.core.requests.request_queue import RequestQueue
from hookline.core.sampling_params import SamplingParams, derived_seed
from hookline.core.step.message import Step
from hookline.core.testing.fakes import check_engine, completion, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.tokenizer.codec import Codec

VOCAB = 50
PROMPT = [1, 2, 3]


class Letters(Codec):
    """A tokenizer of one letter a token."""

    def __init__(self):
        super().__init__(None)
        self._tokenizer = self

    def get_vocab(self):
        return {}

    def encode(self, prompt):
        return [ord(letter) - 65 for letter in prompt] if isinstance(prompt, str) else list(prompt)

    def decode(self, token_ids, *, skip_special_tokens=True, behind=()):
        return "".join(chr(65 + id_) for id_ in token_ids)


def params(max_tokens=8, seed=1, **options):
    return SamplingParams(max_tokens=max_tokens, seed=seed, **options)


def output_processor(**options):
    return OutputProcessor(fake_engine(PlainScheduler(), **options), Letters())


def letters(num_tokens, seed=1, prompt=PROMPT):
    return Letters().decode(completion(seed, prompt, num_tokens, VOCAB))


def outputs(counter, *prompts_and_params, **options):
    deltas = list(Call(counter, [Asked(*one) for one in prompts_and_params], **options).run())
    found = {}
    for delta in deltas:
        if delta.output is not None:
            found.setdefault(delta.prompt_index, []).append(delta.output)
    assert len(counter) == 0 and counter.engine.pool.num_free == counter.engine.pool.num_blocks
    return [merge_completions(found[index]) for index in sorted(found)], deltas


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request):
    return request.param


def test_deltas_put_together_are_the_output_and_come_one_token_at_a_time(overlap):
    [output], deltas = outputs(output_processor(overlap=overlap), (PROMPT, params()), follows=True)
    assert [len(delta.token_ids) for delta in deltas] == [1] * 8
    assert "".join(delta.text for delta in deltas) == output.text == letters(8)
    assert [id_ for delta in deltas for id_ in delta.token_ids] == output.token_ids
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + [FinishReason.LENGTH]


def test_cumulative_deltas_hold_all_text_so_far(overlap):
    _, deltas = outputs(output_processor(overlap=overlap), (PROMPT, params(4)), follows=True, is_cumulative=True)
    assert [delta.text for delta in deltas] == [letters(count) for count in range(1, 5)]


def test_only_requests_that_want_their_text_early_are_watched():
    counter = output_processor()
    Call(counter, [Asked(PROMPT, params())]).run().__next__()
    watched = []
    for one, follows in (params(), False), (params(), True), (params(stop="QQ"), False):
        [id_] = counter.add(PROMPT, one, lambda delta: None, follows=follows)
        watched.append(counter.engine.queue.live[id_].watcher is not None)
    assert watched == [False, True, True]


@pytest.mark.parametrize("follows", [False, True])
def test_a_stop_string_over_token_boundaries_ends_the_request_with_the_token_that_completes_it(overlap, follows):
    free = letters(20)
    stop = free[5:8]
    assert free.index(stop) == 5
    counter = output_processor(overlap=overlap)
    [output], deltas = outputs(counter, (PROMPT, params(20, stop=["??", stop])), follows=follows)
    assert output.text == free[:5] == "".join(delta.text for delta in deltas)
    assert Letters().decode(output.token_ids) == free[:8]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    check_engine(counter.engine)


def test_the_stop_string_stays_if_asked_for(overlap):
    free = letters(20)
    one = params(20, stop=free[5:8], include_stop_str_in_output=True)
    [output], deltas = outputs(output_processor(overlap=overlap), (PROMPT, one), follows=True)
    assert output.text == free[:8] == "".join(delta.text for delta in deltas)


def test_a_stop_string_in_the_last_token_is_a_stop_and_not_the_length():
    free = letters(8)
    [output], _ = outputs(output_processor(), (PROMPT, params(8, stop=free[6:8])))
    assert (output.finish_reason, output.text) == (FinishReason.STOP, free[:6])


def test_what_may_begin_a_stop_string_is_not_shown_early_and_is_there_at_the_end():
    free = letters(6)
    [output], deltas = outputs(output_processor(), (PROMPT, params(6, stop=free[4:6] + "?")), follows=True)
    assert [delta.text for delta in deltas] == [*free[:4], "", free[4:]]
    assert (output.finish_reason, output.text) == (FinishReason.LENGTH, free)


def test_a_stop_string_counts_from_min_tokens_on():
    free = letters(20)
    [output], _ = outputs(output_processor(), (PROMPT, params(20, stop=list(free[:9]), min_tokens=5)))
    assert (output.text, output.stop_reason, len(output.token_ids)) == (free[:4], free[4], 5)


def test_a_stop_token_is_in_the_tokens_and_not_in_the_text():
    free = completion(1, PROMPT, 8, VOCAB)
    one = params(stop_token_ids=(free[4],))
    [output], deltas = outputs(output_processor(), (PROMPT, one), follows=True)
    assert output.token_ids == free[: free.index(free[4]) + 1]
    assert output.text == letters(free.index(free[4])) == "".join(delta.text for delta in deltas)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, free[4])


def test_an_end_of_sequence_token_stops_without_a_stop_reason():
    free = completion(1, PROMPT, 8, VOCAB)
    [output], _ = outputs(output_processor(eos_token_ids=[free[3]]), (PROMPT, params()))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)


def test_stop_strings_do_not_disturb_others_in_the_batch(overlap):
    stop = letters(20)[5:8]
    several = [(PROMPT, params(20, stop=stop)), *(([1, 2, 3, seed], params(12, seed)) for seed in range(5))]
    found, _ = outputs(output_processor(overlap=overlap, num_blocks=20), *several)
    assert [output.token_ids for output in found[1:]] == [
        completion(seed, [1, 2, 3, seed], 12, VOCAB) for seed in range(5)
    ]


def test_n_completions_are_one_output_with_seeds_of_their_own_and_share_the_prompt(overlap):
    prompt = [*range(1, 14)]
    counter = output_processor(overlap=overlap)
    [output], _ = outputs(counter, (prompt, params(6, n=3)))
    seeds = [1, derived_seed(1, 1), derived_seed(1, 2)]
    assert [one.index for one in output.completions] == [0, 1, 2]
    assert [one.token_ids for one in output.completions] == [completion(seed, prompt, 6, VOCAB) for seed in seeds]
    assert [one.num_cached_tokens for one in output.completions] == [0, 12, 12]
    usage = output.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens) == (13, 0, 18)
    assert usage.num_total_tokens == 31


def test_the_first_of_n_completions_is_what_one_alone_gives():
    [several], _ = outputs(output_processor(), (PROMPT, params(n=4)))
    [alone], _ = outputs(output_processor(), (PROMPT, params()))
    assert several.token_ids == alone.token_ids and alone.others == []


def test_deltas_of_several_prompts_and_completions_say_whose_they_are():
    _, deltas = outputs(output_processor(), (PROMPT, params(3, n=2)), ([4, 5], params(2, seed=7)), follows=True)
    texts = {}
    for delta in deltas:
        key = delta.prompt_index, delta.index
        texts[key] = texts.get(key, "") + delta.text
    second = derived_seed(1, 1)
    assert texts == {(0, 0): letters(3), (0, 1): letters(3, second), (1, 0): letters(2, 7, [4, 5])}


def test_a_refused_prompt_is_a_delta_with_its_error_and_the_others_run_on():
    found, deltas = outputs(output_processor(), ([], params(n=2)), (PROMPT, params(2)), follows=True)
    assert found[0].error == "the prompt is empty; at least one token is needed" and found[0].others == []
    assert found[1].text == letters(2)
    assert deltas[0].finish_reason is FinishReason.ERROR


def test_a_stream_that_is_closed_or_dropped_leaves_nothing(overlap):
    counter = output_processor(overlap=overlap)
    for num_deltas in range(12):
        stream = Call(counter, [Asked([*PROMPT, n], params(9, n=2)) for n in range(4)], follows=True).run()
        for _ in range(num_deltas):
            next(stream)
        if num_deltas % 2:
            stream.close()
        del stream
        assert len(counter) == 0 and not counter.engine.queue.live
        check_engine(counter.engine)
    assert outputs(counter, (PROMPT, params()))[0][0].text == letters(8)


def test_calls_may_nest_and_neither_loses_what_the_other_ones_steps_bring(overlap):
    counter = output_processor(overlap=overlap)
    texts = []
    for place, delta in enumerate(Call(counter, [Asked(PROMPT, params())], follows=True).run()):
        texts.append(delta.text)
        if place == 2:
            inner = list(Call(counter, [Asked([7, 8], params(12, seed=3))]).run())
    assert "".join(texts) == letters(8)
    assert inner[-1].output.text == letters(12, 3, [7, 8])


def test_requests_that_a_broken_step_ended_are_delivered_to_the_other_call():
    counter = output_processor()
    outer = Call(counter, [Asked(PROMPT, params())], follows=True).run()
    next(outer)
    counter.engine.executor.launch = lambda step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(Call(counter, [Asked([7, 8], params())]).run())
    del counter.engine.executor.launch
    rest = list(outer)
    assert rest[-1].finish_reason is FinishReason.ERROR
    assert rest[-1].output.error == "the engine broke off: division by zero"
    assert rest[-1].output.text == letters(1)


def test_a_request_that_somebody_takes_off_the_engine_does_not_wait_for_ever():
    counter = output_processor()
    stream = Call(counter, [Asked(PROMPT, params())], follows=True).run()
    first = next(stream)
    counter.engine.abort([first.request_id])
    [last] = list(stream)
    assert last.finish_reason is FinishReason.ABORT and "taken off the engine" in last.output.error


def test_closing_ends_an_open_stream_and_keeps_its_text():
    counter = output_processor()
    stream = Call(counter, [Asked(PROMPT, params())], follows=True).run()
    next(stream), next(stream)
    counter.close()
    [last] = list(stream)
    assert last.finish_reason is FinishReason.ABORT and last.output.text == letters(2)


def test_stop_strings_without_a_tokenizer_are_refused():
    counter = OutputProcessor(fake_engine(PlainScheduler()), Codec(None))
    [output], _ = outputs(counter, (PROMPT, params(stop="a")))
    assert output.error == "sampling.stop=['a'] needs a tokenizer and the checkpoint has none"
    [output], deltas = outputs(counter, (PROMPT, params(3)), follows=True)
    assert output.text == "" and [delta.token_ids for delta in deltas] == [[id_] for id_ in output.token_ids]


def test_an_engine_alone_refuses_what_only_a_front_can_do():
    engine = fake_engine(PlainScheduler())
    with pytest.raises(RequestError, match=r"sampling.n=2: an engine takes one completion a request"):
        engine.add(PROMPT, params(n=2))
    with pytest.raises(RequestError, match=r"sampling.stop=\['a'\] needs a watcher"):
        engine.add(PROMPT, params(stop="a"))


def test_an_output_knows_when_its_request_came_started_and_ended(overlap):
    counter = output_processor(overlap=overlap, max_num_seqs=1)
    found, _ = outputs(counter, (PROMPT, params(3)), (PROMPT, params(2)))
    first, second = (output.timings for output in found)
    assert first.arrival_s <= first.scheduled_s <= first.first_token_s <= first.finished_s <= second.finished_s
    assert second.scheduled_s >= first.first_token_s
    assert second.queue_s > 0 and second.time_to_first_token_s >= second.queue_s
    assert second.total_s >= second.time_to_first_token_s


def test_a_request_that_never_started_has_waited_all_its_life():
    counter = output_processor(max_num_seqs=1)
    found = []
    counter.add(PROMPT, params(9), found.append)
    counter.add(PROMPT, params(9), found.append)
    counter.step()
    counter.abort([1])
    timings = found[0].output.timings
    assert timings.scheduled_s is None and timings.time_to_first_token_s is None
    assert timings.queue_s == timings.total_s


def test_a_call_keeps_its_prompts_until_the_queue_has_room():
    counter = output_processor(max_num_seqs=2, max_queued_requests=3)
    add, longest = counter.engine.queue.add, []
    counter.engine.queue.add = lambda request: (add(request), longest.append(len(counter.engine.queue.waiting)))
    found, _ = outputs(counter, *(([*PROMPT, n], params(3, seed=n)) for n in range(20)))
    assert [output.token_ids for output in found] == [completion(n, [*PROMPT, n], 3, VOCAB) for n in range(20)]
    assert max(longest) == 3


def test_waiting_tokens_are_limited_too_and_one_prompt_is_always_taken():
    counter = output_processor(max_num_seqs=1, max_queued_tokens=10)
    add, most = counter.engine.queue.add, []
    counter.engine.queue.add = lambda request: (add(request), most.append(counter.engine.queue.num_waiting_tokens))
    found, _ = outputs(counter, *(([n] * 8, params(2, seed=n)) for n in range(10)), ([1] * 30, params(1)))
    assert all(output.error is None for output in found)
    assert 10 < max(most) <= 10 + 30


def test_more_completions_than_may_ever_wait_are_refused_alone_and_not_to_be_tried_again():
    found, _ = outputs(output_processor(max_queued_requests=3), (PROMPT, params(n=3)), (PROMPT, params(n=4)))
    assert [output.error for output in found] == [
        None,
        "4 completions are asked for at once, and engine.max_queued_requests=3; ask for fewer",
    ]


def test_an_engine_says_that_it_is_full():
    engine = fake_engine(PlainScheduler(), max_queued_tokens=5)
    engine.check_room(100)
    for _ in range(2):
        engine.add(PROMPT, params())
    with pytest.raises(QueueFullError) as caught:
        engine.check_room()
    assert (caught.value.key, caught.value.limit) == ("engine.max_queued_tokens", 5)
    assert (caught.value.num_waiting_requests, caught.value.num_waiting_tokens) == (2, 6)


def test_what_waits_for_a_grammar_counts_as_waiting():
    queue = RequestQueue(max_num_seqs=2, max_len=64)
    engine = fake_engine(PlainScheduler(), max_queued_tokens=5)
    held_back = engine.queue.live[engine.add(PROMPT, params())]
    queue.hold_back(held_back)
    assert queue.num_waiting_tokens == 3
    queue.let_in(held_back)
    assert queue.num_waiting_tokens == 3 and list(queue.waiting) == [held_back.id]
    queue.remove(held_back)
    queue.hold_back(held_back)
    queue.remove(held_back)
    assert queue.num_waiting_tokens == 0


def test_time_limits_of_ended_requests_are_forgotten_and_those_of_live_ones_kept():
    engine = fake_engine(PlainScheduler())
    late = engine.add(PROMPT, params(), options=RequestOptions(timeout_s=1000.0))
    for _ in range(300):
        engine.abort([engine.add(PROMPT, params(), options=RequestOptions(timeout_s=2000.0))])
    assert len(engine.time_limits) < 100
    now_s = engine.clock()
    engine.clock = lambda: now_s + 1500.0
    assert [output.request_id for output in engine.step()] == [late]


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_a_time_limit_is_a_finite_number_above_0(timeout_s):
    with pytest.raises(RequestError) as caught:
        fake_engine(PlainScheduler()).add(PROMPT, params(), options=RequestOptions(timeout_s=timeout_s))
    assert str(caught.value) == f"timeout_s={timeout_s!r} must be a finite number of seconds above 0, or None"


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_a_priority_is_a_whole_number(priority):
    with pytest.raises(RequestError) as caught:
        fake_engine(PlainScheduler()).add(PROMPT, params(), options=RequestOptions(priority=priority))
    assert str(caught.value) == f"priority={priority!r} must be a whole number; lower is more urgent"


def test_requests_end_at_their_time_limit_with_what_they_have(overlap):
    counter = output_processor(overlap=overlap, max_num_seqs=2)
    now = [0.0]
    counter.engine.clock = lambda: now[0]
    options = RequestOptions(timeout_s=5.0)
    stream = Call(counter, [Asked(PROMPT, params(50, seed=n), options) for n in range(4)], follows=True).run()
    for _ in range(6):
        next(stream)
    now[0] = 5.0
    last = [delta.output for delta in stream if delta.output is not None]
    assert [output.finish_reason for output in last] == [FinishReason.ABORT] * 4
    assert {output.error for output in last} == {"timeout_s=5.0 passed before it was done"}
    assert sorted(output.text for output in last if output.text) == sorted(letters(3, seed) for seed in (0, 1))
    assert not counter.engine.queue.live and counter.engine.pool.num_free == counter.engine.pool.num_blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 10**400}, "timeout_s=<whole number of about 400 digits> must be a finite number of seconds"),
        ({"priority": 10**5000}, "priority=<whole number of about 5000 digits> must be a whole number"),
    ],
)
def test_an_argument_that_is_refused_leaves_no_request_for_the_next_call(options, message):
    counter = output_processor()
    [refused], _ = outputs(counter, (PROMPT, params(n=3), RequestOptions(**options)))
    assert message in refused.error and not counter.engine.queue.live
    found, _ = outputs(counter, (PROMPT, params()))
    assert [output.text for output in found] == [letters(8)]


def test_a_completion_that_cannot_be_queued_takes_those_before_it_along():
    counter, add = output_processor(), Engine.add
    counter.engine.add = lambda *what, **options: add(counter.engine, *what, **options) if len(counter) < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        counter.add(PROMPT, params(n=3), print)
    assert len(counter) == 0 and not counter.engine.queue.live


def test_completions_of_a_prompt_share_what_was_made_of_their_parameters():
    counter = output_processor()
    counter.add(PROMPT, params(n=3, stop_token_ids=[7, 8]), print)
    first, *others = counter.engine.queue.live.values()
    assert first.stop_ids == {7, 8} and len(others) == 2
    assert all(one.stop_ids is first.stop_ids and one.prepared is first.prepared for one in others)
    assert len({one.seed for one in [first, *others]}) == 3


@pytest.mark.parametrize("prompt", [[[1, 2], [3, 4]], [1, [2]], [1.5, 2], [None], [10**400], ["A"]])
def test_a_prompt_of_something_else_than_token_ids_is_refused_in_one_line(prompt):
    [output], _ = outputs(output_processor(), (prompt, params()))
    assert output.error.startswith("prompt token ids must be whole numbers") and "\n" not in output.error


def test_a_step_handles_stop_tokens_in_arrays_however_many_there_are():
    engine = fake_engine(PlainScheduler(), vocab_size=5000)
    id_ = engine.add(PROMPT, params(20, min_tokens=10, stop_token_ids=range(4096)))
    engine.step()
    step = Step(**engine.dispatcher.writer.forbidden_tokens(np.array([0])))
    stops_X = engine.queue.live[id_].stops_X
    assert isinstance(stops_X, np.ndarray) and len(stops_X) == 4096
    assert isinstance(step.forbidden_tokens, np.ndarray) and not step.forbidden_draws.any()
    assert sorted(step.forbidden_tokens.tolist()) == list(range(4096))


def test_min_tokens_beyond_what_can_be_generated_counts_as_all_of_it():
    counter = output_processor(eos_token_ids=range(49), max_model_len=8)
    [output], _ = outputs(counter, (PROMPT, params(2**63 - 1, min_tokens=2**63 - 1)))
    assert output.finish_reason == FinishReason.LENGTH and output.token_ids == [49] * 5


def test_an_error_in_a_report_to_the_policy_keeps_its_text_and_every_call_its_end():
    """The request that ended with the step is not told of yet, and its new token is still to be read."""

    class FailsInReport(PlainScheduler):
        def committed(self, step):
            if step.ended:
                raise ValueError("odd")

    counter = OutputProcessor(fake_engine(FailsInReport()), Letters())
    deltas = []
    for seed in 1, 2:
        counter.add(PROMPT, params(seed + 1, seed=seed), deltas.append, follows=True)
    with pytest.raises(PluginError, match="fails in committed"):
        while True:
            counter.step()
    counter.close()
    ended = {delta.request_id: delta.output for delta in deltas if delta.output is not None}
    assert len(ended) == 2
    texts = {id_: "".join(delta.text for delta in deltas if delta.request_id == id_) for id_ in ended}
    assert texts == {id_: output.text for id_, output in ended.items()}
