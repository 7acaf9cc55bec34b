"""model=transformers through the whole engine: greedy tokens equal those of transformers' own generate, in float32.

Every run tests a few architectures, nightly ones all of tests/transformers_cases.py.
"""

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hookline import LLM
from hookline.core.testing.model_suite.driver import Chunk, ModelDriver
from hookline.core.testing.model_suite.thread_ranks import on_ranks
from tests.lazily import Lazily
from tests.test_parity import greedy, random_prompts, transformers_greedy
from tests.transformers_cases import CASES, FEW, FEW_AT_TP_2, WINDOWED, make_checkpoint

pytestmark = pytest.mark.slow
TransformersModel = Lazily("hookline.plugins.models.transformers.model", "TransformersModel")
NUM_TOKENS = 64
TIGHT = dict(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=17, block_size=8, overlap=True, max_model_len=256)
"""Prompts in chunks, a pool for fewer requests than run, and steps launched before their tokens are known."""


OWN_FORMS = ("mixtral", "nemotron_h", "lara_mini")
"""Cases whose parameters transformers merges or splits, in unlike ways."""


def some(names, few):
    return [pytest.param(name, marks=[] if name in few else [pytest.mark.nightly]) for name in names]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function: name of a case -> its folder, prompts and transformers' tokens, made once."""

    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        reference = make_checkpoint(folder, CASES[name])
        lengths = (1, 7, 40, 33)
        # Without token 0: transformers' generate takes it for padding.
        prompts = [[token + 1 for token in prompt] for prompt in random_prompts(96, lengths)]
        prompts.append([*prompts[2][:32], 5, 6])
        return folder, prompts, [transformers_greedy(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]

    return made


@pytest.mark.parametrize("name", some(CASES, FEW))
def test_greedy_tokens_equal_transformers_in_chunks_with_preemptions_and_prefix_hits(name, checkpoints):
    folder, prompts, expected = checkpoints(name)
    tight = {**TIGHT, "num_blocks": CASES[name].num_blocks}
    with LLM(str(folder), model="transformers", device="cpu", engine=tight) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))
        again = llm.generate(prompts[-1:], greedy(NUM_TOKENS))
    assert [output.token_ids for output in outputs] == expected
    assert again[0].token_ids == expected[-1]
    if name not in WINDOWED:  # those hold too few blocks to be preempted, and give them back to be used again
        assert sum(output.num_preemptions for output in outputs) >= 1
        assert again[0].num_cached_tokens >= 8


def test_longrope_gives_the_tokens_of_transformers_beyond_the_original_length(tmp_path, caplog):
    case = CASES["longrope"]
    rope = {**case.options["rope_parameters"], "original_max_position_embeddings": 32}
    lengths = dict(original_max_position_embeddings=32, rope_parameters=rope)
    reference = make_checkpoint(tmp_path, case, **lengths)
    prompts = [[token + 1 for token in prompt] for prompt in random_prompts(96, (33, 61))]
    with caplog.at_level("INFO", "hookline"), LLM(str(tmp_path), device="cpu", engine={"block_size": 8}) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))
    assert [output.token_ids for output in outputs] == [
        transformers_greedy(reference, prompt, NUM_TOKENS)[0] for prompt in prompts
    ]
    assert "engine.max_model_len=1024 may exceed the original 32 tokens" in caplog.text


def tokens_of(folder, prompts, **options):
    with LLM(str(folder), model="transformers", device="cpu", engine={"max_model_len": 256}, **options) as llm:
        return [output.token_ids for output in llm.generate(prompts, greedy(NUM_TOKENS))]


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("name", some(CASES, OWN_FORMS))
def test_parameters_that_are_saved_as_they_are_give_the_tokens_of_transformers(name, tmp_path):
    reference = make_checkpoint(tmp_path / "first", CASES[name])
    reference.save_pretrained(tmp_path / "own", max_shard_size="20KB", save_original_format=False)
    prompts = [[token + 1 for token in prompt] for prompt in random_prompts(96, (7, 33))]
    expected = [transformers_greedy(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    for tp in (1, 2) if name == "mixtral" else (1,):
        assert tokens_of(tmp_path / "own", prompts, tp=tp) == expected


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.skipif("olmo_hybrid" not in CASES, reason="this transformers cannot have it served")
@pytest.mark.parametrize(("heads", "value_heads", "key_dim", "value_dim"), [(3, 3, 5, 7), (1, 1, 5, 7), (3, 6, 4, 9)])
def test_convolutions_in_parts_of_any_sizes_give_the_tokens_of_transformers(
    heads, value_heads, key_dim, value_dim, tmp_path
):
    sizes = dict(linear_num_key_heads=heads, linear_num_value_heads=value_heads)
    dims = dict(linear_key_head_dim=key_dim, linear_value_head_dim=value_dim)
    reference = make_checkpoint(tmp_path / "saved", CASES["olmo_hybrid"], **sizes, **dims)
    prompts = [[token + 1 for token in prompt] for prompt in random_prompts(96, (7, 33))]
    expected = [transformers_greedy(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]
    for tp in (1, 2) if heads == 1 else (1,):
        assert tokens_of(tmp_path / "saved", prompts, tp=tp) == expected

    stored = {name: one for file in tmp_path.glob("saved/*.safetensors") for name, one in load_file(file).items()}
    rows = [heads * key_dim, heads * key_dim, value_heads * value_dim]
    for stem in {name.rpartition(".q_conv1d")[0] for name in stored if ".q_conv1d" in name}:
        names = [f"{stem}.{part}_conv1d.weight" for part in "qkv"]
        saved = [stored[name] for name in names]
        stored |= dict(zip(names, torch.cat(saved).split(rows), strict=True))
        assert {len(one) for one in saved} != set(rows)
    (tmp_path / "released").mkdir()
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path / "released")
    stored = {name: one.contiguous() for name, one in stored.items()}
    save_file(stored, tmp_path / "released" / "model.safetensors", {"format": "pt"})
    assert tokens_of(tmp_path / "released", prompts) == expected


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("name", some([name for name in CASES if CASES[name].has_plan], FEW_AT_TP_2))
def test_two_processes_give_the_tokens_of_transformers(name, checkpoints):
    folder, prompts, expected = checkpoints(name)
    with LLM(str(folder), device="cpu", tp=2, model="transformers", engine={"max_model_len": 256}) as llm:
        assert [output.token_ids for output in llm.generate(prompts, greedy(NUM_TOKENS))] == expected


@pytest.mark.parametrize("name", some([name for name in CASES if CASES[name].has_plan], FEW))
def test_two_ranks_join_to_the_logits_of_one(name, checkpoints):
    import json

    config = json.loads((checkpoints(name)[0] / "config.json").read_text())
    chunk = Chunk(0, 0, random_prompts(97, (11,))[0])
    whole_TV = ModelDriver(TransformersModel, config).logits(chunk)
    shards = on_ranks(2, lambda ranks: ModelDriver(TransformersModel, config, ranks).logits(chunk))
    torch.testing.assert_close(torch.cat(shards, -1)[:, :97], whole_TV, rtol=1e-4, atol=1e-4)
