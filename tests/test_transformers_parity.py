"""model=transformers through the whole engine: greedy tokens equal those of transformers' own generate, in float32.

Every run tests a few architectures, nightly ones all of tests/transformers_cases.py.
"""

import functools

import pytest
import torch

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
