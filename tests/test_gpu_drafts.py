"""Speculation on a GPU: steps with drafts are captured, and give the tokens of steps without."""

import random

import numpy as np
import pytest

from hookline import LLM, SamplingParams
from hookline.core.assembly.resolve import resolve
from hookline.core.assembly.speculation import TargetModel
from hookline.core.config.settings import validate
from hookline.core.contracts import ComputedRow, DrafterSpec, DraftRow
from hookline.core.plugin import sources
from hookline.core.plugin.host import PluginHost
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
        if drafter is not None:
            is_on_device = llm.engine.state.decoding.device is not None
            assert is_on_device == (drafter["name"] in ("suffix", "synthetic"))
        return tokens, speculation.num_drafted if speculation is not None else 0, dict(llm.engine.late_work)


@pytest.mark.parametrize(
    "drafter",
    [{"name": "suffix", "adaptive": False}, {"name": "random"}, {"name": "synthetic", "k": 4, "length": 3.0}],
    ids=["suffix", "random", "synthetic"],
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
    if drafter["name"] != "synthetic":  # a synthetic drafter changes tokens, as it says, but not how many there are
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
    tokens, num_drafted, late = answers(drafter, name=name, shape=shape)
    assert num_drafted > 50
    assert not any(late.values()), late
    assert tokens == plain


@pytest.mark.parametrize(
    ("drafter", "name", "shape"),
    [({"name": "eagle3", "layers": [0, 1]}, "qwen3", SHAPE), ({"name": "mtp"}, "deepseek", LATENT)],
    ids=["eagle3", "mtp"],
)
def test_captured_heads_propose_what_eager_ones_do(drafter, name, shape):
    proposals = [proposed(drafter, name, shape, cuda_graphs=cuda_graphs) for cuda_graphs in (True, False)]
    assert proposals[0] == proposals[1]
    assert sum(map(len, proposals[0])) > 100


def proposed(drafter, name, shape, **engine):
    """What a head proposes for some requests: after prompts at once, then after a few tokens of each."""
    model = {"name": name, "checkpoint": "", "weights": "random", "random_shape": shape}
    sizes = {"max_num_seqs": 12, "max_model_len": 1024, **engine}
    tree = {"model": model, "device": "cuda", "dtype": "float32", "kernels": "triton", "drafter": drafter}
    host = PluginHost.load()
    config = validate({**tree, "engine": sizes}, host)
    target = TargetModel(resolve(config, host))
    made = config.drafter.entry.load()(config.drafter.config, DrafterSpec(5000, 12, 1024, target=target))
    layers = made.reads_layers(config.drafter.config, target.spec, target.config_of)
    rng, found = np.random.default_rng(0), []
    tokens = [
        rng.integers(0, 5000, length, dtype=np.int32) for length in (2, 3, 9, 30, 100, 128, 129, 300, 17, 64, 200)
    ]
    start = [0] * len(tokens)
    for _ in range(3):
        streams = [
            {layer: rng.standard_normal((len(row) - 1 - first, shape["hidden_size"]), np.float32) for layer in layers}
            for row, first in zip(tokens, start, strict=True)
        ]
        made.observe([ComputedRow(id_, tokens[id_], start[id_], streams[id_]) for id_ in range(len(tokens))])
        rows = [
            DraftRow(id_, row, 1, 3, SamplingParams(temperature=id_ % 3 / 2, top_k=20 * (id_ % 4 == 3)), seed=id_)
            for id_, row in enumerate(tokens)
        ]
        found += [*made.propose_all(rows), *made.propose_all(rows[1:6:2]), made.propose(rows[7])]
        start = [len(row) - 1 for row in tokens]
        tokens = [np.concatenate([row, rng.integers(0, 5000, 1 + len(row) % 4, dtype=np.int32)]) for row in tokens]
    made.close()
    return found
