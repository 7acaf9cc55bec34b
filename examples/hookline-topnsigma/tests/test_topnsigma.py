"""The processor against Hookline's conformance suite, against numpy, and from end to end in an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hookline_topnsigma import TopNSigmaArguments
from hookline_topnsigma.processor import TopNSigma

from hookline import LLM, SamplingParams
from hookline.core.testing.processor_driver import Asked, ProcessorDriver
from hookline.core.testing.processor_suite import ProcessorSuite


class TestTopNSigma(ProcessorSuite):
    processor, config, sizes_alike = TopNSigma, TopNSigmaArguments, True
    examples = ({"n": 0.5}, {"n": 1.0}, {"n": 1.5})


def processed(logits: np.ndarray, n: float) -> np.ndarray:
    driver = ProcessorDriver(TopNSigma, TopNSigmaArguments, logits.shape[0])
    driver.admit(0, Asked({"n": n}))
    return driver.process(torch.from_numpy(logits)[None], [0])[0].numpy()


@pytest.mark.parametrize("n", [0.3, 1.0, 2.0])
def test_it_keeps_what_lies_within_n_standard_deviations(n: float) -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    kept = logits >= logits.max() - n * logits.std()
    found = processed(logits, n)
    assert 0 < kept.sum() < 1000
    assert (np.isfinite(found) == kept).all() and (found[kept] == logits[kept]).all()


def test_what_others_have_forbidden_does_not_count() -> None:
    logits = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    forbidden = np.concatenate([logits, np.full(50, -np.inf, dtype=np.float32)])
    assert (processed(forbidden, 1.0)[:100] == processed(logits, 1.0)).all()


def test_the_temperature_changes_nothing_of_what_is_kept() -> None:
    logits = np.random.default_rng(2).standard_normal(200).astype(np.float32)
    assert (np.isfinite(processed(logits, 1.0)) == np.isfinite(processed(logits / 4, 1.0))).all()


def test_in_an_engine_a_tiny_n_is_greedy_and_each_request_has_its_own() -> None:
    params = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=12, seed=3),
        "tiny": SamplingParams(temperature=2.0, max_tokens=12, seed=3, extra_args={"top_n_sigma": {"n": 1e-6}}),
        "free": SamplingParams(temperature=2.0, max_tokens=12, seed=3),
    }
    with LLM(device="cpu", engine={"cpu_cache_gib": 0.1, "max_model_len": 128}) as llm:
        outputs = llm.generate(["import os"] * 3, list(params.values()))
    greedy, tiny, free = (output.token_ids for output in outputs)
    assert tiny == greedy != free


def test_an_impossible_argument_is_refused() -> None:
    with LLM(device="cpu", engine={"cpu_cache_gib": 0.1, "max_model_len": 128}) as llm:
        (output,) = llm.generate("import os", SamplingParams(extra_args={"top_n_sigma": {"n": -1.0}}))
    assert "top_n_sigma.n=-1.0 must be a finite number of at least 0" in output.error
