"""Layers that keep unlike things, on a GPU: captured steps give the tokens of plain torch. Float32, to be exact."""

import json
import random

import pytest
from safetensors.torch import save_file

from hookline import LLM, SamplingParams
from hookline.core.testing.model_suite.driver import ModelDriver
from tests.layered_model import LAYERED_CONFIG, LayeredModel

pytestmark = pytest.mark.gpu
SHAPE = {
    **LAYERED_CONFIG,
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
KINDS = {
    "windows": [100, 100, 100, "full"],
    "windows alone": [128, 128],
    "all kinds": ["full", "state", 70, "none", "shared:2", "shared:0"],
}
WAYS = {
    "no graphs, no overlap": dict(overlap=False, cuda_graphs=False),
    "graphs": dict(overlap=False),
    "overlap": {},
    "few blocks": dict(block_size=64, num_blocks=90),
    "small steps": dict(max_num_batched_tokens=128),
    "no prefix cache": dict(prefix_caching=False),
}


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.layered")


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layered")
    config = {**SHAPE, "layer_kinds": KINDS[request.param]}
    (folder / "config.json").write_text(json.dumps(config))
    targets = ModelDriver(LayeredModel, config).targets
    save_file(
        {name: target.view.clone().contiguous() for name, target in targets.items()}, folder / "model.safetensors"
    )
    return folder


def make(folder, kernels="triton", **engine):
    sizes = {"max_num_seqs": 32, "max_model_len": 1024, "max_num_batched_tokens": 512, "memory_fraction": 0.1, **engine}
    model = {"name": "layered", "checkpoint": str(folder)}
    return LLM(model=model, device="cuda", dtype="float32", kernels=kernels, engine=sizes)


def tokens(llm):
    """Of ragged prompts, some with a long common beginning, in two waves; greedy and sampled."""
    rng = random.Random(0)
    shared = [rng.randrange(2000) for _ in range(400)]
    prompts = [
        [*(shared if index % 2 else []), *(rng.randrange(2000) for _ in range(rng.randint(1, 200)))]
        for index in range(30)
    ]
    params = [
        SamplingParams(temperature=float(index % 3), max_tokens=rng.randint(1, 60), seed=index, ignore_eos=True)
        for index in range(30)
    ]
    with llm:
        waves = [llm.generate(prompts[:20], params[:20]), llm.generate(prompts[10:], params[10:])]
    return [[output.token_ids for output in outputs] for outputs in waves]


@pytest.fixture(scope="module")
def plain(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOKLINE_PLUGINS", "tests.layered")
        return tokens(make(folder, "torch", overlap=False, cuda_graphs=False))


@pytest.mark.parametrize("way", WAYS)
def test_captured_steps_of_unlike_layers_give_the_tokens_of_plain_torch(folder, plain, way):
    assert tokens(make(folder, **WAYS[way])) == plain
