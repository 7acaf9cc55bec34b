"""The pooler against Hookline's conformance suite, and from end to end in an engine."""

from __future__ import annotations

import numpy as np
import torch
from hookline_weightedmean.pooler import WeightedMean
from torch import Tensor

from hookline import LLM, PoolingParams
from hookline.core.contracts import PoolerSpec
from hookline.core.testing.pooler_suite import PoolerSuite


class TestWeightedMean(PoolerSuite):
    def make(self, spec: PoolerSpec) -> WeightedMean:
        return WeightedMean(None, spec)

    def expected(self, hidden_TD: Tensor) -> Tensor:
        weights_T = torch.arange(1, len(hidden_TD) + 1, dtype=torch.float64)
        return (hidden_TD * (weights_T / weights_T.sum()).unsqueeze(1)).sum(0)


def test_in_an_engine_chunks_make_no_difference() -> None:
    vectors = []
    for size in (8, 64):
        engine = {"cpu_cache_gib": 0.1, "max_model_len": 128, "max_num_batched_tokens": size, "max_num_seqs": 4}
        with LLM(device="cpu", engine=engine) as llm:
            outputs = llm.embed([list(range(1, 50)), [7]], PoolingParams("weightedmean_tokens"))
            vectors.append([output.vector for output in outputs])
            alone = llm.embed([7], PoolingParams("last"))[0].vector
            assert np.allclose(outputs[1].vector, alone, atol=1e-5)  # the mean of one token
    assert all(np.allclose(one, other, atol=1e-5) for one, other in zip(*vectors, strict=True))
