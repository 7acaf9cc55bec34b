"""Pooled requests on a GPU, beside captured decodes: vectors as on the plain path, and tokens are not disturbed."""

import random
import warnings

import numpy as np
import pytest

from hookline import PoolingParams, SamplingParams
from tests.test_gpu_engine import load, make

pytestmark = pytest.mark.gpu
MAX_DIFFERENCE = 1e-3  # float32 products and sums of other kernels, over vectors of length 1 or 16
WISHES = [
    PoolingParams("last", normalize=True),
    PoolingParams("mean", normalize=True),
    PoolingParams("cls", normalize=True, dimensions=64),
    PoolingParams("mean", normalize=False, dimensions=200),
]


def wishes(count, seed=1):
    rng = random.Random(seed)
    return [rng.choice(WISHES) for _ in range(count)]


def vectors(llm):
    prompts, _ = load()
    with llm:
        outputs = llm.embed(prompts, wishes(len(prompts)))
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.vector for output in outputs]


@pytest.fixture(scope="module")
def plain():
    return vectors(make(kernels="torch", overlap=False, cuda_graphs=False))


@pytest.mark.parametrize("engine", [dict(), dict(max_num_batched_tokens=256), dict(overlap=False, num_blocks=200)])
def test_vectors_are_those_of_the_plain_path(engine, plain):
    found = vectors(make(**engine))
    assert max(np.abs(one - other).max() for one, other in zip(found, plain, strict=True)) <= MAX_DIFFERENCE


def test_tokens_and_vectors_are_the_same_side_by_side(plain):
    prompts, params = load()
    with make(max_num_batched_tokens=512) as llm:
        alone = [output.token_ids for output in llm.generate(prompts, params)]
        stream = llm.stream(prompts, params)
        deltas = [next(stream)]
        outputs = llm.embed(prompts, wishes(len(prompts)))
        deltas += stream
    found = {delta.prompt_index: delta.output.token_ids for delta in deltas if delta.output is not None}
    assert [found[index] for index in range(len(prompts))] == alone
    pairs = zip((output.vector for output in outputs), plain, strict=True)
    assert max(np.abs(one - other).max() for one, other in pairs) <= MAX_DIFFERENCE


def test_launching_a_pooled_step_does_not_wait_for_the_device():
    import torch

    with make(overlap=True) as llm:
        llm.embed([[1, 2, 3]], WISHES[1])  # poolers are made, kernels compiled
        try:
            with warnings.catch_warnings(action="ignore"):  # torch calls it a prototype
                torch.cuda.set_sync_debug_mode("error")
            llm.engine.add([4] * 300, SamplingParams(), pooling=WISHES[1])
            llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while llm.engine.has_work:
            llm.engine.step()
