"""Drafts on a GPU: steps with them are graphs, and give the tokens that are drawn without."""

from __future__ import annotations

import pytest

from hookline import LLM, SamplingParams
from hookline.core.plugin import sources
from tests.test_gpu_engine import SHAPE

pytestmark = pytest.mark.gpu


def answers(drafter, **engine):
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_num_seqs": 16, "max_model_len": 1024, "memory_fraction": 0.2, **engine}
    dtype = "bfloat16" if engine else "float32"
    with LLM(model=model, device="cuda", dtype=dtype, kernels="triton", drafter=drafter, engine=sizes) as llm:
        texts = [[(31 * index + 7 * (place % 9)) % 5000 for place in range(20 + 9 * index)] for index in range(24)]
        params = [
            SamplingParams(temperature=index % 3 * 0.4, max_tokens=20 + index, seed=index, ignore_eos=True)
            for index in range(24)
        ]
        outputs = [output.token_ids for output in llm.generate(texts, params)]
        late = dict(llm.engine.late_work)
        return outputs, llm.engine.speculation, late


@pytest.mark.parametrize("engine", [{}, {"batch_invariant": True}], ids=["float32", "batch-invariant bfloat16"])
@pytest.mark.parametrize("drafter", ["suffix", "random"])
def test_tokens_with_drafts_are_those_without(drafter, engine, monkeypatch):
    monkeypatch.setenv(sources.DEVELOPMENT_VARIABLE, "tests.odd_drafters")
    outputs, counts, late = answers(drafter, **engine)
    assert outputs == answers(None, **engine)[0]
    assert counts.num_drafted > 50
    assert not any(late.values()), late
