"""Pipeline parallelism over real processes gives the tokens of one rank, in every way of computing a request.

A group starts once and serves many engines.
"""

import itertools
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from hookline import LLM, PoolingParams, SamplingParams, StructuredOutputs
from hookline.core.assembly.engine import assemble, start_ranks
from hookline.core.assembly.resolve import resolve
from hookline.core.config.settings import validate
from hookline.core.errors import ConfigError, RankError
from hookline.core.plugin.host import PluginHost
from hookline.core.worker.worker import Worker
from tests.faulty_rank import VARIABLE
from tests.hf_models import make_qwen3
from tests.test_parity import mixed_load
from tests.test_rank_failures import ROOT, assert_gone
from tests.test_rank_seams import ENGINE as SEAM_ENGINE
from tests.test_rank_seams import PARAMS, PROMPTS
from tests.test_ranks import ENGINE, SCHEDULERS, WAYS, Borrowed, observers_of, processing_of, run

SIZES = {"tp1_pp3": (1, 3), "tp2_pp2": (2, 2), "tp1_pp2": (1, 2), "tp1_pp4": (1, 4)}
"""(tp, pp). Three stages have two, one and one layers."""
USUAL = [
    ("tp1_pp3", "chunked_prompts", "longest_first"),
    ("tp1_pp3", "plain", "prefill_first"),
    ("tp2_pp2", "overlapped_preempting", "chunked"),
]
"""What is tried in a usual run."""
CASES = [
    pytest.param(*case, marks=[] if case in USUAL else pytest.mark.nightly)
    for case in itertools.product(SIZES, WAYS, SCHEDULERS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four_layers")
    make_qwen3(folder, num_hidden_layers=4)
    return str(folder)


@pytest.fixture(scope="module")
def host():
    return PluginHost.load()


def tree(folder, tp=1, pp=1, scheduler="prefill_first", **engine):
    model = {"name": "qwen3", "checkpoint": folder}
    return {"model": model, "device": "cpu", "scheduler": scheduler, "tp": tp, "pp": pp, "engine": {**ENGINE, **engine}}


@pytest.fixture(scope="module")
def group(request, folder, host, ranks_are_forked):
    choice = resolve(validate(tree(folder, *SIZES[request.param]), host), host)
    group = start_ranks(choice, processing_of(choice, host))
    yield group, choice
    group.close()


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(**tree(folder)) as llm:
        return [output.token_ids for output in llm.generate(*mixed_load())]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "way", "scheduler"), CASES, indirect=["group"], scope="module")
def test_stages_give_the_tokens_of_one_rank(group, folder, host, expected, scheduler, way):
    ranks, choice = group
    config = validate(tree(folder, choice.config.tp, choice.config.pp, scheduler, **WAYS[way]), host)
    limits = {name: getattr(config.engine, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    choice = replace(choice, config=config, attention=replace(choice.attention, **limits))
    borrowed = Borrowed(ranks, config.engine.num_blocks)
    engine = assemble(choice, observers_of(host), borrowed, processing_of(choice, host))
    outputs = run(engine, *mixed_load())
    assert [output.token_ids for output in outputs] == expected
    if "preempting" in way:
        assert sum(output.num_preemptions for output in outputs) >= 3
        return
    again = run(engine, *mixed_load())
    assert [output.token_ids for output in again] == expected
    assert sum(output.num_cached_tokens for output in again) >= 100


def assert_same(found, wanted):
    """Equal outputs; their log-probabilities up to the rounding of sums in another order."""
    for one, other in zip(found, wanted, strict=True):
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(one, name) or (), getattr(other, name) or (), strict=True)
            for mine, theirs in ((mine, theirs) for mine, theirs in pairs if theirs is not None):
                assert mine.token_id == theirs.token_id and len(mine.top) == len(theirs.top)
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.fixture(scope="module")
def two_stages(ranks_are_forked):
    with LLM(device="cpu", pp=2, engine={**SEAM_ENGINE, "num_blocks": 20, "pp_layers": [5, 3]}) as llm:
        yield llm


@pytest.fixture(scope="module")
def one_rank():
    with LLM(device="cpu", engine=SEAM_ENGINE) as llm:
        yield llm


@pytest.mark.slow
def test_processors_scores_stops_and_many_completions_are_those_of_one_rank(two_stages, one_rank):
    found, wanted = (
        [one for output in llm.generate(PROMPTS, PARAMS) for one in output.completions]
        for llm in (two_stages, one_rank)
    )
    assert_same(found, wanted)


@pytest.mark.slow
def test_without_stages_the_worker_and_the_model_are_those_of_before(one_rank):
    worker = one_rank.engine.executor
    assert type(worker) is Worker and worker.runner.ranks is worker.runner.model.embed.ranks
    assert worker.runner.ranks.links is None and len(worker.runner.kv_layers) == len(worker.runner.model.layers) == 8


@pytest.mark.slow
def test_masked_draws_are_those_of_one_rank(two_stages, one_rank):
    asked = [None, StructuredOutputs(regex="[0-9]{3}-[a-z]{2}"), StructuredOutputs(choice=["yes", "no"]), None]
    asked += [StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "maxItems": 3})]
    prompts = [f"x{index} = " for index in range(len(asked))]
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=20, structured_outputs=one, logprobs=index % 2 or None)
        for index, one in enumerate(asked)
    ]
    found, wanted = two_stages.generate(prompts, params), one_rank.generate(prompts, params)
    assert_same(found, wanted)
    assert found[2].text in ("yes", "no")


@pytest.mark.slow
def test_a_pooler_that_fails_on_the_last_stage_ends_its_requests_alone(two_stages, one_rank):
    check_failing_pooler(two_stages, one_rank)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_pooler_that_fails_on_the_last_of_three_stages_ends_its_requests_alone(tp, one_rank):
    with LLM(device="cpu", tp=tp, pp=3, engine=SEAM_ENGINE) as llm:
        check_failing_pooler(llm, one_rank)


def check_failing_pooler(stages, one_rank):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    wishes = [PoolingParams(task="classify"), PoolingParams("last"), PoolingParams("mean"), PoolingParams("cls")]
    told = []
    for llm in (stages, one_rank):
        stream = llm.stream(PROMPTS[:4], params)
        deltas = [next(stream)]  # these decode while the others are pooled, in steps that break off
        failed, *pooled = llm.embed(["a", "b c", "d e f", "g"], wishes)
        assert "does not have score.weight" in failed.error
        outputs = {delta.prompt_index: delta.output for delta in [*deltas, *stream] if delta.output is not None}
        told.append(([outputs[index].token_ids for index in range(4)], [output.vector for output in pooled]))
    (tokens, vectors), (wanted_tokens, wanted_vectors) = told
    assert tokens == wanted_tokens
    for vector, wanted in zip(vectors, wanted_vectors, strict=True):
        assert np.abs(vector - wanted).max() < 1e-4


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "engine", "message"),
    [
        ("1:3:SIGKILL", {}, r"rank 1 of 2 \(pid \d+\) was killed by SIGKILL"),
        ("1:3:raise", {}, r"rank 1 of 2 \(pid \d+\) failed: StepFault: model 'faulty' of .* ValueError: a bug in this"),
        ("1:3:SIGSTOP", {"rank_timeout_s": 1.0}, r"rank 1 of 2 \(pid \d+\) has given no sign of life for 1 s"),
        ("1:3:hang", {"step_timeout_s": 0.3}, r"^rank 1 of 2 \(pid \d+\) got no further in a step"),
        ("0:3:hang", {"step_timeout_s": 0.3}, r"^rank 0 of 2 \(this process\) got no further in a step"),
    ],
    ids=["killed", "raises", "stopped", "hangs", "rank_0_hangs"],
)
def test_a_lost_stage_ends_the_engine_with_its_name_and_the_cause(folder, monkeypatch, fault, engine, message):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_rank")
    monkeypatch.setenv(VARIABLE, fault)
    monkeypatch.chdir(ROOT)
    with LLM(folder, model="faulty", device="cpu", pp=2, engine=dict(num_blocks=50, **engine)) as llm:
        processes = [child.process for child in llm.engine.executor.links.children]
        with pytest.raises(RankError, match=message):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert_gone(processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp": 5}, "pp=5 is more stages than this model has layers, 4"),
        ({"pp": 0}, "pp=0 must be at least 1"),
        ({"pp": 2, "engine": {"pp_layers": [3, 2]}}, r"engine.pp_layers=\[3, 2\] must name .* 4 in all"),
        ({"pp": 3, "engine": {"pp_layers": [2, 2]}}, r"engine.pp_layers=\[2, 2\] must name .* pp=3"),
        ({"engine": {"pp_layers": [4, 0]}}, r"engine.pp_layers=\[4, 0\]: each stage must have at least 1 layer"),
        ({"pp": 2, "model": "transformers"}, "pp=2: model=transformers cannot be cut into stages"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(folder, options, message, monkeypatch):
    monkeypatch.setattr(
        "hookline.core.executor.peer.subprocess.Popen", lambda *a, **k: pytest.fail("a process was started")
    )
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": "qwen3", "checkpoint": folder, "device": "cpu", **options})


@pytest.mark.nightly
@pytest.mark.slow
def test_arguments_that_a_processor_does_not_take_end_their_request_and_a_failing_draw_the_engine(monkeypatch):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.picky_processor")
    monkeypatch.chdir(ROOT)

    def params(*values):
        asked = [{"picky": {"value": value}} for value in values]
        return [SamplingParams(max_tokens=4, ignore_eos=True, extra_args=one) for one in asked]

    with LLM(device="cpu", pp=2, engine=SEAM_ENGINE) as llm:
        outputs = llm.generate(["a", "b", "c"], params(1, 13, 2))
        assert [len(output.token_ids) for output in outputs] == [4, 0, 4]
        assert "'picky' of plugin" in outputs[1].error and "not 13" in outputs[1].error
        with pytest.raises(RankError, match=r"rank 1 of 2 .* processor 'picky' .* not 14 either"):
            llm.generate(["a", "b"], params(1, 14))


@pytest.mark.slow
def test_a_killed_stage_is_named_like_any_rank(two_stages):
    """The last one with these two stages."""
    (child,) = two_stages.engine.executor.links.children
    os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(RankError, match=rf"rank 1 of 2 \(pid {child.process.pid}\) was killed by SIGKILL"):
        two_stages.generate(["a"] * 4, SamplingParams(max_tokens=200, ignore_eos=True))
    assert_gone([child.process])
