"""Speculation on a GPU: steps with drafts are captured, and give the tokens of steps without."""

import random

import pytest

from hookline import LLM, SamplingParams
from tests.test_gpu_engine import SHAPE

pytestmark = pytest.mark.gpu


def answers(drafter, dtype="float32", **engine):
    """Tokens of prompts that repeat themselves, greedy and sampled; how many drafts were kept; steps not captured."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5000) for _ in range(rng.randint(2, 60))] * rng.randint(1, 4) for _ in range(24)]
    params = [
        SamplingParams(temperature=index % 3 / 2, max_tokens=rng.randint(20, 80), seed=index, ignore_eos=True)
        for index in range(24)
    ]
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_num_seqs": 16, "max_model_len": 1024, "memory_fraction": 0.2, **engine}
    with LLM(model=model, device="cuda", dtype=dtype, kernels="triton", drafter=drafter, engine=sizes) as llm:
        tokens = [output.token_ids for output in llm.generate(prompts, params)]
        speculation = llm.engine.speculation
        return tokens, speculation.num_drafted if speculation is not None else 0


@pytest.mark.parametrize(
    "drafter", ["suffix", {"name": "synthetic", "k": 4, "length": 3.0}], ids=["suffix", "synthetic"]
)
@pytest.mark.parametrize(
    ("dtype", "engine"),
    [("float32", {}), ("float32", {"num_blocks": 80, "block_size": 16}), ("bfloat16", {"batch_invariant": True})],
    ids=["float32", "a small pool", "batch-invariant bfloat16"],
)
def test_captured_steps_with_drafts_give_the_tokens_of_steps_without(drafter, dtype, engine):
    plain, _ = answers(None, dtype, **engine)
    tokens, num_drafted = answers(drafter, dtype, **engine)
    assert num_drafted > 0
    if drafter == "suffix":  # a synthetic drafter changes tokens, as it says, but not how many there are
        assert tokens == plain
    assert [len(row) for row in tokens] == [len(row) for row in plain]
