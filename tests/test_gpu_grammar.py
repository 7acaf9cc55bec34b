"""Structured output on a GPU: steps in two graphs give what eager steps give, with overlap and without."""

from __future__ import annotations

import json

import jsonschema
import pytest

from hookline import LLM, SamplingParams, StructuredOutputs
from hookline.core.outputs import FinishReason
from tests.schemas import random_schema

pytestmark = pytest.mark.gpu
SEEDS = range(24)
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 768, "num_blocks": 512}


def outputs_of(**engine):
    params = [
        SamplingParams(
            temperature=1.0 if seed % 2 else 0.0,
            seed=seed,
            max_tokens=300,
            logprobs=1 if seed % 5 == 0 else None,
            repetition_penalty=1.1 if seed % 3 == 0 else 1.0,
            structured_outputs=None if seed % 4 == 3 else StructuredOutputs(json=random_schema(seed), whitespace=False),
        )
        for seed in SEEDS
    ]
    with LLM(device="cuda", dtype="float32", engine={**SIZES, **engine}) as llm:
        return llm.generate(['data = json.loads("""'] * len(params), params)


@pytest.fixture(scope="module")
def eager():
    return outputs_of(cuda_graphs=False, overlap=False)


@pytest.mark.parametrize("engine", [{"overlap": False}, {"overlap": True}, {"cuda_graphs": False, "overlap": True}])
def test_graphs_and_overlap_change_no_token(eager, engine):
    found = outputs_of(**engine)
    assert [one.token_ids for one in found] == [one.token_ids for one in eager]


def test_every_completion_validates(eager):
    for seed, output in zip(SEEDS, eager, strict=True):
        assert output.error is None
        if seed % 4 != 3 and output.finish_reason is FinishReason.STOP:
            jsonschema.Draft202012Validator(random_schema(seed)).validate(json.loads(output.text))
