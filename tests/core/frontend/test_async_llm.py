"""AsyncLLM over a fake engine: everybody gets an end, whoever leaves frees what they held, few wake-ups."""

import asyncio
import gc
import itertools
import random
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from hookline.core.contracts import Observer, Plan
from hookline.core.errors import EngineError, HooklineError, QueueFullError, RequestError
from hookline.core.frontend import engine_thread
from hookline.core.frontend.async_llm import TOKENIZER_THREADS, AsyncLLM
from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.frontend.output_processor import OutputProcessor
from hookline.core.outputs import Delta, FinishReason, TokenLogprob
from hookline.core.plugin.check_plugin import new_manager
from hookline.core.plugin.observers import Observers
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import check_engine, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.util import garbage
from tests.core.frontend.test_output_processor import PROMPT, Letters, letters, params

PATIENCE_S = 60.0


def async_llm(scheduler=None, **options):
    """An AsyncLLM over a fake engine that checks every invariant after each step."""
    output_processor = OutputProcessor(fake_engine(scheduler or PlainScheduler(), **options), Letters())
    step = output_processor.engine.step

    def checked_step():
        outputs = step()
        check_engine(output_processor.engine)
        return outputs

    output_processor.engine.step = checked_step
    llm = AsyncLLM.__new__(AsyncLLM)
    llm._start(
        SimpleNamespace(output_processor=output_processor, codec=output_processor.codec, enter_thread=lambda: None)
    )
    return llm


def run(coroutine_function, llm=None):
    """Run a coroutine function of an AsyncLLM to its end, and hold the AsyncLLM to leaving nothing."""

    async def main():
        async with llm or async_llm() as opened:
            result = await asyncio.wait_for(coroutine_function(opened), PATIENCE_S)
            await settled(opened)
            assert len(asyncio.all_tasks()) <= 2, "a task is left behind"
            return result

    return asyncio.run(main())


async def settled(llm):
    """Wait until the engine holds nothing, which it must come to soon."""
    engine, until = llm.llm.output_processor.engine, time.monotonic() + PATIENCE_S
    while engine.queue.live or llm.num_open or len(llm.llm.output_processor):
        assert time.monotonic() < until, "a request is left behind"
        await asyncio.sleep(0.001)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert len(engine.dispatcher.free_rows) == engine.limits.plan.max_num_seqs


@pytest.mark.parametrize("overlap", [False, True])
def test_generate_and_stream_give_what_a_request_gets_alone(overlap):
    async def check(llm):
        output = await llm.generate(PROMPT, params())
        assert (output.text, output.finish_reason) == (letters(8), FinishReason.LENGTH)
        deltas = [delta async for delta in llm.stream(PROMPT, params())]
        assert "".join(delta.text for delta in deltas) == letters(8)
        assert deltas[-1].output.token_ids == output.token_ids

    run(check, async_llm(overlap=overlap))


def test_completions_come_together_and_cumulative_text_is_all_of_it():
    async def check(llm):
        output = await llm.generate(PROMPT, params(4, n=3))
        assert [one.index for one in output.completions] == [0, 1, 2]
        async for delta in llm.stream(PROMPT, params(4), cumulative=True):
            assert letters(4).startswith(delta.text)
        assert delta.text == letters(4)

    run(check)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.slow
def test_a_crowd_with_random_ends_leaves_nothing_and_disturbs_nobody(overlap):
    rng = random.Random(5)

    async def one(llm, number):
        prompt, one_params = [number % 7 + 1] * (number % 9 + 1), params(number % 12 + 1, seed=number)
        patience = rng.randrange(14)
        received = ""
        async for delta in llm.stream(prompt, one_params):
            received += delta.text
            patience -= 1
            if patience < 0:
                break  # and the stream is dropped
        assert letters(number % 12 + 1, number, prompt).startswith(received)

    async def check(llm):
        tasks = [asyncio.create_task(one(llm, number)) for number in range(300)]
        for task in rng.sample(tasks, 60):
            await asyncio.sleep(0)
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done), done

    run(check, async_llm(overlap=overlap, num_blocks=40))


def test_a_request_that_cannot_be_served_is_refused_alone():
    async def check(llm):
        good = asyncio.create_task(llm.generate(PROMPT, params()))
        with pytest.raises(RequestError, match="the prompt is empty"):
            await llm.generate([], params())
        with pytest.raises(RequestError, match="token id 77 is outside"):
            await anext(llm.stream([77], params(n=2)))
        assert (await good).text == letters(8)

    seen = []

    class Watcher(Observer):
        def __init__(self):
            pass

        def on_request_end(self, output):
            seen.append(output.error)

    run(check, async_llm(observers=Observers(new_manager(), {"watcher": Watcher()})))
    assert len(seen) == 3 and seen.count(None) == 1


def test_a_full_queue_refuses_with_what_a_server_needs_to_answer():
    async def check(llm):
        release = block(llm)
        first = asyncio.create_task(llm.generate(PROMPT, params()))
        second = asyncio.create_task(llm.generate(PROMPT, params()))
        third = asyncio.create_task(llm.generate(PROMPT, params(n=2)))
        await asyncio.sleep(0.01)
        release.set()
        with pytest.raises(QueueFullError) as caught:
            await third
        assert (caught.value.key, caught.value.limit) == ("engine.max_queued_requests", 2)
        assert caught.value.num_waiting_requests >= 1
        assert (await first).text == (await second).text == letters(8)

    run(check, async_llm(max_num_seqs=1, max_queued_requests=2))


def block(llm):
    """Hold the engine's thread up until the returned event is set, so that commands gather."""
    release = threading.Event()
    llm._thread._commands.put(lambda: release.wait(PATIENCE_S) and None)
    return release


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_breaks_off_tells_everybody_and_serves_the_next(overlap):
    async def check(llm):
        engine = llm.llm.output_processor.engine
        launch, count = engine.executor.launch, itertools.count()
        engine.executor.launch = lambda step: launch(step) if next(count) < 5 else 1 / 0
        tasks = [asyncio.create_task(llm.generate(PROMPT, params(20, seed=n))) for n in range(30)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [result for result in results if isinstance(result, EngineError)]
        assert len(broken) == len({id(error) for error in broken}) == 30
        assert str(broken[0]) == "ZeroDivisionError: division by zero"
        assert isinstance(broken[0].__cause__, ZeroDivisionError)
        del engine.executor.launch
        assert (await llm.generate(PROMPT, params())).text == letters(8)

    run(check, async_llm(overlap=overlap))


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_an_engine_that_is_left_by_whatever_is_no_exception_serves_the_next(error):
    def leave(step):
        raise error(0)

    async def check(llm):
        engine = llm.llm.output_processor.engine
        engine.executor.launch = leave
        with pytest.raises(EngineError):
            await llm.generate(PROMPT, params())
        del engine.executor.launch
        assert (await llm.generate(PROMPT, params())).text == letters(8)

    run(check, async_llm())


def test_a_policy_that_misbehaves_is_named_to_everybody():
    class Rough:
        def plan(self, view):
            return Plan(prefill=[(99, 1)])

    async def check(llm):
        results = await asyncio.gather(*(llm.generate(PROMPT) for _ in range(3)), return_exceptions=True)
        assert all("'scheduler' names request 99" in str(result) for result in results), results
        assert all(isinstance(result, EngineError) for result in results)

    run(check, async_llm(Rough()))


def test_closing_ends_what_runs_with_abort_and_refuses_what_comes():
    async def check():
        llm, may_go_on, count = async_llm(max_num_seqs=2), threading.Event(), itertools.count()
        step = llm.llm.output_processor.engine.step
        llm.llm.output_processor.engine.step = lambda: (next(count) < 20 or may_go_on.wait(PATIENCE_S)) and step()
        stream = llm.stream(PROMPT, params(100))
        await anext(stream)
        tasks = [asyncio.create_task(llm.generate(PROMPT, params(100, seed=n))) for n in range(20)]
        closing = asyncio.create_task(llm.aclose())
        while not llm._thread._is_closed:
            await asyncio.sleep(0.001)
        may_go_on.set()
        await closing
        await llm.aclose()
        llm.close()
        outputs = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert {output.finish_reason for output in outputs} <= {FinishReason.ABORT, FinishReason.LENGTH}
        *_, last = [delta async for delta in stream]
        assert last.finish_reason is FinishReason.ABORT and letters(100).startswith(last.output.text)
        with pytest.raises(HooklineError, match="the engine is closed"):
            await llm.generate(PROMPT)
        assert llm.llm.output_processor.engine.executor.is_closed and not llm._thread._thread.is_alive()

    asyncio.run(check())


@pytest.mark.slow
def test_an_async_llm_that_nobody_closes_ends_with_its_last_reference():
    llm = async_llm()
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.slow
def test_one_that_was_dropped_in_a_circle_while_it_is_frozen_ends_when_it_has_been_idle(monkeypatch):
    monkeypatch.setattr(garbage, "_OURS", garbage._Ours())  # as if no other engine were open
    monkeypatch.setattr(engine_thread, "SEARCH_S", 0.05)
    monkeypatch.setattr(engine_thread, "SEARCH_AGAIN_S", 0.05)
    gc.unfreeze()
    llm = AsyncLLM.__new__(AsyncLLM)
    output_processor = OutputProcessor(fake_engine(PlainScheduler()), Letters())
    circle = SimpleNamespace(llm=llm)
    circle.itself = circle
    output_processor.freeze_heap()
    llm._start(
        SimpleNamespace(output_processor=output_processor, codec=output_processor.codec, enter_thread=lambda: None)
    )
    thread = llm._thread._thread
    del llm, circle
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and gc.get_freeze_count() == 0


def test_closing_dropping_or_cancelling_a_stream_frees_its_blocks():
    async def check(llm):
        for leave in range(5):
            release = block(llm) if leave == 2 else None
            stream = llm.stream(PROMPT, params(100, n=2))
            if release is None:
                await anext(stream)
            if leave == 0:
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            elif leave == 1:
                async with stream:
                    pass
            elif leave == 2:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
                release.set()
            elif leave == 3:
                task = asyncio.create_task(llm.generate(PROMPT, params(100)))
                await asyncio.sleep(0)
                task.cancel()
            del stream
            await settled(llm)

    run(check)


def test_a_prompt_that_was_left_before_it_is_queued_is_never_computed():
    llm, queued = async_llm(), []
    engine = llm.llm.output_processor.engine
    add = engine.add
    engine.add = lambda ids, *rest, **options: queued.append(list(ids)) or add(ids, *rest, **options)

    async def check(llm):
        release = block(llm)
        left = [llm.stream([3], params(n=2)) for _ in range(5)]
        stays = llm.stream([4], params())
        for stream in left:
            await stream.aclose()
        release.set()
        assert sum([len(delta.text) async for delta in stays]) == 8

    run(check, llm)
    assert queued == [[4]]


def test_requests_of_an_event_loop_that_ended_are_ended_too():
    llm = async_llm()
    engine = llm.llm.output_processor.engine

    async def leave():
        stream = llm.stream(PROMPT, params(100))
        await anext(stream)
        return stream

    kept = asyncio.run(leave())
    until = time.monotonic() + PATIENCE_S
    while engine.queue.live and time.monotonic() < until:
        time.sleep(0.001)
    assert not engine.queue.live and kept is not None
    llm.close()


def test_several_event_loops_share_one_engine():
    llm, texts = async_llm(), []

    def other(seed):
        texts.append(asyncio.run(llm.generate(PROMPT, params(6, seed=seed))).text)

    threads = [threading.Thread(target=other, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(texts) == sorted(letters(6, seed) for seed in range(4))
    llm.close()


def test_a_step_wakes_an_event_loop_once_whatever_the_number_of_requests():
    async def check(llm):
        loop, wake_ups = asyncio.get_running_loop(), []
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *arguments: (wake_ups.append(1), call_soon(*arguments))
        release = block(llm)
        streams = [llm.stream(PROMPT, params(5, seed=n)) for n in range(8)]
        release.set()
        for stream in streams:
            async for _ in stream:
                pass
        assert len(wake_ups) <= len(llm.llm.output_processor.engine.executor.steps) + 1

    run(check)


def test_who_reads_slowly_gets_fewer_and_larger_deltas():
    async def check(llm):
        stream = llm.stream(PROMPT, params(8, stop="??"))
        quick = await llm.generate(PROMPT, params(8))
        [only] = [delta async for delta in stream]
        assert only.text == quick.text and only.token_ids == quick.token_ids and only.output is not None

    run(check)


def test_unread_deltas_are_merged_by_completion():
    async def check():
        loop = asyncio.get_running_loop()
        deltas = CompletionStream(loop, 2, print)
        cumulative = CompletionStream(loop, 2, print, is_cumulative=True)
        for index, text in (0, "a"), (1, "b"), (0, "c"):
            told = {"lens": [text]}
            deltas.put(Delta(index, 0, index, text, [1], logprobs=[TokenLogprob(1, -0.5)], extensions=told))
            cumulative.put(Delta(index, 0, index, text, [1]))
        one, merged = await anext(deltas), await anext(deltas)
        assert (one.text, merged.text, merged.token_ids) == ("b", "ac", [1, 1])
        assert [len(delta.logprobs) for delta in (one, merged)] == [1, 2]
        assert [delta.extensions for delta in (one, merged)] == [{"lens": ["b"]}, {"lens": ["a", "c"]}]
        assert [(await anext(cumulative)).text for _ in range(2)] == ["b", "c"]

    asyncio.run(check())


def test_a_policy_that_waits_does_not_keep_arrivals_waiting():
    class Patient:
        def plan(self, view):
            if len(view.waiting) + len(view.running) < 2:
                return Plan(idle_s=1.0)
            return PlainScheduler().plan(view)

    async def check(llm):
        tasks = [asyncio.create_task(llm.generate(PROMPT, params(1, seed=n))) for n in range(2)]
        await asyncio.gather(*tasks)
        slept = asyncio.create_task(llm.generate(PROMPT, params(1)))
        await asyncio.sleep(0.01)
        slept.cancel()

    run(check, async_llm(Patient(), stall_timeout_s=PATIENCE_S))


def test_a_request_ends_at_its_timeout_wherever_it_stands():
    async def check(llm):
        running = llm.generate(PROMPT, params(120), timeout_s=0.05)
        waiting = llm.generate(PROMPT, params(120), timeout_s=0.05)
        engine = llm.llm.output_processor.engine
        launch = engine.executor.launch
        engine.executor.launch = lambda step: (time.sleep(0.002), launch(step))[1]
        for output in await asyncio.gather(running, waiting):
            assert output.finish_reason is FinishReason.ABORT
            assert output.error == "timeout_s=0.05 passed before it was done"
            assert letters(120).startswith(output.text)

    run(check, async_llm(max_num_seqs=1))


def test_a_request_arrives_by_the_engines_clock_when_it_is_handed_in():
    async def check(llm):
        engine = llm.llm.output_processor.engine
        engine.clock = lambda: 7.0
        release = block(llm)
        task = asyncio.create_task(llm.generate(PROMPT, params(1)))
        await asyncio.sleep(0)
        engine.clock = lambda: 9.0
        release.set()
        assert (await task).timings.arrival_s == 7.0

    run(check)


def test_what_a_request_says_of_itself_reaches_the_scheduler_and_the_output():
    seen = []

    class Watching(PlainScheduler):
        def plan(self, view):
            requests = [*view.waiting, *view.running]
            seen.extend((one.priority, dict(one.tags), one.deadline_s, one.first_token_s) for one in requests)
            return super().plan(view)

    async def check(llm):
        ticks = itertools.count(7.0)
        llm.llm.output_processor.engine.clock = lambda: float(next(ticks))
        return await llm.generate(PROMPT, params(2), priority=-3, tags={"tenant": "acme"}, deadline_s=2)

    output = run(check, async_llm(Watching()))
    assert (output.priority, output.tags, output.deadline_s) == (-3, {"tenant": "acme"}, 2.0)
    assert all(one[:2] == (-3, {"tenant": "acme"}) for one in seen)
    assert len({one[2] - output.timings.arrival_s for one in seen} - {2.0}) == 0
    assert [one[3] for one in seen] == [None, output.timings.first_token_s]


@pytest.mark.parametrize("error", [KeyError, SystemExit, GeneratorExit])
def test_a_bug_in_one_request_is_not_everybodys(error):
    class Broken(SamplingParams):
        def resolved(self, defaults):
            raise error("a bug")

    async def check(llm):
        good = asyncio.create_task(llm.generate(PROMPT, params()))
        with pytest.raises(EngineError):
            await llm.generate(PROMPT, Broken())
        assert (await good).text == letters(8)

    run(check)


def test_a_thread_that_cannot_begin_leaves_nobody_waiting():
    def fails():
        raise RuntimeError("no such device")

    async def check():
        output_processor = OutputProcessor(fake_engine(PlainScheduler()), Letters())
        llm = AsyncLLM.__new__(AsyncLLM)
        llm._start(SimpleNamespace(output_processor=output_processor, codec=output_processor.codec, enter_thread=fails))
        with pytest.raises(HooklineError, match="closed"):
            await asyncio.wait_for(llm.generate(PROMPT), PATIENCE_S)

    asyncio.run(check())


LONG = "BCD" * 2000


class SlowLetters(Letters):
    """Takes long prompts apart when it is told to, and breaks off at a question mark."""

    def __init__(self):
        super().__init__()
        self.may_go, self.num_long = threading.Event(), 0

    def encode(self, prompt):
        if len(prompt) > 100:
            self.num_long += 1
            assert self.may_go.wait(PATIENCE_S)
        if isinstance(prompt, str) and "?" in prompt:
            raise ValueError("no such letter")
        return super().encode(prompt)[:4] if len(prompt) > 100 else super().encode(prompt)


def async_llm_with(codec, **options):
    llm = async_llm(**options)
    llm.llm.codec = llm.llm.output_processor.codec = codec
    return llm


def test_a_long_prompt_is_tokenized_beside_the_event_loop():
    codec = SlowLetters()

    async def check(llm):
        waiting = [asyncio.create_task(llm.generate(prompt, params())) for prompt in (LONG, list(range(5000)))]
        assert (await llm.generate("BCDB", params())).text == letters(8, prompt=[1, 2, 3, 1])
        assert not any(task.done() for task in waiting)
        codec.may_go.set()
        text, ids = await asyncio.gather(*waiting)
        assert text.text == letters(8, prompt=[1, 2, 3, 1]) and text.prompt == LONG
        assert ids.text == letters(8, prompt=[0, 1, 2, 3]) and ids.prompt is None

    run(check, async_llm_with(codec))


def test_whoever_leaves_while_the_prompt_is_tokenized_leaves_nothing():
    codec = SlowLetters()

    async def check(llm):
        task = asyncio.create_task(llm.generate(LONG, params()))
        streams = [llm.stream(LONG, params()) for _ in range(TOKENIZER_THREADS)]
        await asyncio.sleep(0)
        task.cancel()
        for stream in streams:
            await stream.aclose()
        submitted = []
        llm._thread.submit = lambda *what, **options: submitted.append(what)
        await asyncio.gather(task, return_exceptions=True)
        codec.may_go.set()
        await asyncio.to_thread(llm._tokenizing.shutdown)
        await asyncio.sleep(0)
        assert (
            task.cancelled() and not submitted and codec.num_long <= TOKENIZER_THREADS
        )  # who waited behind them is not held up

    run(check, async_llm_with(codec))


def test_a_stream_that_is_dropped_while_its_prompt_is_tokenized_is_never_queued():
    codec = SlowLetters()

    async def check(llm):
        submitted = []
        llm._thread.submit = lambda *what, **options: submitted.append(what)
        stream = llm.stream(LONG, params())
        del stream
        codec.may_go.set()
        await asyncio.to_thread(llm._tokenizing.shutdown)
        await asyncio.sleep(0.01)
        assert not submitted

    run(check, async_llm_with(codec))


def test_every_completion_is_open_from_the_call_to_its_end_and_none_that_was_refused():
    codec = SlowLetters()

    async def check(llm):
        step, may_go = llm.llm.output_processor.engine.step, threading.Event()
        llm.llm.output_processor.engine.step = lambda: (may_go.wait(PATIENCE_S), step())[1]
        streams = [llm.stream(PROMPT, params(n=3)), llm.stream(LONG, params(n=4)), llm.stream(PROMPT, params(n=2))]
        assert llm.num_open == 9  # though the engine's thread has a step to do before it looks at the last
        await streams[2].aclose()
        may_go.set(), codec.may_go.set()
        with pytest.raises(RequestError):
            await anext(llm.stream([], params(n=5)))
        ends = [delta.output for stream in streams[:2] async for delta in stream if delta.output is not None]
        assert len(ends) == 7

    run(check, async_llm_with(codec))


def test_long_prompts_that_wait_to_be_tokenized_are_open_and_are_limited_like_a_queue():
    codec = SlowLetters()

    async def check(llm):
        waiting = [asyncio.create_task(llm.generate(LONG, params())) for _ in range(2)]
        await asyncio.sleep(0)
        assert llm.num_open == 2
        with pytest.raises(QueueFullError, match=r"2 requests .* wait already and engine.max_queued_requests=2"):
            await llm.generate(LONG, params())
        assert (await llm.generate(PROMPT, params())).text == letters(8)
        codec.may_go.set()
        assert {output.text for output in await asyncio.gather(*waiting)} == {letters(8, prompt=[1, 2, 3, 1])}
        assert (await llm.generate(LONG, params())).text == letters(8, prompt=[1, 2, 3, 1])

    run(check, async_llm_with(codec, max_queued_requests=2))


def test_observers_hear_of_every_refusal_those_before_the_engine_too():
    class Ends(Observer):
        def __init__(self):
            self.seen = []

        def on_request_end(self, output):
            self.seen.append((output.refusal, output.tags))

    codec, ends = SlowLetters(), Ends()
    tags = {"tenant": "acme"}

    async def check(llm):
        waiting = [asyncio.create_task(llm.generate(LONG[:-1] + letter, params(), tags=tags)) for letter in "B?"]
        await asyncio.sleep(0)
        for prompt, given in ((LONG, {}), (PROMPT, {"deadline_s": -1}), ([1] * 60, {})):
            with pytest.raises(RequestError):
                await llm.generate(prompt, params(), tags=tags, **given)
        codec.may_go.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        while len(ends.seen) < 5:
            await asyncio.sleep(0.001)
        return sorted(str(reason) for reason, _ in ends.seen)

    observed = {"observers": Observers(new_manager(), {"ends": ends})}
    wanted = ["None", "invalid", "invalid", "prompt_too_long", "queue_full"]
    assert run(check, async_llm_with(codec, max_queued_requests=2, max_model_len=50, **observed)) == wanted
    assert all(found == tags for _, found in ends.seen)


def test_a_prompt_is_what_it_was_when_it_was_handed_in():
    codec, ids = SlowLetters(), list(range(5000))

    async def check(llm):
        first, stream = llm.stream(LONG, params()), llm.stream(ids, params())
        ids[:] = [3] * 5000
        codec.may_go.set()
        deltas = [delta async for delta in stream]
        assert deltas[-1].output.text == letters(8, prompt=[0, 1, 2, 3])
        await first.aclose()

    run(check, async_llm_with(codec))


@pytest.mark.slow
def test_nobody_complains_of_a_prompt_that_cannot_be_tokenized_once_its_caller_has_left():
    codec, complaints = SlowLetters(), []

    async def check(llm):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        stream = llm.stream("?" + LONG, params())
        while not codec.num_long:
            await asyncio.sleep(0.001)
        await stream.aclose()
        del stream
        codec.may_go.set()
        await asyncio.to_thread(llm._tokenizing.shutdown)
        await asyncio.sleep(0)
        gc.collect()
        assert not complaints

    run(check, async_llm_with(codec))


def test_a_long_prompt_that_cannot_be_tokenized_is_refused_and_a_closed_engine_says_so():
    codec = SlowLetters()
    codec.may_go.set()

    async def check(llm):
        with pytest.raises(RequestError, match="the prompt cannot be tokenized: ValueError: no such letter"):
            await llm.generate("?" + LONG, params())
        codec.may_go.clear()
        late = asyncio.create_task(llm.generate(LONG, params()))
        await asyncio.sleep(0)
        await llm.aclose()
        codec.may_go.set()
        for task in (late, llm.generate(LONG, params())):
            with pytest.raises(HooklineError, match="the engine is closed"):
                await task

    run(check, async_llm_with(codec))


def test_a_prompt_that_takes_long_to_tokenize_does_not_hold_up_other_long_ones():
    class SlowOnce(SlowLetters):
        def encode(self, prompt):
            return super().encode(prompt) if prompt[0] == "C" else Letters.encode(self, prompt)[:4]

    codec = SlowOnce()

    async def check(llm):
        slow = asyncio.create_task(llm.generate("C" + LONG, params()))
        while not codec.num_long:
            await asyncio.sleep(0.001)
        assert (await llm.generate(LONG, params())).finish_reason == FinishReason.LENGTH
        assert not slow.done()
        codec.may_go.set()
        await slow

    run(check, async_llm_with(codec))


@pytest.mark.parametrize(
    "options", [{"stop": ["x" * 1000]}, {"bad_words": ["B"] * 20}], ids=["stop strings", "bad words"]
)
def test_texts_that_take_long_to_make_ready_do_so_in_a_thread_beside_the_engines(options):
    codec, made, threads = SlowLetters(), [], []
    codec.encode_word = lambda word: threads.append(threading.current_thread().name) or [1]

    async def check(llm):
        submit = llm._thread.submit

        def seen(deltas, token_ids, params, **options):
            made.append((token_ids, params, "stop_strings" in vars(params)))  # later the engine makes what is missing
            submit(deltas, token_ids, params, **options)

        llm._thread.submit = seen
        with suppress(RequestError):  # there is no processor for bad words
            await llm.generate(PROMPT, params(**options))

    run(check, async_llm_with(codec))
    [(token_ids, ready, has_stop_strings)] = made
    assert token_ids == PROMPT
    assert has_stop_strings or ready.bad_words == ((1,),)
    assert all(name.startswith("hookline-tokenizer") for name in threads)


REFUSED = [
    {"timeout_s": 10**400},
    {"timeout_s": float("nan")},
    {"priority": 2**64},
    {"deadline_s": -1},
    {"tags": {"Tenant": "acme"}},
    {"tags": 7},
    {"cache_salt": "x" * 257},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_an_argument_that_is_refused_leaves_nothing_in_the_engine(options):
    async def check(llm):
        with pytest.raises(RequestError):
            await llm.generate(PROMPT, params(), **options)
        assert not llm.llm.output_processor.engine.queue.live
        assert (await llm.generate(PROMPT, params())).text == letters(8)

    run(check)


def test_parameters_that_are_none_are_refused_at_once():
    async def check(llm):
        with pytest.raises(RequestError, match=r"^params=\{'n': 1\} must be SamplingParams$"):
            llm.stream(PROMPT, {"n": 1})

    run(check)


def test_messages_that_are_nested_too_deeply_are_refused_in_one_line():
    deep = []
    for _ in range(100_000):
        deep = [deep]

    async def check(llm):
        with pytest.raises(RequestError, match=r"^the chat's messages cannot be read: RecursionError"):
            await llm.generate([{"role": "user", "content": deep}], params())

    run(check)


def test_a_policy_that_fails_while_a_lost_caller_s_request_ends_does_not_end_the_thread():
    class FailsOnce(PlainScheduler):
        has_failed = False

        def committed(self, step):
            if step.plan is None and not self.has_failed:
                self.has_failed = True
                raise ValueError("odd")

    policy, gone = FailsOnce(), asyncio.new_event_loop()
    gone.close()

    async def check(llm):
        llm._thread.submit(CompletionStream(gone, 1, print), PROMPT, params(100), follows=True)
        for _ in range(10_000):
            if policy.has_failed:
                break
            await asyncio.sleep(0.001)
        assert (await llm.generate(PROMPT, params())).text == letters(8) and llm._thread.death is None

    run(check, async_llm(policy))
