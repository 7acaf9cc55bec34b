"""Speculation on a GPU: steps with drafts are captured, and give the tokens of steps without."""

import random

import pytest

from hookline import LLM, SamplingParams
from hookline.core.plugin import sources
from tests.small_models import CONFIGS
from tests.test_gpu_engine import SHAPE

pytestmark = pytest.mark.gpu


LATENT = {**CONFIGS["glm4_moe_lite"], "vocab_size": 5000, "hidden_size": 256, "max_position_embeddings": 1024}


def answers(drafter, dtype="float32", name="qwen3", shape=SHAPE, **engine):
    """Tokens of prompts that repeat themselves, greedy and sampled; how many drafts there were; late work."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5000) for _ in range(rng.randint(2, 60))] * rng.randint(1, 4) for _ in range(24)]
    params = [
        SamplingParams(temperature=index % 3 / 2, max_tokens=rng.randint(20, 80), seed=index, ignore_eos=True)
        for index in range(24)
    ]
    model = {"name": name, "checkpoint": "", "weights": "random", "random_shape": shape}
    sizes = {"max_num_seqs": 16, "max_model_len": 1024, "memory_fraction": 0.2, **engine}
    with LLM(model=model, device="cuda", dtype=dtype, kernels="triton", drafter=drafter, engine=sizes) as llm:
        tokens = [output.token_ids for output in llm.generate(prompts, params)]
        speculation = llm.engine.speculation
        return tokens, speculation.num_drafted if speculation is not None else 0, dict(llm.engine.late_work)


@pytest.mark.parametrize(
    "drafter", ["suffix", "random", {"name": "synthetic", "k": 4, "length": 3.0}], ids=["suffix", "random", "synthetic"]
)
@pytest.mark.parametrize(
    ("dtype", "engine"),
    [("float32", {}), ("float32", {"num_blocks": 80, "block_size": 16}), ("bfloat16", {"batch_invariant": True})],
    ids=["float32", "a small pool", "batch-invariant bfloat16"],
)
def test_captured_steps_with_drafts_give_the_tokens_of_steps_without(drafter, dtype, engine, monkeypatch):
    monkeypatch.setenv(sources.DEVELOPMENT_VARIABLE, "tests.odd_drafters")
    plain, _, _ = answers(None, dtype, **engine)
    tokens, num_drafted, late = answers(drafter, dtype, **engine)
    assert num_drafted > 50
    assert not any(late.values()), late
    if isinstance(drafter, str):  # a synthetic drafter changes tokens, as it says, but not how many there are
        assert tokens == plain
    assert [len(row) for row in tokens] == [len(row) for row in plain]


@pytest.mark.parametrize(
    ("drafter", "name", "shape"),
    [
        ({"name": "eagle3", "layers": [0, 1], "adaptive": False}, "qwen3", SHAPE),
        ({"name": "mtp", "adaptive": False}, "deepseek", LATENT),
    ],
    ids=["eagle3", "mtp"],
)
def test_heads_give_the_tokens_of_steps_without(drafter, name, shape):
    plain, _, _ = answers(None, name=name, shape=shape)
    tokens, num_drafted, _ = answers(drafter, name=name, shape=shape)
    assert num_drafted > 50
    assert tokens == plain
