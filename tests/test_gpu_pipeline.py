"""Several GPUs as stages of layers: the tokens of one, through captured parts of decodes; a lost stage is named.

Tokens are compared as in tests/test_gpu_ranks.py. A group starts once and serves many engines.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hookline import LLM, PoolingParams, SamplingParams, StructuredOutputs
from hookline.core.assembly.engine import build_executor
from hookline.core.assembly.resolve import resolve
from hookline.core.config.settings import validate
from hookline.core.errors import RankError
from hookline.core.plugin.host import PluginHost
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.testing.model_suite.driver import ModelDriver
from tests import test_gpu_layered, test_gpu_ranks
from tests.faulty_rank import VARIABLE
from tests.layered_model import LayeredModel
from tests.test_gpu_engine import SHAPE, load
from tests.test_gpu_ranks import TOLERANCE, Served, extra_load, parted, wide_load

pytestmark = pytest.mark.gpu
COUNT = torch.cuda.device_count()
SIZES = [
    pytest.param(sizes, marks=pytest.mark.skipif(sizes[0] * sizes[1] > COUNT, reason="needs as many GPUs"))
    for sizes in ((1, 2), (2, 2), (1, 4))
]
"""(tp, pp)."""


BESIDE = {"num_blocks": 1000}
"""Of an engine that runs while a group still holds its part of the memory: a small cache, whatever is left."""
SIX_LAYERS = {**SHAPE, "num_hidden_layers": 6}
MODEL = {**test_gpu_ranks.MODEL, "random_shape": SIX_LAYERS}


def tree(tp=1, pp=1, **engine):
    return {**test_gpu_ranks.tree(tp, **engine), "model": MODEL, "pp": pp}


def start(tp=1, pp=1):
    host = PluginHost.load()
    choice = resolve(validate(tree(tp, pp), host), host)
    return Served(build_executor(choice, InstalledExtensions.of(host.registry, choice.facts)), choice, host)


@pytest.fixture(scope="module")
def alone():
    """What one GPU answers to each load."""
    one = start()
    try:
        loads = {"plain": load(), "extra": extra_load(), "wide": wide_load()}
        return {name: one.serve(*each)[0] for name, each in loads.items()}
    finally:
        one.executor.close()


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: f"tp{sizes[0]}_pp{sizes[1]}")
def group(request, alone):
    served = start(*request.param)
    yield served
    served.executor.close()


@pytest.mark.parametrize("limits", [{}, dict(num_blocks=30), dict(max_num_batched_tokens=128)], ids=str)
def test_stages_give_the_tokens_of_one_gpu_plain_preempting_and_in_chunks(alone, group, limits):
    assert group.executor.worker.graphs is not None
    outputs, _ = group.serve(*load(), **limits)
    assert len(parted(outputs, alone["plain"])) <= 1
    assert not limits.get("num_blocks") or sum(output.num_preemptions for output in outputs) >= 1


def test_processors_and_scores_over_stages_are_those_of_one_gpu(alone, group):
    outputs, _ = group.serve(*extra_load())
    different = parted(outputs, alone["extra"])
    assert len(different) <= 1
    for index, (output, expected) in enumerate(zip(outputs, alone["extra"], strict=True)):
        for name in () if index in different else ("logprobs", "prompt_logprobs"):
            found, wanted = getattr(output, name), getattr(expected, name)
            assert (found is None) == (wanted is None)
            for one, other in zip(found or (), wanted or (), strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.token_id == other.token_id and abs(one.logprob - other.logprob) < TOLERANCE)


def test_many_rows_in_micro_batches_are_those_of_one_gpu(alone, group):
    outputs, steps = group.serve(*wide_load())
    assert max(step.num_decode_tokens for step in steps) == test_gpu_ranks.NUM_SEQS
    assert len(parted(outputs, alone["wide"])) <= 2


@pytest.mark.skipif(COUNT < 2, reason="needs 2 GPUs")
def test_uneven_stages_without_graphs_give_the_tokens_of_one_gpu(alone):
    with LLM(**tree(1, 2, cuda_graphs=False, pp_layers=[5, 1], **BESIDE)) as llm:
        assert len(parted(llm.generate(*load()), alone["plain"])) <= 1


@pytest.mark.skipif(COUNT < 2, reason="needs 2 GPUs")
def test_masked_draws_over_two_stages_are_those_of_one_gpu():
    """With the bundled checkpoint, whose tokens are text."""
    pytest.importorskip("llguidance")
    asked = [None, StructuredOutputs(regex="[0-9]{3}-[a-z]{2}"), StructuredOutputs(choice=["yes", "no"])] * 4
    prompts = [f"x{index} = " for index in range(len(asked))]
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=20, structured_outputs=one)
        for index, one in enumerate(asked)
    ]
    found = []
    for pp in (1, 2):
        engine = {"max_num_seqs": 16, "max_model_len": 256, **BESIDE}
        with LLM(device="cuda", dtype="float32", pp=pp, engine=engine) as llm:
            found.append(llm.generate(prompts, params))
    assert len(parted(*found)) <= 1
    assert found[1][2].text in ("yes", "no")


KINDS = ["full", 100, "state", "none", "shared:1", 60, 100, "state"]
"""Of a test's model whose last stage, of three layers, has no full attention."""


@pytest.mark.skipif(COUNT < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("kinds", [KINDS, ["full", "state"]], ids=str)
def test_stages_of_unlike_layers_give_the_tokens_of_one_gpu(tmp_path, monkeypatch, kinds):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.layered")
    monkeypatch.chdir(Path(__file__).parent.parent)
    config = {**test_gpu_layered.SHAPE, "vocab_size": SHAPE["vocab_size"], "layer_kinds": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    targets = ModelDriver(LayeredModel, config).targets
    weights = {name: target.view.clone().contiguous() for name, target in targets.items()}
    save_file(weights, tmp_path / "model.safetensors")
    model = {"name": "layered", "checkpoint": str(tmp_path)}
    cut = [5, 3] if kinds is KINDS else [len(kinds) - 1, 1]
    found = []
    for stages in ({}, {"pp_layers": cut}, {"pp_layers": cut, "cuda_graphs": False, "max_num_batched_tokens": 128}):
        sizes = {"max_num_seqs": 32, "max_model_len": 1024, "max_num_batched_tokens": 512, **BESIDE, **stages}
        with LLM(model=model, device="cuda", dtype="float32", pp=2 if stages else 1, engine=sizes) as llm:
            found.append(llm.generate(*load()))
    assert len(parted(found[1], found[0])) <= 1 and len(parted(found[2], found[0])) <= 1


def seen_states(engine):
    """A dictionary that fills with the hidden states of each request and position, as an observer is shown them."""
    found, listeners = {}, engine.observers
    notify = listeners.notify

    def seen(hook, **told):
        if hook != "on_hidden_states":
            return notify(hook, **told)
        states = told["states"]
        for at, key in enumerate(zip(states.request_ids_T.tolist(), states.positions_T.tolist(), strict=True)):
            found[key] = np.stack([rows[at] for rows in states.layers.values()])

    engine.state.hidden_states.are_read, listeners.notify = True, seen
    return found


@pytest.mark.skipif(COUNT < 2, reason="needs 2 GPUs")
def test_vectors_and_hidden_states_over_two_stages_are_those_of_one_gpu():
    prompts, _ = load(12)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for pp in (1, 2):
        with LLM(**tree(1, pp, taps=[1, 4, 5], prefix_caching=False, **BESIDE)) as llm:
            states = seen_states(llm.engine)
            tokens = [output.token_ids for output in llm.generate(prompts[:4], greedy)]
            vectors = [output.vector for output in llm.embed(prompts, PoolingParams("mean"))]
            found.append((tokens, np.stack(vectors), states))
    (tokens, vectors, states), (wanted_tokens, wanted_vectors, wanted_states) = found[1], found[0]
    assert tokens == wanted_tokens
    assert np.abs(vectors - wanted_vectors).max() < TOLERANCE
    common = states.keys() & wanted_states.keys()  # with overlap, a token too many
    assert len(common) >= sum(map(len, prompts))
    assert max(np.abs(states[key] - wanted_states[key]).max() for key in common) < TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "rank", "fault", "message"),
    [
        pytest.param(
            (tp, pp), rank, fault, message, marks=pytest.mark.skipif(tp * pp > COUNT, reason="needs as many GPUs")
        )
        for tp, pp, rank in ((1, 2, 1), (2, 2, 1), (2, 2, 3))
        for fault, message in (("SIGKILL", "was killed by SIGKILL"), ("raise", "a bug in"))
    ],
)
def test_a_lost_stage_ends_the_engine_with_its_name(monkeypatch, sizes, rank, fault, message):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.faulty_rank")
    monkeypatch.setenv(VARIABLE, f"{rank}:T7:{fault}")
    monkeypatch.chdir(Path(__file__).parent.parent)
    options = tree(*sizes, cuda_graphs=False, **BESIDE)
    options["model"] = {**options["model"], "name": "faulty"}
    named = f"rank {rank} of {math.prod(sizes)} .*{message}"
    with pytest.raises(RankError, match=named), LLM(**options) as llm:
        llm.generate([list(range(7))], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
