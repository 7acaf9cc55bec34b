"""The engine on a GPU: every fast path gives the tokens of the plain one. Float32, so that equality is exact."""

import random
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.worker.graphs import cuda_graph
from hookline.plugins.samplers.penalties import Penalties
from tests.batch_invariance import Load, decodes_that_joined, launches_of, one_after_the_other

pytestmark = pytest.mark.gpu

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def make(dtype="float32", kernels="triton", scheduler="prefill_first", **engine):
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_num_seqs": 64, "max_model_len": 2048, "memory_fraction": 0.2, **engine}
    return LLM(model=model, device="cuda", dtype=dtype, kernels=kernels, scheduler=scheduler, engine=sizes)


def load(count=40, seed=0):
    """Ragged prompts, some with a long common beginning; greedy and sampled."""
    rng = random.Random(seed)
    shared = [rng.randrange(5000) for _ in range(600)]
    prompts = [
        [*(shared if index % 2 else []), *(rng.randrange(5000) for _ in range(rng.randint(1, 300)))]
        for index in range(count)
    ]
    params = [
        SamplingParams(temperature=float(index % 3), max_tokens=rng.randint(1, 60), seed=index, ignore_eos=True)
        for index in range(count)
    ]
    return prompts, params


def tokens(llm):
    with llm:
        return [output.token_ids for output in llm.generate(*load())]


@pytest.fixture(scope="module")
def plain():
    return tokens(make(kernels="torch", overlap=False, cuda_graphs=False))


@pytest.mark.parametrize(
    "engine",
    [
        dict(overlap=False, cuda_graphs=False),
        dict(overlap=False),
        dict(cuda_graphs=False),
        dict(),
        dict(max_num_seqs=37),
        dict(prefix_caching=False),
        dict(block_size=64, num_blocks=60),
        dict(block_size=256),
        dict(max_num_batched_tokens=128),
    ],
    ids=str,
)
def test_triton_graphs_and_overlap_give_the_tokens_of_plain_torch(plain, engine):
    assert tokens(make(**engine)) == plain


def test_a_shared_prefix_is_read_once_and_changes_no_token(plain, monkeypatch):
    monkeypatch.setattr("hookline.core.kv_cache.shared_prefix.MIN_SAVED_TOKENS", 100)
    llm = make()
    used = []
    launch = llm.engine.executor.graphs.launch
    llm.engine.executor.graphs.launch = lambda *what, is_shared: (
        used.append(is_shared),
        launch(*what, is_shared=is_shared),
    )[1]
    assert tokens(llm) == plain
    assert any(used)


def prefill_tokens(llm):
    """Tokens of small prompts arriving one, three and seventeen at a time; later ones find a part in the cache."""
    rng = random.Random(3)
    shared = [rng.randrange(5000) for _ in range(200)]
    found = []
    with llm:
        for count, longest in [(1, 20), (1, 128), (3, 100), (4, 128), (17, 25), (2, 300), (1, 700)]:
            prompts = [
                [*shared[: rng.choice([0, 64, 200])], *(rng.randrange(5000) for _ in range(rng.randint(1, longest)))]
                for _ in range(count)
            ]
            params = [
                SamplingParams(temperature=float(i % 2), max_tokens=4, seed=i, ignore_eos=True) for i in range(count)
            ]
            found += [output.token_ids for output in llm.generate(prompts, params)]
    return found


def has_left_over(launched):
    """Whether a step had decodes as such, and others left over."""
    return any(len(step.decode_rows) > shape.num_decodes > 0 for step, shape in launched)


@pytest.fixture(scope="module")
def plain_prefill():
    return prefill_tokens(make(kernels="torch", overlap=False, cuda_graphs=False))


@pytest.mark.parametrize(
    "engine",
    [
        dict(),
        dict(overlap=False),
        dict(block_size=16, prefix_caching=False),
        dict(max_num_batched_tokens=96),
        dict(max_num_seqs=3),
    ],
    ids=str,
)
def test_prompt_graphs_give_the_tokens_of_plain_torch(plain_prefill, engine):
    llm = make(**engine)
    launched = launches_of(llm.engine.executor.prompt_graphs)
    assert prefill_tokens(llm) == plain_prefill
    assert any(len(step.chunk_rows) > 1 for step, _ in launched)
    assert any(step.chunk_starts.max() > 0 or "prefix_caching" in engine for step, _ in launched)


@pytest.mark.parametrize(
    "engine",
    [
        dict(scheduler="chunked"),
        dict(scheduler="longest_first", max_num_batched_tokens=112),
        dict(scheduler="longest_first", overlap=False, block_size=64, num_blocks=60, max_num_batched_tokens=112),
        dict(scheduler="chunked", max_num_seqs=37, prefix_caching=False),
    ],
    ids=str,
)
def test_graphs_of_mixed_steps_give_the_tokens_of_plain_torch(plain, engine):
    llm = make(**{"max_num_batched_tokens": 400, **engine})
    launched = launches_of(llm.engine.executor.prompt_graphs)
    assert tokens(llm) == plain
    assert has_left_over(launched)


def joining_load(asks_more):
    """Requests that may join prompts; with `asks_more`, they ask for all that EXTRAS has but scores of prompts."""
    prompts, params = load(120)
    params = [replace(one, max_tokens=one.max_tokens + 5) for one in params]  # as many as EXTRAS want at least
    asked = [{**extra, "prompt_logprobs": None} for extra in EXTRAS] if asks_more else [{}]
    return Load(prompts, [replace(one, **extra) for one, extra in zip(params, cycle(asked), strict=False)])


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "asks_more"])
def one_by_one(request):
    """Requests, and their tokens if they arrive one after the other."""
    asked = joining_load(request.param)
    with make(kernels="torch", overlap=False, cuda_graphs=False) as llm:
        return asked, [output.token_ids for output in one_after_the_other(llm, asked)]


@pytest.mark.parametrize(
    "engine",
    [
        dict(),
        dict(overlap=False, prefix_caching=False),
        dict(scheduler="chunked"),
        dict(max_num_seqs=20, num_blocks=400),
        dict(max_num_batched_tokens=600),
    ],
    ids=str,
)
def test_decodes_that_join_prompts_give_the_tokens_of_plain_torch(one_by_one, engine):
    asked, expected = one_by_one
    with make(**{"block_size": 16, **engine}) as llm:
        launched = launches_of(llm.engine.executor.prompt_graphs)
        assert [output.token_ids for output in one_after_the_other(llm, asked)] == expected
    joined = decodes_that_joined(launched)
    assert len(joined) >= 8 and len(set(joined)) > 5


def test_only_steps_that_fit_and_whose_prompts_are_not_scored_take_graphs():
    with make(max_num_seqs=4, captured_prompt_tokens=512) as llm:
        launched = launches_of(llm.engine.executor.prompt_graphs)
        llm.generate([[1] * 513], SamplingParams(max_tokens=1))
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert not launched
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=(7,), logprobs=1))
        assert len(launched) == 1


def test_kernels_that_do_not_declare_it_capture_no_prefill():
    pytest.importorskip("flash_attn")
    with make("bfloat16", "flash_attn", max_num_seqs=4) as llm:
        assert not llm.engine.executor.prompt_graphs.shapes


def test_every_batch_size_has_a_graph():
    llm = make(max_num_seqs=11, max_model_len=128)
    with llm:
        for count in range(1, 12):
            outputs = llm.generate([[index + 1] for index in range(count)], SamplingParams(max_tokens=3, seed=1))
            assert len(outputs) == count


@pytest.mark.parametrize(("other", "count"), [("flash_attn", 8), ("torch", 8), ("torch", 30), ("torch", 60)])
def test_other_kernels_equal_triton_in_bfloat16_for_the_first_tokens(other, count):
    if other == "flash_attn":
        pytest.importorskip("flash_attn")
    prompts, _ = load(count)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    for kernels in ("triton", other):
        with make("bfloat16", kernels) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, greedy)])
    same = sum(a == b for one, other in zip(*found, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.875 * 4 * count  # two near-equal logits may swap within bfloat16's rounding


def test_memory_does_not_grow_over_many_steps():
    with make(max_num_seqs=8, max_model_len=256) as llm:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        llm.generate([[1, 2, 3]] * 8, params)
        before = torch.cuda.memory_reserved()
        steps = 0
        while steps < 10_000:
            llm.generate([[steps % 5000, 2, 3]] * 8, params)
            steps += 200
        assert torch.cuda.memory_reserved() == before


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic():
    from hookline.core.errors import CapacityError

    with pytest.raises(CapacityError, match=r"engine.memory_fraction=0.0001.*lower"):
        make(memory_fraction=0.0001)


EXTRAS = (
    dict(top_k=20, top_p=0.9),
    {},
    dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1, logprobs=3),
    dict(min_p=0.05, logit_bias={7: 2.0}),
    dict(bad_words=((3,), (4, 5)), allowed_token_ids=tuple(range(0, 5000, 2))),
    dict(logprobs=0, prompt_logprobs=2),
    dict(min_tokens=5, stop_token_ids=(1, 2, 3)),
)


def extra_outputs(llm, count=28):
    prompts, params = load(count)
    options = [vars(one) | EXTRAS[index % len(EXTRAS)] for index, one in enumerate(params)]
    with llm:
        return llm.generate(prompts, [SamplingParams(**one) for one in options])


@pytest.fixture(scope="module")
def plain_extra():
    return extra_outputs(make(kernels="torch", overlap=False, cuda_graphs=False))


@pytest.mark.parametrize(
    "engine",
    [dict(), dict(overlap=False), dict(cuda_graphs=False), dict(block_size=64, num_blocks=60), dict(max_num_seqs=5)],
    ids=str,
)
def test_processors_and_scores_in_graphs_give_the_tokens_of_plain_torch(plain_extra, engine):
    outputs = extra_outputs(make(**engine))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain_extra]
    for output, expected in zip(outputs, plain_extra, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            for one, other in zip(getattr(output, name) or (), getattr(expected, name) or (), strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-3)


def test_draws_with_processors_are_captured_at_the_start_or_once():
    with make(max_num_seqs=4, max_model_len=256) as llm:
        draws = llm.engine.executor.graphs._other_draws
        ready = set(draws)
        assert {size for size, _ in ready} == {1, 2, 4}
        for more in ({"top_k": 5}, {"top_k": 5}, {"presence_penalty": 1.0}, {"presence_penalty": 0.5}):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True, **more))
            assert "presence_penalty" in more or set(draws) == ready
        assert len(set(draws) - ready) == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_graphs_give_the_same_whether_each_size_ran_before_its_capture_or_not(monkeypatch, plain, at_once):
    runs, run_before = list[object](), cuda_graph.run_before

    def counted(step, *given):
        runs.append(step)
        run_before(step, *given)

    monkeypatch.setattr(cuda_graph, "run_before", counted)
    if not at_once:
        monkeypatch.setattr(ResolvedConfig, "captures_at_once", False)
    llm = make()
    executor = llm.engine.executor
    shapes, num_sizes = executor.prompt_graphs._graphs, len(executor.graphs._layers)
    kinds = {shape.num_decodes > 0 for shape in shapes}
    # Layers and draws of prompts; layers of decodes, such that share, two kinds of draws, and the single plain step.
    assert num_sizes > 10 and len(runs) == (2 * len(kinds) + 5 if at_once else 2 * len(shapes) + 4 * num_sizes + 1)
    assert tokens(llm) == plain


@pytest.mark.parametrize("how", ["raises", "waits"])
def test_a_processor_that_fails_at_a_capture_ends_its_request_alone(how, monkeypatch, plain):
    process = Penalties.process

    def broken(self, logits_NV, rows):
        if torch.cuda.is_current_stream_capturing():
            if how == "waits":
                logits_NV.sum().item()  # which no capture survives
            raise ValueError("on purpose")
        return process(self, logits_NV, rows)

    prompts, params = load()
    penalised = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3)
    with make() as llm:
        with monkeypatch.context() as patched:
            patched.setattr(Penalties, "process", broken)
            *others, failed = llm.generate([*prompts, prompts[0]], [*params, penalised])
        assert failed.finish_reason.value == "error" and "processor 'penalties' of plugin" in failed.error
        assert [output.token_ids for output in others] == plain
        assert len(llm.generate([prompts[0]], penalised)[0].token_ids) == 20
        assert [output.token_ids for output in llm.generate(prompts, params)] == plain
