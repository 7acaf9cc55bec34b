"""Large prefills over several GPUs, their sums copied beside the products: the tokens of one GPU, and a lost rank."""

import os
import signal
import time

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.errors import RankError
from tests.test_gpu_engine import SHAPE

pytestmark = pytest.mark.gpu
COUNT = torch.cuda.device_count()
SIZES = [pytest.param(size, marks=pytest.mark.skipif(size > COUNT, reason=f"needs {size} GPUs")) for size in (2, 4)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(tp):
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_num_seqs": 64, "max_model_len": 2048, "memory_fraction": 0.2, "max_num_batched_tokens": 12_000}
    return LLM(model=model, device="cuda", dtype="float32", engine=sizes, tp=tp)


def prompts(count=40):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(300, 1500, (count,), generator=generator).tolist()
    return [torch.randint(0, 500, (length,), generator=generator).tolist() for length in lengths]


def num_equal(one, other):
    """Sums in another order differ in the last bits of float32, which may turn a choice over once in a while."""
    return sum(first == second for first, second in zip(one, other, strict=True))


def answers(llm):
    return [output.token_ids for output in llm.generate(prompts(), PARAMS)]


@pytest.fixture(scope="module")
def alone():
    with make(1) as llm:
        return answers(llm)


@pytest.mark.parametrize("tp", SIZES)
def test_large_prefills_give_the_tokens_of_one_gpu(alone, tp):
    with make(tp) as llm:
        ranks = llm.engine.executor.worker.runner.ranks
        assert ranks.copies is not None and ranks.num_chunks(12_000) > 1
        assert num_equal(answers(llm), alone) >= len(alone) - 1
        again = answers(llm)
        assert num_equal(again, alone) >= len(alone) - 1


@pytest.mark.parametrize("tp", SIZES[:1])
@pytest.mark.parametrize(
    ("signal_number", "fault", "limit_s"),
    [(signal.SIGKILL, "was killed by SIGKILL", 5), (signal.SIGSTOP, "has given no sign of life", 7)],
    ids=["killed", "stopped"],
)
def test_a_rank_lost_in_large_prefills_ends_the_engine_within_seconds(tp, signal_number, fault, limit_s):
    """A stopped rank is found late, when this one's GPU surely waits for it."""
    with make(tp) as llm:
        for prompt in prompts():
            llm.engine.add(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
        llm.engine.step()
        executor = llm.engine.executor
        os.kill(executor.links.children[0].process.pid, signal_number)
        started = time.monotonic()
        with pytest.raises(RankError, match=rf"rank 1 of 2 .* {fault}"):
            while llm.engine.has_work:
                llm.engine.step()
        assert time.monotonic() - started < limit_s
        closing = time.monotonic()
    assert time.monotonic() - closing < 5, "and its GPU is free"
