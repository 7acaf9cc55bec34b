"""Several GPUs: the tokens of one, through captured graphs and the exchange; a lost rank frees the others.

How the tokens are compared: sums in another order differ in the last bits, which may turn a draw over, and what follows
it. In float32 that is one request in hundreds, so all but one or two have to agree whole, with the log-probabilities
within a thousandth; in bfloat16 most answers agree for most of their length.

A group starts once and serves many engines (as in tests/test_ranks.py): starting is most of what this costs.
"""

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.assembly.engine import assemble, build_executor
from hookline.core.assembly.resolve import resolve
from hookline.core.config.settings import validate
from hookline.core.distributed.peer_ranks import PeerRanks
from hookline.core.errors import RankError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers
from hookline.core.requests.step_extensions import InstalledExtensions
from tests.faulty_rank import VARIABLE
from tests.step_ends import on_step_end
from tests.test_gpu_engine import EXTRAS, SHAPE, has_left_over, launches_of, load
from tests.test_ranks import Borrowed, run

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent
DEVICE = "cuda"
COUNT = torch.cuda.device_count()
SIZES = [pytest.param(size, marks=pytest.mark.skipif(size > COUNT, reason=f"needs {size} GPUs")) for size in (2, 4)]
NUM_SEQS = 256
"""As many as two and four ranks sum up by rows."""
ENGINE = {"max_num_seqs": NUM_SEQS, "max_model_len": 4096, "memory_fraction": 0.2}
BESIDE = {"memory_fraction": 0.5}
"""Of an engine that runs while a group still holds its part of the memory."""
MODEL = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
TOLERANCE = 1e-3
"""Of log-probabilities in float32."""


@dataclass
class Served:
    """What computes for `tp` ranks, and what it was chosen by."""

    executor: Any
    choice: Any
    host: Any

    def serve(self, prompts, params, **limits):
        """Outputs of an engine of its own, with these limits in place of the usual; and what its steps did."""
        num_blocks = limits.pop("num_blocks", self.executor.num_blocks)
        choice = replace(self.choice, attention=replace(self.choice.attention, **limits))
        installed = InstalledExtensions.of(self.host.registry, choice.facts)
        engine = assemble(choice, Observers(self.host.manager), Borrowed(self.executor, num_blocks), installed)
        steps = []
        on_step_end(engine, steps.append)
        return run(engine, prompts, params), steps


def tree(tp, dtype="float32", **engine):
    return {"model": MODEL, "device": DEVICE, "dtype": dtype, "tp": tp, "engine": {**ENGINE, **engine}}


def start(tp):
    host = PluginHost.load()
    choice = resolve(validate(tree(tp), host), host)
    return Served(build_executor(choice, InstalledExtensions.of(host.registry, choice.facts)), choice, host)


# ---------------------------------------------------------------------------------------------------------- the loads


def extra_load():
    """Processors and scores: three combinations, greedy and sampled."""
    prompts, params = load(24)
    options = [dict(top_k=20, top_p=0.9, repetition_penalty=1.2, logprobs=5), *(EXTRAS[at] for at in (2, 5))]
    return prompts, [
        SamplingParams(**(vars(one) | options[index % 3] | {"max_tokens": 24})) for index, one in enumerate(params)
    ]


def wide_load():
    """As many requests as may run, which decode side by side."""
    prompts = [[index, *range(index % 30)] for index in range(NUM_SEQS)]
    return prompts, [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=40, ignore_eos=True) for index in range(NUM_SEQS)
    ]


def prefix_load():
    """A hundred requests that share 3,800 tokens: the first leaves them in the cache."""
    rng = random.Random(0)
    prefix = [rng.randrange(5000) for _ in range(3800)]
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=100, ignore_eos=True) for index in range(100)
    ]
    return [[*prefix, index, 7 * index] for index in range(100)], params


TEN_AT_A_TIME = {"max_num_seqs": 10}


@pytest.fixture(scope="module")
def alone():
    """What one GPU answers to each load, and what its steps did."""
    one = start(1)
    try:
        loads = {"plain": load(), "extra": extra_load(), "wide": wide_load()}
        answers = {name: one.serve(*each)[0] for name, each in loads.items()}
        answers["prefix"] = one.serve(*prefix_load(), **TEN_AT_A_TIME)[0]
    finally:
        one.executor.close()
    return answers


@pytest.fixture(scope="module", params=SIZES)
def group(request, alone):
    """The ranks, and of each way the numbers of rows that rank 0 summed up through the exchange, in graphs or not."""
    from hookline.plugins.kernels.triton_exchange import TritonExchange

    rows = {"add_rms_norm": set(), "add_rms_norm_own": set()}

    def noted(name, launch):
        return lambda exchange, x_TD, *others: (rows[name].add(len(x_TD)), launch(exchange, x_TD, *others))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in rows:
            patch.setattr(TritonExchange, name, noted(name, getattr(TritonExchange, name)))
        served = start(request.param)
        yield served, rows
        served.executor.close()


def parted(outputs, expected):
    """The requests whose tokens differ."""
    pairs = zip(outputs, expected, strict=True)
    return [index for index, (one, other) in enumerate(pairs) if one.token_ids != other.token_ids]


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("limits", [{}, dict(num_blocks=30), dict(max_num_batched_tokens=128)], ids=str)
def test_several_gpus_give_the_tokens_of_one_plain_preempting_and_in_chunks(alone, group, limits):
    served, _ = group
    assert isinstance(served.executor.worker.runner.ranks, PeerRanks) and served.executor.worker.graphs is not None
    outputs, _ = served.serve(*load(), **limits)
    assert len(parted(outputs, alone["plain"])) <= 1
    assert not limits.get("num_blocks") or sum(output.num_preemptions for output in outputs) >= 1


def test_processors_and_scores_over_several_gpus_are_those_of_one(alone, group):
    served, _ = group
    outputs, _ = served.serve(*extra_load())
    different = parted(outputs, alone["extra"])
    assert len(different) <= 1
    for index, (output, expected) in enumerate(zip(outputs, alone["extra"], strict=True)):
        for name in () if index in different else ("logprobs", "prompt_logprobs"):
            found, wanted = getattr(output, name), getattr(expected, name)
            assert (found is None) == (wanted is None)
            for one, other in zip(found or (), wanted or (), strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.token_id == other.token_id and abs(one.logprob - other.logprob) < TOLERANCE)
                assert one is None or len(one.top) == len(other.top)


def test_many_rows_are_summed_up_through_the_exchange_too(alone, group):
    served, rows = group
    assert NUM_SEQS in rows["add_rms_norm_own"], f"the exchange took no such sum of {NUM_SEQS} rows: {rows}"
    outputs, steps = served.serve(*wide_load())
    assert max(step.num_decode_tokens for step in steps) == NUM_SEQS
    assert len(parted(outputs, alone["wide"])) <= 2


def test_a_thousand_steps_of_a_hundred_requests_share_a_long_cached_prefix(alone, group):
    served, _ = group
    outputs, steps = served.serve(*prefix_load(), **TEN_AT_A_TIME)
    assert len(steps) >= 1000
    assert all(len(output.token_ids) == 100 for output in outputs)
    assert sum(output.num_cached_tokens >= 3800 - 256 for output in outputs) >= 90, "all but the first ten at most"
    assert len(parted(outputs, alone["prefix"])) <= 2


@pytest.mark.parametrize("tp", SIZES)
def test_without_graphs_several_gpus_give_the_tokens_of_one(alone, tp):
    with LLM(**tree(tp, cuda_graphs=False, **BESIDE)) as llm:
        assert len(parted(llm.generate(*load()), alone["plain"])) <= 1


@pytest.mark.parametrize("tp", SIZES)
def test_captured_mixed_steps_give_the_tokens_of_one_gpu(alone, tp):
    """Each rank finds out by itself which decodes are left over, and how long they are."""
    options = tree(tp, max_num_seqs=128, max_num_batched_tokens=144, **BESIDE) | {"scheduler": "longest_first"}
    with LLM(**options) as llm:
        launched = launches_of(llm.engine.executor.worker.prompt_graphs)
        assert len(parted(llm.generate(*load()), alone["plain"])) <= 1
    assert has_left_over(launched)


GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def bfloat16_answers(tp, shape):
    options = tree(tp, "bfloat16", **BESIDE)
    with LLM(**options | {"model": MODEL | {"random_shape": shape}}) as llm:
        return [output.token_ids for output in llm.generate(load()[0], GREEDY)]


LARGE = SHAPE | dict(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288
)
"""Of a size whose products send their tiles to the ranks that sum them up."""


@pytest.fixture(scope="module", params=[SHAPE, LARGE], ids=["small", "large"])
def bfloat16_alone(request):
    return request.param, bfloat16_answers(1, request.param)


@pytest.mark.parametrize("tp", SIZES)
def test_bfloat16_agrees_for_most_of_a_greedy_answer(bfloat16_alone, tp):
    """Sums in another order round otherwise, and random weights have near-equal logits: answers part at some token."""
    shape, expected = bfloat16_alone
    answers = bfloat16_answers(tp, shape)
    agreeing = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), 32)
        for one, other in zip(expected, answers, strict=True)
    ]
    mean = sum(agreeing) / len(agreeing)
    print(f"tp={tp}: of {len(agreeing)} answers {agreeing.count(32)} agree whole, the mean prefix is {mean}")
    assert sum(at > 0 for at in agreeing) >= 36 and mean >= 16


def free_bytes():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.parametrize("tp", SIZES[:1])
def test_a_killed_rank_ends_the_engine_within_seconds_and_frees_the_gpu(tp):
    before = free_bytes()
    with LLM(**tree(tp, max_num_seqs=16, **BESIDE)) as llm:
        prompts, _ = load()
        for prompt in prompts[:8]:
            llm.engine.add(prompt, SamplingParams(max_tokens=1500, ignore_eos=True))
        for _ in range(40):
            llm.engine.step()
        llm.engine.executor.links.children[0].process.kill()
        started = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
            while llm.engine.has_work:
                llm.engine.step()
        assert time.monotonic() - started < 5
    assert before - free_bytes() < 1 << 30


@pytest.mark.parametrize("tp", SIZES[:1])
def test_a_kernel_that_does_not_end_on_one_gpu_is_found_by_the_marks_of_the_other(tp, monkeypatch):
    before = free_bytes()
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_rank")
    monkeypatch.setenv(VARIABLE, "1:T700:spin")
    monkeypatch.chdir(ROOT)
    options = tree(tp, max_num_seqs=16, cuda_graphs=False, **BESIDE)
    with LLM(**{**options, "model": {**MODEL, "name": "faulty"}}) as llm:
        assert len(llm.generate([[1] * 600], GREEDY)[0].token_ids) == 32
        started = time.monotonic()
        with pytest.raises(RankError, match=r"^rank 1 of 2 \(pid \d+\) got no further in a step for 4.5 s"):
            llm.generate([[2] * 700], GREEDY)
        assert time.monotonic() - started < 8
    assert before - free_bytes() < 1 << 30
