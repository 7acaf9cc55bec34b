"""Several ranks where they meet the rest: coroutines, stop strings, processors, time limits, and what breaks."""

import asyncio
import os
import sys

import pytest

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.errors import CheckpointError, PluginError, RankError
from hookline.core.executor.peer import Child
from hookline.core.outputs import FinishReason, merge_completions
from tests.step_ends import on_step_end

pytestmark = pytest.mark.slow
ENGINE = dict(num_blocks=40, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, overlap=True)
LOAD = [
    ("def f(x):\n", dict(n=2, seed=1, temperature=0.9, repetition_penalty=1.2, top_k=20, logprobs=2, stop=[")", ":"])),
    ("import os\n", dict(seed=2, temperature=1.1, frequency_penalty=0.6, prompt_logprobs=1, min_tokens=5)),
    ("import os\n" * 9, dict(temperature=0, logit_bias={300: 2.0}, stop=["\n\n"])),
    ("import os\n" * 9 + "x", dict(temperature=0, bad_words=["return"])),
    ("class A:\n", dict(n=3, seed=3, temperature=1.0)),
]
PROMPTS = [prompt for prompt, _ in LOAD]
PARAMS = [SamplingParams(max_tokens=24, **options) for _, options in LOAD]
PLUGIN = """
import os
from hookline.core.contracts import LogitsProcessor, Scheduler, hookimpl
from dataclasses import dataclass
API_VERSION = 2
@dataclass
class Config:
    value: int = 0
class Moody(LogitsProcessor):
    def __init__(self, spec):
        pass
    def process(self, logits_NV, rows):
        if os.environ["PARENT"] != str(os.getpid()):
            raise ValueError("this processor is in a mood")
        return logits_NV
class NeverMade(Scheduler):
    def __init__(self, config):
        raise ValueError("this policy cannot be made")
    def plan(self, view):
        ...
@hookimpl
def register_processors(register):
    register("moody", "seam_plugin:Moody", config=Config)
@hookimpl
def register_schedulers(register):
    register("never", "seam_plugin:NeverMade")
"""


@pytest.fixture
def processes(monkeypatch):
    """The processes that ranks are started in."""
    started = []

    class Noted(Child):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.process)

    monkeypatch.setattr("hookline.core.executor.links.Child", Noted)
    return started


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    (tmp_path / "seam_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOOKLINE_PLUGINS", "seam_plugin")
    monkeypatch.setenv("PARENT", str(os.getpid()))
    yield
    sys.modules.pop("seam_plugin", None)


def summary(output):
    """What must not depend on how a request is computed."""
    scored = output.prompt_logprobs is not None, [one.token_id for one in output.logprobs or ()]
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, scored


def test_coroutines_over_two_ranks_get_what_one_rank_gives_and_leave_nothing(processes):
    with LLM(device="cpu", engine=ENGINE) as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    stats = []

    async def streamed(llm, prompt, params):
        outputs, texts = [], {}
        async for delta in llm.stream(prompt, params):
            texts[delta.index] = texts.get(delta.index, "") + delta.text
            if delta.output is not None:
                assert delta.output.text == texts[delta.index]
                outputs.append(delta.output)
        return merge_completions(outputs)

    async def left(llm):
        async with llm.stream("while True:\n", SamplingParams(max_tokens=200, ignore_eos=True, n=2)) as stream:
            async for _ in stream:
                return

    async def everybody():
        async with AsyncLLM(device="cpu", tp=2, engine={**ENGINE, "num_blocks": 14}) as llm:
            engine = llm.llm.engine
            engine.time_steps()
            on_step_end(engine, stats.append)
            late = llm.generate("a", SamplingParams(max_tokens=200, ignore_eos=True, logprobs=1), timeout_s=0.2)
            fronts = [llm.generate, lambda *one: streamed(llm, *one)]
            wanted = [fronts[place % 2](*one) for place, one in enumerate(zip(PROMPTS, PARAMS, strict=True))]
            outputs = await asyncio.wait_for(asyncio.gather(*wanted, late, left(llm)), 120)
            while engine.queue.live:
                await asyncio.sleep(0.01)
            assert engine.pool.num_free == engine.pool.num_blocks
            return outputs

    *outputs, late, _ = asyncio.run(everybody())
    for output, one in zip(outputs, expected, strict=True):
        assert [summary(each) for each in output.completions] == [summary(each) for each in one.completions]
    assert late.finish_reason is FinishReason.ABORT and "timeout_s=0.2" in late.error
    assert len(late.logprobs) == len(late.token_ids) < 200
    assert sum(one.num_preemptions for one in stats) >= 1, "memory was not tight"
    assert sum(one.num_generated_tokens for one in stats) >= sum(
        output.usage.num_completion_tokens for output in outputs
    )
    assert all(one.device_s is not None and one.device_s > 0 for one in stats if one.num_decode_tokens)
    assert len(processes) == 1 and processes[0].poll() == 0, "the other rank did not end by itself"


@pytest.mark.usefixtures("ranks_are_forked")
def test_a_processor_that_raises_on_one_rank_ends_the_engine_with_its_name(plugin, processes):
    with LLM(device="cpu", tp=2, engine=ENGINE) as llm:
        moody = SamplingParams(max_tokens=9, ignore_eos=True, extra_args={"moody": {"value": 1}})
        llm.generate("fine", SamplingParams(max_tokens=3))
        said = r"rank 1 of 2 .* alone failed in a step: .*processor 'moody' .* ValueError: this pro"
        with pytest.raises(RankError, match=said):
            llm.generate("a", moody)
        assert not llm.engine.has_work
    assert all(process.poll() is not None for process in processes)


@pytest.mark.usefixtures("ranks_are_forked")
def test_what_cannot_be_put_around_the_ranks_leaves_none_of_them(plugin, processes):
    with pytest.raises(PluginError, match="this policy cannot be made"):
        LLM(device="cpu", tp=2, scheduler="never", engine=ENGINE)
    assert len(processes) == 1 and processes[0].poll() is not None


def test_a_tokenizer_that_is_not_there_is_named_before_anything_is_started(processes, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(device="cpu", tp=2, model={"name": "qwen3", "tokenizer": str(tmp_path / "nowhere")})
    assert processes == []
