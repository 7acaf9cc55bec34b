"""AsyncLLM: a crowd of thousands that comes and goes, and what a start makes ready."""

import asyncio
import gc
import random
import time
from importlib.util import find_spec

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.outputs import FinishReason
from hookline.core.testing.fakes import check_engine
from hookline.core.util.garbage import _OURS

NUM_REQUESTS = 5000
PATIENCE_S = 120.0


async def settled(llm):
    engine, until = llm.llm.engine, time.monotonic() + PATIENCE_S
    while engine.queue.live or llm.num_open:
        assert time.monotonic() < until, "a request is left behind"
        await asyncio.sleep(0.01)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert len(engine.dispatcher.free_rows) == engine.limits.plan.max_num_seqs
    assert not len(llm.llm.output_processor)


@pytest.mark.slow
def test_five_thousand_requests_at_once_with_random_aborts_leave_nothing(worded):
    rng = random.Random(0)
    prompts = [[rng.randrange(4000) for _ in range(rng.randrange(1, 6))] for _ in range(NUM_REQUESTS)]
    lengths = [rng.randrange(1, 5) for _ in prompts]
    fates = rng.choices(["generate", "stream", "drop", "cancel", "timeout"], weights=[4, 2, 2, 2, 1], k=NUM_REQUESTS)
    ends = {fate: 0 for fate in set(fates)}

    async def one(llm, prompt, max_tokens, fate):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        if fate in ("generate", "cancel", "timeout"):
            output = await llm.generate(prompt, params, timeout_s=0.5 if fate == "timeout" else None)
            assert len(output.token_ids) == max_tokens or output.finish_reason is FinishReason.ABORT
        else:
            text = ""
            async for delta in llm.stream(prompt, params):
                text += delta.text
                if fate == "drop":
                    break
            assert fate == "drop" or delta.output.text == text
        ends[fate] += 1

    async def crowd():
        sizes = dict(max_num_seqs=256, num_blocks=2048, overlap=True)
        async with AsyncLLM(worded, device="cpu", engine=sizes) as llm:
            engine, steps = llm.llm.engine, []
            step = engine.step

            def checked_step():
                outputs = step()
                check_engine(engine)
                steps.append(len(engine.queue.live))
                return outputs

            engine.step = checked_step
            tasks = [asyncio.create_task(one(llm, *request)) for request in zip(prompts, lengths, fates, strict=True)]
            for task, fate in zip(tasks, fates, strict=True):
                if fate == "cancel":
                    asyncio.get_running_loop().call_later(rng.random() * 3, task.cancel)
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
            await settled(llm)
            assert max(steps) > 2000, "there was no crowd"
            return results, await llm.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))

    results, last = asyncio.run(crowd())
    failures = [one for one in results if one is not None and not isinstance(one, asyncio.CancelledError)]
    assert failures == []
    assert ends["generate"] + ends["stream"] == fates.count("generate") + fates.count("stream")
    assert len(last.token_ids) == 3


@pytest.mark.slow
def test_an_async_llm_freezes_the_heap_and_makes_its_grammar_back_end_and_an_llm_if_it_is_asked_to():
    has_grammars = find_spec("llguidance") is not None  # an extra
    engines = set(_OURS.engines)  # of other tests
    if not engines:
        gc.unfreeze()
    for start, value, does in ((AsyncLLM, None, True), (AsyncLLM, False, False), (LLM, None, False), (LLM, True, True)):
        llm = start(device="cpu", engine={"num_blocks": 64, "freeze_gc": value, "prepare_grammars": value})
        engine = (llm.llm if start is AsyncLLM else llm).engine
        assert engine.state.late.is_ready is (does and has_grammars)
        assert (_OURS.engines > engines) is does and (gc.get_freeze_count() > 0 or not does)
        llm.close()
        assert _OURS.engines == engines
