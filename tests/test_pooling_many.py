"""Many texts through one call, which the engine batches by itself: 300 in CI, 10,000 of the nightly run."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hookline import LLM, PoolingParams
from hookline.core.frontend.generation import Progress

INSTRUCTION = "Represent this sentence for searching relevant passages: "
WORDS = "import os def self return for in range if not path open read write list dict".split()


class Counting(Progress):
    """A bar that also counts."""

    num_finished = 0
    is_closed = False

    def update(self, num_finished: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self.num_finished += num_finished
        assert num_decode_tokens == 0  # nothing is drawn
        super().update(num_finished, num_prefill_tokens, num_decode_tokens)

    def close(self) -> None:
        self.is_closed = True
        super().close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_many_texts_are_embedded_with_a_bar_and_their_common_beginning_is_computed_once(count: int) -> None:
    rng = random.Random(0)
    texts = [INSTRUCTION + " ".join(rng.choices(WORDS, k=rng.randrange(1, 12))) for _ in range(count)]
    engine = {"num_blocks": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 128, "block_size": 8}
    with LLM(device="cpu", engine=engine) as llm:
        bar = Counting(count)
        outputs = llm.embed(texts, PoolingParams(dimensions=64), progress=bar)
        assert (bar.num_finished, bar.is_closed) == (count, True)
        assert [output.error for output in outputs] == [None] * count
        vectors = np.stack([output.vector for output in outputs])
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(count), abs=1e-5)
        shared = len(llm.codec.encode(INSTRUCTION)) // 8 * 8
        assert sum(output.num_cached_tokens >= shared for output in outputs[1:]) == count - 1
        some = rng.sample(range(count), 10)
    with LLM(device="cpu", engine={**engine, "prefix_caching": False}) as llm:
        alone = [llm.embed(texts[index], PoolingParams(dimensions=64))[0].vector for index in some]
    assert np.abs(vectors[some] - np.stack(alone)).max() <= 1e-4
