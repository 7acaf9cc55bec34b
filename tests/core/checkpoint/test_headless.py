"""Which checkpoints have a head that gives tokens, by the config.json alone."""

import pytest

from hookline.core.checkpoint.headless import why_no_generation


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "BertLMHeadModel", "CTRLLMHeadModel", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
def test_a_language_model_gives_tokens_whether_or_not_its_config_says_that_its_head_is_tied(architecture, tied):
    assert why_no_generation({"architectures": [architecture], **tied}) is None


@pytest.mark.parametrize("architecture", ["Qwen3Model", "BertModel", "Qwen3ForSequenceClassification"])
def test_a_body_alone_gives_none(architecture):
    why = why_no_generation({"architectures": [architecture], "tie_word_embeddings": False})
    assert why is not None and f"(architectures: {architecture})" in why
