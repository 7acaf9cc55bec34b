"""The processor against Hookline's conformance suite, against its detector, and from end to end in an engine."""

from __future__ import annotations

import pytest
import torch
from hookline_watermark import WatermarkArguments, detect, is_green
from hookline_watermark.processor import Watermark

from hookline import LLM, SamplingParams
from hookline.core.testing.processor_driver import Asked, ProcessorDriver
from hookline.core.testing.processor_suite import ProcessorSuite


class TestWatermark(ProcessorSuite):
    processor, config, sizes_alike = Watermark, WatermarkArguments, True
    examples = ({"delta": 2.0}, {"delta": 1.0, "gamma": 0.25}, {"delta": 3.0, "key": 7})


@pytest.mark.parametrize(("gamma", "key"), [(0.5, 15485863), (0.25, 4294967295), (1.0, 1)])
def test_it_adds_to_what_the_detector_calls_green(gamma: float, key: int) -> None:
    driver = ProcessorDriver(Watermark, WatermarkArguments, 64)
    driver.admit(2, Asked({"delta": 1.5, "gamma": gamma, "key": key}, tokens=[5, 9, 41]))
    found = driver.process(torch.zeros(1, 64), [2])[0]
    assert found.tolist() == [1.5 * is_green(token_id, 41, gamma, key) for token_id in range(64)]


def test_it_is_found_by_its_key_alone_and_others_keep_their_tokens() -> None:
    def params(**given: float) -> SamplingParams:
        extra = {"watermark": given} if given else {}
        return SamplingParams(seed=1, temperature=1.0, max_tokens=120, ignore_eos=True, extra_args=extra)

    with LLM(device="cpu", engine={"cpu_cache_gib": 0.1, "max_model_len": 256}) as llm:
        (alone,) = llm.generate("def f(x):", params())
        plain, marked = llm.generate(["def f(x):"] * 2, [params(), params(delta=4.0)])
    assert plain.token_ids == alone.token_ids
    assert detect(marked.token_ids).z > 4 > detect(plain.token_ids).z
    assert detect(marked.token_ids, key=99).z < 4


def test_one_token_is_no_text() -> None:
    with pytest.raises(ValueError, match="less than two tokens"):
        detect([3])
