"""The language model of checkpoints that also see: greedy tokens equal transformers' own, in float32.

Every run tests a few families, nightly ones all of tests/wrapped_cases.py.
"""

import functools
import json
import logging

import pytest

from hookline import LLM
from tests.test_parity import greedy, random_prompts, transformers_greedy
from tests.wrapped_cases import CASES, FEW, make_wrapped

pytestmark = pytest.mark.slow
NUM_TOKENS = 64


def some(few):
    return [pytest.param(name, marks=[] if name in few else [pytest.mark.nightly]) for name in CASES]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function: name of a case -> its folder, prompts and transformers' tokens, made once."""

    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp(name)
        reference = make_wrapped(folder, CASES[name])
        # Without token 0: transformers' generate takes it for padding.
        prompts = [[token + 1 for token in prompt] for prompt in random_prompts(90, (1, 7, 40, 33))]
        prompts.append([*prompts[2][:32], 5, 6])
        return folder, prompts, [transformers_greedy(reference, prompt, NUM_TOKENS)[0] for prompt in prompts]

    return made


@pytest.mark.parametrize("name", some(FEW))
def test_the_language_model_alone_gives_the_tokens_of_transformers(name, checkpoints, caplog):
    folder, prompts, expected = checkpoints(name)
    assert len({token for tokens in expected for token in tokens}) > 20, "a degenerate model shows nothing"
    with caplog.at_level(logging.INFO, "hookline"), LLM(str(folder), device="cpu") as llm:
        assert llm.config.model.name == CASES[name].served_by
        assert [output.token_ids for output in llm.generate(prompts, greedy(NUM_TOKENS))] == expected
    assert f"of {json.loads((folder / 'config.json').read_text())['architectures'][0]}" in caplog.text


@pytest.mark.parametrize("name", some(FEW))
def test_chunks_preemptions_and_prefix_hits_give_the_same_tokens(name, checkpoints):
    folder, prompts, expected = checkpoints(name)
    tight = dict(max_num_batched_tokens=8, max_num_seqs=4, num_blocks=CASES[name].num_blocks, block_size=8)
    with LLM(str(folder), device="cpu", engine={**tight, "overlap": True}) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS))
        llm.generate(prompts[-1:], greedy(1))  # blocks of a window are left behind by short answers alone
        again = llm.generate(prompts[-1:], greedy(NUM_TOKENS))
    assert [output.token_ids for output in outputs] == expected
    assert again[0].token_ids == expected[-1]
    assert sum(output.num_preemptions for output in outputs) >= 1
    assert again[0].num_cached_tokens >= 8


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize("name", some(("qwen3_5_moe",)))
def test_two_ranks_give_the_same_tokens(name, checkpoints):
    folder, prompts, expected = checkpoints(name)
    with LLM(str(folder), device="cpu", tp=2) as llm:
        assert [output.token_ids for output in llm.generate(prompts, greedy(NUM_TOKENS))] == expected


def test_experts_that_are_stored_with_exchanged_dimensions_are_the_same_experts(checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, prompts, expected = checkpoints("qwen3_vl_moe")
    for path in folder.glob("*.safetensors"):
        tensors = {name: one.mT.contiguous() if ".experts." in name else one for name, one in load_file(path).items()}
        save_file(tensors, tmp_path / path.name)
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    with LLM(str(tmp_path), device="cpu") as llm:
        assert [output.token_ids for output in llm.generate(prompts[:2], greedy(NUM_TOKENS))] == expected[:2]


@pytest.mark.parametrize("model", ["auto", "transformers"])
def test_values_beside_the_towers_are_the_language_models(model, checkpoints, tmp_path):
    folder, prompts, expected = checkpoints("qwen2_5_vl")
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = {
        "rope_theta": text.pop("rope_parameters")["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps({**text, **config, **rope}))
    for path in folder.glob("*.safetensors*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with LLM(str(tmp_path), model=model, device="cpu") as llm:
        assert [output.token_ids for output in llm.generate(prompts[:2], greedy(NUM_TOKENS))] == expected[:2]
