"""Tensor parallelism over real processes gives the tokens of one rank, in every way of computing a request.

A group starts once and serves many engines: the scheduler, the pool and the limits are rank 0's alone.
"""

import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hookline import LLM, SamplingParams
from hookline.core.assembly.engine import assemble, start_ranks
from hookline.core.assembly.resolve import resolve
from hookline.core.config.settings import validate
from hookline.core.errors import ConfigError
from hookline.core.executor.multiproc import MultiprocExecutor
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.step.executor import Executor
from tests.hf_models import make_qwen3
from tests.step_ends import on_step_end
from tests.test_parity import mixed_load

BLOCK_SIZE = 8
ENGINE = dict(block_size=BLOCK_SIZE, num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=256)
WAYS = {
    "plain": {},
    "preempting": dict(num_blocks=17),
    "chunked_prompts": dict(max_num_batched_tokens=16),
    "overlapped_preempting": dict(overlap=True, num_blocks=17),
}
SCHEDULERS = ["prefill_first", "chunked", "longest_first"]
USUAL = {
    "plain": ["prefill_first"],
    "preempting": ["chunked"],
    "chunked_prompts": ["chunked", "longest_first"],
    "overlapped_preempting": ["prefill_first", "longest_first"],
}
"""Way -> the schedulers that it is tried with in a usual run."""
CASES = [
    pytest.param(way, scheduler, marks=[] if scheduler in USUAL[way] else pytest.mark.nightly)
    for way in WAYS
    for scheduler in SCHEDULERS
]


class Borrowed(Executor):
    """An executor that engines can close as they like; it has as many blocks as it is told."""

    def __init__(self, executor, num_blocks):
        self.executor, self.num_blocks = executor, num_blocks

    def launch(self, step):
        return self.executor.launch(step)

    def collect(self, handle):
        return self.executor.collect(handle)

    def close(self):
        pass


@pytest.fixture(scope="module")
def host():
    return PluginHost.load()


def observers_of(host):
    return Observers(host.manager)


def processing_of(choice, host):
    return InstalledExtensions.of(host.registry, choice.facts)


def tree(folder, tp, scheduler="prefill_first", **engine):
    model = {"name": "qwen3", "checkpoint": folder}
    return {"model": model, "device": "cpu", "scheduler": scheduler, "tp": tp, "engine": {**ENGINE, **engine}}


@pytest.fixture(scope="module", params=[2, 4])
def group(request, folder, host, ranks_are_forked):
    """The ranks, and the choice they were made from. There are two kv heads, so four ranks replicate them."""
    choice = resolve(validate(tree(folder, request.param), host), host)
    group = start_ranks(choice, processing_of(choice, host))
    yield group, choice
    group.close()


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(**{**tree(folder, 1), "model": {"name": "qwen3", "checkpoint": folder}}) as llm:
        return [output.token_ids for output in llm.generate(*mixed_load())]


def run(engine, prompts, params):
    """Outputs in the prompts' order; what an earlier, interrupted run left behind is not among them."""
    ids = [engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    mine = [output for output in outputs if output.request_id in ids]
    return sorted(mine, key=lambda output: ids.index(output.request_id))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "scheduler"), CASES)
def test_several_ranks_give_the_tokens_of_one(group, folder, host, expected, scheduler, way):
    ranks, choice = group
    config = validate(tree(folder, choice.ranks.size, scheduler, **WAYS[way]), host)
    limits = {name: getattr(config.engine, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    choice = replace(choice, config=config, attention=replace(choice.attention, **limits))
    engine = assemble(
        choice, observers_of(host), Borrowed(ranks, config.engine.num_blocks), processing_of(choice, host)
    )
    outputs = run(engine, *mixed_load())
    assert [output.token_ids for output in outputs] == expected
    if "preempting" in way:
        assert sum(output.num_preemptions for output in outputs) >= 3
    assert not engine.has_work


@pytest.mark.slow
def test_minimum_tokens_and_prefix_hits_are_the_same_on_all_ranks(group, folder, host):
    ranks, choice = group
    prompts, _ = mixed_load()
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=12, min_tokens=6) for index in range(9)]
    with LLM(**tree(folder, 1)) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    engine = assemble(choice, observers_of(host), Borrowed(ranks, 400), processing_of(choice, host))
    first, again = run(engine, prompts, params), run(engine, prompts, params)
    assert [output.token_ids for output in first] == [output.token_ids for output in again] == expected
    assert sum(output.num_cached_tokens for output in again) >= 100


@pytest.mark.slow
def test_an_interrupt_in_a_step_comes_after_it_and_the_ranks_stay_together(group, folder, host, expected, monkeypatch):
    ranks, choice = group
    engine = assemble(choice, observers_of(host), Borrowed(ranks, 400), processing_of(choice, host))
    launch, calls = ranks.worker.launch, []

    def interrupted(step):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return launch(step)

    monkeypatch.setattr(ranks.worker, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, *mixed_load())
    assert not engine.has_work
    assert [output.token_ids for output in run(engine, *mixed_load())] == expected


@pytest.mark.slow
def test_two_groups_serve_side_by_side_and_a_closed_one_is_gone(folder, expected):
    with LLM(**tree(folder, 2)) as one:
        with LLM(**tree(folder, 2), seed=5) as other:
            assert isinstance(other.engine.executor, MultiprocExecutor)
            processes = [child.process for child in other.engine.executor.links.children]
            assert [output.token_ids for output in other.generate(*mixed_load())] == expected
            assert [output.token_ids for output in one.generate(*mixed_load())] == expected
        assert [process.poll() for process in processes] == [0]
        other.close()
        assert [output.token_ids for output in one.generate(*mixed_load())] == expected


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [30, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_hundred_requests_share_a_long_cached_prefix_for_hundreds_of_steps(tmp_path, max_tokens):
    shape = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, head_dim=4)
    make_qwen3(tmp_path, **shape, max_position_embeddings=4096)
    rng = random.Random(0)
    prefix = [rng.randrange(96) for _ in range(3800)]
    prompts = [[*prefix, index % 96, index // 96] for index in range(100)]
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=max_tokens, ignore_eos=True)
        for index in range(100)
    ]
    engine = dict(block_size=1, num_blocks=20_000, max_num_seqs=10, max_num_batched_tokens=8192)
    with LLM(**tree(str(tmp_path), 2, **{**engine, "max_model_len": 4096})) as llm:
        llm.generate([prefix], SamplingParams(max_tokens=1))
        steps = []
        on_step_end(llm.engine, steps.append)
        outputs = llm.generate(prompts, params)
    assert len(steps) >= 10 * max_tokens
    assert all(len(output.token_ids) == max_tokens and output.num_cached_tokens >= 3800 for output in outputs)
    # A first step admits ten rows of 3,801 blocks: more than the ring holds. One rank takes all requests at once.
    with LLM(**tree(str(tmp_path), 1, **{**engine, "max_num_seqs": 100, "max_model_len": 4096})) as llm:
        llm.generate([prefix], SamplingParams(max_tokens=1))
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.slow
def test_random_weights_are_the_same_model_whatever_the_ranks():
    import json

    shape = json.loads((Path(__file__).parent.parent / "plugins/models/qwen3_tiny/config.json").read_text())
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": shape}
    found = []
    for tp in (1, 2):
        with LLM(model=model, device="cpu", tp=tp, seed=4) as llm:
            found.append(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, r"tp=3 cannot split 4 attention heads and 2 kv heads. Valid tp values: 1, 2, 4"),
        (0, "tp=0 must be at least"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_before_any_process_starts(folder, tp, message, monkeypatch):
    monkeypatch.setattr(
        "hookline.core.executor.peer.subprocess.Popen", lambda *a, **k: pytest.fail("a process was started")
    )
    with pytest.raises(ConfigError, match=message):
        LLM(**tree(folder, tp))
