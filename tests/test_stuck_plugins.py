"""A plugin that never returns is broken off and named; who waits for it is told, and closing does not wait for it."""

import asyncio
import threading
import time

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.errors import EngineError, HooklineError

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
LIMITS = dict(num_blocks=50, stall_timeout_s=0.5, step_timeout_s=0.1)
PATIENCE_S = 60
PLAN = r"scheduler 'prefill_first' of plugin 'schedulers' .* is stuck in plan for 0.5 s \(engine.stall_timeout_s\) at "
SAMPLE = r"sampler 'gumbel' of plugin 'samplers' .* is stuck in sample for 1.2 s \(12 times engine.step_timeout_s\) at "


def loops(*arguments):
    while True:
        pass


def sleeps(*arguments):
    time.sleep(1e6)


@pytest.fixture(scope="module")
def llm():
    with LLM(device="cpu", scheduler="prefill_first", engine=LIMITS) as llm:
        llm.generate([[1, 2]], PARAMS)
        yield llm


def stick(monkeypatch, llm, what, how):
    """Have a method never return, and look like the class's own in a traceback."""
    part = llm.engine.scheduler if what == "plan" else llm.engine.executor.runner.sampler
    method = (lambda self, view: how()) if what == "plan" else (lambda self, logits_NV, params: how())
    method.__code__ = method.__code__.replace(co_name=what)
    monkeypatch.setattr(type(part), what, method)


@pytest.mark.parametrize("how", [loops, sleeps])
@pytest.mark.parametrize(("what", "message"), [("plan", PLAN), ("sample", SAMPLE)])
def test_what_never_returns_is_broken_off_and_the_engine_goes_on(llm, what, message, how, monkeypatch):
    with monkeypatch.context() as patched:
        stick(patched, llm, what, how)
        with pytest.raises(EngineError, match=message + f".*in {how.__name__}; its step was broken off"):
            llm.generate([[1, 2], [3]], PARAMS)
        assert not llm.engine.has_work
    assert len(llm.generate([[1, 2]], PARAMS)[0].token_ids) == 3


def test_what_loops_in_a_thread_of_its_own_is_broken_off_there(llm, monkeypatch):
    found = []

    def run():
        with pytest.raises(EngineError, match=SAMPLE) as caught:
            llm.generate([[1, 2]], PARAMS)
        found.append(caught.value)

    stick(monkeypatch, llm, "sample", loops)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    assert len(found) == 1


@pytest.mark.parametrize(("how", "goes_on"), [(loops, True), (sleeps, False)])
def test_everybody_who_waits_for_a_plan_that_never_returns_is_told(how, goes_on, monkeypatch):
    async def check():
        llm = AsyncLLM(device="cpu", scheduler="prefill_first", engine=LIMITS)
        with monkeypatch.context() as patched:
            stick(patched, llm.llm, "plan", how)
            calls = [llm.generate([1, 2], PARAMS, timeout_s=0.2) for _ in range(2)]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S)
            for error in results:
                assert isinstance(error, EngineError) and "is stuck in plan for 0.5 s" in str(error)
        if goes_on:
            assert len((await llm.generate([1, 2], PARAMS)).token_ids) == 3
        else:
            with pytest.raises(HooklineError, match="the engine is closed"):
                await llm.generate([1, 2], PARAMS)
        await asyncio.wait_for(llm.aclose(), PATIENCE_S)

    asyncio.run(check())


def test_a_slow_step_that_gets_further_is_waited_for(llm, monkeypatch):
    model = type(llm.engine.executor.runner.model)
    forward = model.forward

    def slow(self, token_ids_T, positions_T, attend):
        def slow_attend(*arguments):
            time.sleep(0.3)
            return attend(*arguments)

        slow_attend.rows_N = attend.rows_N
        return forward(self, token_ids_T, positions_T, slow_attend)

    monkeypatch.setattr(model, "forward", slow)
    num_layers = llm.engine.executor.runner.kv_layers
    assert 0.3 * len(num_layers) > 1.2
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].token_ids) == 1
