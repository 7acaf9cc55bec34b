"""Any object as a prompt is served, or refused alone in one line; so is a whole call that holds none."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import LLM, SamplingParams
from hookline.core.errors import RequestError
from hookline.plugins import models
from tests.fuzzing import examples
from tests.hf_models import QWEN3

MODEL = {"name": "qwen3", "checkpoint": "", "weights": "random"}
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
GOOD = [5, 6, 7]
NUMBERS = st.integers() | st.sampled_from([-1, 0, 4095, 4096, 2**31, 2**63, 10**400, np.int64(3), np.float32(0.5)])
TEXTS = st.text(max_size=9) | st.sampled_from(["", "\ud800", "\x00", "\x1b[31m", "a" * 3000, "<|im_end|>"])
LEAVES = NUMBERS | TEXTS | st.none() | st.booleans() | st.floats() | st.binary(max_size=4) | st.just(math.nan)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), st.just("user") | ANYTHING, max_size=3), max_size=3
)
ARRAYS = st.sampled_from([np.arange(3), np.array(3), np.array([0.5]), np.array([[1, 2]]), np.array(["a"])])
PROMPTS = st.one_of(TEXTS, st.lists(st.integers(0, 4095), max_size=9), st.lists(NUMBERS, max_size=5), MESSAGES)


@pytest.fixture(scope="module")
def llm():
    from pathlib import Path

    tokenizer = str(Path(models.__file__).parent / "qwen3_tiny")
    model = {**MODEL, "random_shape": {**QWEN3, "vocab_size": 4096}, "tokenizer": tokenizer}
    with LLM(model=model, device="cpu", engine=dict(num_blocks=50, max_num_seqs=4, max_model_len=64)) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(llm):
    return llm.generate(GOOD, PARAMS)[0].token_ids


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(prompts=st.lists(PROMPTS | ANYTHING | ARRAYS, min_size=1, max_size=2))
def test_any_prompt_is_served_or_refused_alone_in_one_line(llm, wanted, prompts):
    outputs = llm.generate([GOOD, *prompts, GOOD], PARAMS)
    assert outputs[0].token_ids == outputs[-1].token_ids == wanted
    for output in outputs[1:-1]:
        if output.error is None:
            assert len(output.token_ids) == 2 and all(type(token) is int for token in output.prompt_token_ids)
        else:
            assert 0 < len(output.error) < 2000 and output.error.isprintable() and not output.token_ids


@pytest.mark.slow
@settings(max_examples=examples(500), deadline=None)
@given(prompts=PROMPTS | ANYTHING | ARRAYS)
def test_anything_in_place_of_prompts_is_served_or_refused_in_one_line(llm, wanted, prompts):
    try:
        outputs = llm.generate(prompts, PARAMS)
    except RequestError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
    else:
        assert all(output.error is None or output.error.isprintable() for output in outputs)
    assert llm.generate(GOOD, PARAMS)[0].token_ids == wanted
