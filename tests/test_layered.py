"""Layers that keep unlike things: through the engine a model gives what it gives without any cache.

The reference computes a whole sequence at once, from the checkpoint's tensors and the formulas alone.
"""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from hookline import LLM, SamplingParams
from hookline.core.errors import CapacityError, RequestError
from hookline.core.layers import rope_settings, rope_table
from hookline.core.testing.model_suite.driver import ModelDriver
from hookline.core.worker.graphs.decode_graphs import DecodeGraphs
from tests.layered_model import DECAY, EPS, LAYERED_CONFIG, LayeredModel
from tests.replayed_at_once import replay_at_once

KINDS = {
    "windows": [5, 5, 5, "full"],
    "windows alone": [5, 5, 5],
    "two windows": [3, "full", 9, 3],
    "all kinds": ["full", "state", 6, "none", "shared:2", "shared:0"],
    "states alone": ["state", "none", "state"],
    "full and none": ["full", "none", "shared:0", "full"],
}
HAS_STATES = ("all kinds", "states alone")
ENGINE = dict(block_size=4, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=64)
WAYS = {
    "plain": {},
    "chunks": dict(max_num_batched_tokens=8),
    "tiny pool": dict(num_blocks=66),
    "tiny pool, chunks": dict(num_blocks=48, max_num_batched_tokens=8),
    "overlap": dict(overlap=True),
    "overlap, tiny pool": dict(overlap=True, num_blocks=48, max_num_batched_tokens=16),
    "no prefix cache": dict(prefix_caching=False),
    "blocks of 1": dict(block_size=1, num_blocks=300),
    "blocks of 16": dict(block_size=16),
}


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.layered")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Kinds -> a folder with weights in which every layer matters."""
    folders = {}
    for name, kinds in KINDS.items():
        folder = folders[name] = tmp_path_factory.mktemp("layered")
        config = {**LAYERED_CONFIG, "layer_kinds": kinds}
        (folder / "config.json").write_text(json.dumps(config))
        targets = ModelDriver(LayeredModel, config).targets
        save_file(
            {one: target.view.clone().contiguous() for one, target in targets.items()}, folder / "model.safetensors"
        )
    return folders


def options_of(folder, **engine):
    return {"model": {"name": "layered", "checkpoint": str(folder)}, "device": "cpu", "engine": {**ENGINE, **engine}}


def load():
    """Prompts of mixed lengths, some sharing prefixes; greedy, so that the reference can check each token."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 61, (length,), generator=generator).tolist() for length in (3, 17, 40, 9, 1, 30)]
    prompts += [[*prompts[2][:32], 5], [*prompts[2][:32], 6, 7, 8], prompts[2], prompts[2][:13]]
    return prompts, [SamplingParams(temperature=0, max_tokens=12 + index, ignore_eos=True) for index in range(10)]


def full_logits(folder, token_ids):
    """Logits (T, V) of a sequence, each layer over all its tokens at once."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    x_TD, keys = w["embed.weight"][torch.tensor(token_ids)], {}
    for index, kind in enumerate(config["layer_kinds"]):
        layer = f"layers.{index}"
        if kind != "none":
            normed_TD = norm(x_TD, w[f"{layer}.mixer_norm.weight"])
            mixed_TD = mixed(w, layer, index, kind, normed_TD, config, keys)
            x_TD = x_TD + mixed_TD @ w[f"{layer}.output.weight"].T
        normed_TD = norm(x_TD, w[f"{layer}.mlp_norm.weight"])
        gated_TF = silu(normed_TD @ w[f"{layer}.gate.weight"].T) * (normed_TD @ w[f"{layer}.up.weight"].T)
        x_TD = x_TD + gated_TF @ w[f"{layer}.down.weight"].T
    return norm(x_TD, w["norm.weight"]) @ w["head.weight"].T


def norm(x_TD, weight_D):
    return x_TD / (x_TD.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_D


def mixed(w, layer, index, kind, x_TD, config, keys):
    if kind == "state":
        into_TD, mean_D, means = x_TD @ w[f"{layer}.into.weight"].T, 0, []
        for into_D in into_TD:
            mean_D = DECAY * mean_D + (1 - DECAY) * into_D
            means.append(mean_D)
        return torch.stack(means)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    settings, head_dim = rope_settings(config), config["hidden_size"] // num_heads
    table_PE = rope_table(settings, head_dim, len(x_TD)).double()
    owner = index
    if str(kind).startswith("shared:"):
        owner = int(kind.removeprefix("shared:"))
        kind = config["layer_kinds"][owner]
    else:
        k_TKE = (x_TD @ w[f"{layer}.k.weight"].T).view(len(x_TD), num_kv_heads, head_dim)
        v_TKE = (x_TD @ w[f"{layer}.v.weight"].T).view(len(x_TD), num_kv_heads, head_dim)
        keys[index] = rotated(k_TKE, table_PE), v_TKE
    q_THE = rotated((x_TD @ w[f"{layer}.q.weight"].T).view(len(x_TD), num_heads, head_dim), table_PE)
    k_THE, v_THE = (one.repeat_interleave(num_heads // num_kv_heads, 1) for one in keys[owner])
    scores_HTT = torch.einsum("the,she->hts", q_THE, k_THE) / head_dim**0.5
    position_T = torch.arange(len(x_TD))
    distance_TT = position_T[:, None] - position_T
    is_hidden_TT = distance_TT < 0
    if kind != "full":
        is_hidden_TT |= distance_TT >= kind
    weights_HTT = scores_HTT.masked_fill(is_hidden_TT, -torch.inf).softmax(-1)
    return torch.einsum("hts,she->the", weights_HTT, v_THE).flatten(1)


def rotated(x_TXE, table_PE):
    cos_T1F, sin_T1F = table_PE.unsqueeze(1).chunk(2, -1)
    first_TXF, second_TXF = x_TXE.chunk(2, -1)
    return torch.cat((first_TXF * cos_T1F - second_TXF * sin_T1F, second_TXF * cos_T1F + first_TXF * sin_T1F), -1)


@cache
def most_likely(folder, *token_ids):
    """After each token of a sequence."""
    return full_logits(folder, token_ids).argmax(-1).tolist()


def check_outputs(folder, outputs, num_requests=None):
    """Each token must be the most likely one after all before it, by a recomputation of the whole sequence."""
    prompts, params = load()
    for prompt, one, output in zip(prompts[:num_requests], params, outputs, strict=False):
        token_ids, first = output.token_ids, len(prompt) - 1
        assert len(token_ids) == one.max_tokens
        assert most_likely(folder, *prompt, *token_ids)[first:-1] == token_ids
    assert len(outputs) == len(prompts[:num_requests])


USUAL = {
    "windows": list(WAYS),
    "windows alone": ["tiny pool, chunks", "overlap"],
    "two windows": ["overlap, tiny pool"],
    "all kinds": ["chunks", "overlap, tiny pool"],
    "states alone": ["plain"],
    "full and none": ["chunks"],
}
"""Kinds -> the ways that they are tried with in a usual run."""
CASES = [
    pytest.param(kinds, way, marks=pytest.mark.slow if way in USUAL[kinds] else pytest.mark.nightly)
    for kinds in KINDS
    for way in WAYS
]


@pytest.mark.parametrize(("kinds", "way"), CASES)
def test_a_crowd_gets_what_a_whole_recomputation_gives(checkpoints, kinds, way):
    scheduler = "chunked" if "chunks" in way else "prefill_first"
    with LLM(scheduler=scheduler, **options_of(checkpoints[kinds], **WAYS[way])) as llm:
        prompts, params = load()
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts[:3], params[:3])
        assert llm.engine.pool.num_free == llm.engine.pool.num_blocks
    check_outputs(checkpoints[kinds], outputs)
    check_outputs(checkpoints[kinds], again, 3)
    if "tiny" not in way and way not in ("no prefix cache", "blocks of 1"):
        # The last token of a prompt is always computed, and with it the rest of its block.
        in_blocks = [(len(prompt) - 1) // llm.engine.limits.plan.block_size for prompt in prompts[:3]]
        found = [output.num_cached_tokens // llm.engine.limits.plan.block_size for output in again]
        if kinds in HAS_STATES:  # states of some prompts gave way to those of later ones
            assert sum(found) > 0 and all(one in (0, most) for one, most in zip(found, in_blocks, strict=True))
        else:
            assert found == in_blocks
    if way == "overlap, tiny pool" and kinds != "windows alone":
        assert sum(output.num_preemptions for output in outputs) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["windows", "all kinds"])
def test_captured_decodes_give_the_same(checkpoints, kinds, monkeypatch):
    replayed = replay_at_once(monkeypatch)
    with LLM(**options_of(checkpoints[kinds], num_blocks=66)) as llm:
        worker = llm.engine.executor
        worker.graphs = DecodeGraphs(worker.runner, [3, 8], 64)
        with torch.inference_mode():
            worker.graphs.capture(None)
        outputs = llm.generate(*load())
    assert sum(graph.count for graph in replayed) > 40
    check_outputs(checkpoints[kinds], outputs)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("kinds", ["all kinds"])
def test_two_ranks_give_the_same(checkpoints, kinds):
    with LLM(tp=2, **options_of(checkpoints[kinds], num_blocks=66, max_num_batched_tokens=16)) as llm:
        outputs = llm.generate(*load())
    check_outputs(checkpoints[kinds], outputs)


def test_a_sequence_may_be_longer_than_full_attention_would_allow(checkpoints):
    """A window of 5 needs few blocks of a small pool, whatever the length."""
    sizes = dict(num_blocks=8, max_num_batched_tokens=8)
    with LLM(**options_of(checkpoints["windows alone"], **sizes)) as llm:
        prompt = [1 + index % 60 for index in range(50)]
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        assert llm.engine.limits.max_len == 64
    assert most_likely(checkpoints["windows alone"], *prompt, *output.token_ids)[49:-1] == output.token_ids


def test_how_many_states_are_saved_for_prefixes_is_said(checkpoints, caplog):
    with caplog.at_level("INFO", logger="hookline"), LLM(**options_of(checkpoints["states alone"])) as llm:
        num_slots = llm.engine.state.cache.snapshots.num_slots
    assert f"states are saved for prefixes: {num_slots} snapshots of " in caplog.text


def test_a_pool_too_small_for_one_request_is_refused(checkpoints):
    with pytest.raises(CapacityError, match="4 groups of this model's layers share 3 blocks of 1 tokens, which hold 0"):
        LLM(**options_of(checkpoints["two windows"], num_blocks=3, block_size=1))


def test_a_prompt_that_the_groups_have_no_room_for_is_refused_with_the_arithmetic(checkpoints):
    with LLM(**options_of(checkpoints["two windows"], num_blocks=20)) as llm:
        said = r"at most 19 tokens, as the KV cache holds 20 blocks of 4 tokens, which 4 groups of layers share"
        with pytest.raises(RequestError, match=said):
            llm.engine.add(list(range(1, 41)), SamplingParams())
