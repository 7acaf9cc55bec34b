"""Step extensions on a GPU: captured steps give what eager ones give, and requests without any run the same graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hookline import LLM, SamplingParams
from tests.hf_models import make_qwen3
from tests.test_pooling_parity import random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROMPTS = random_prompts()[:5]
STRENGTHS = [None, 0.8, None, -0.6, 1.5]
ENGINE = dict(num_blocks=64, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3")
    make_qwen3(folder, num_hidden_layers=4, head_dim=64)
    return str(folder)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOOKLINE_PLUGINS", "tests.probing_extension")
    yield


def params(strength: float | None, **further: Any) -> SamplingParams:
    extra = {} if strength is None else {"probe": {"strength": strength}}
    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, extra_args=extra, **further)


def generated(folder: str, asked: list[SamplingParams], **engine: Any) -> Any:
    model = {"name": "qwen3", "checkpoint": folder}
    with LLM(model=model, device="cuda", dtype="float32", kernels="triton", engine={**ENGINE, **engine}) as llm:
        outputs = llm.generate(PROMPTS, asked)
        decodes = llm.engine.executor.graphs
        captured = None if decodes is None else len(decodes._watched_layers)
    tokens = [one.token_ids for one in outputs]
    told = [[(each["token"], each["best"]) for each in (one.extensions or {}).get("probe", [])] for one in outputs]
    return tokens, told, captured


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_steps_give_what_eager_ones_give(overlap: bool, folder: str) -> None:
    asked = [params(strength) for strength in STRENGTHS]
    tokens, told, captured = generated(folder, asked, overlap=overlap)
    eager_tokens, eager_told, _ = generated(folder, asked, overlap=overlap, cuda_graphs=False)
    assert (tokens, told) == (eager_tokens, eager_told) and captured
    assert [len(one) for one in told] == [0, 12, 0, 12, 12]


def test_with_masks_and_scores_too(folder: str) -> None:
    asked = [params(strength, logprobs=2, min_tokens=3) for strength in STRENGTHS]
    tokens, told, _ = generated(folder, asked)
    eager_tokens, eager_told, _ = generated(folder, asked, cuda_graphs=False)
    assert (tokens, told) == (eager_tokens, eager_told)


def test_requests_without_one_capture_nothing_more(folder: str) -> None:
    _, told, captured = generated(folder, [params(None)] * len(PROMPTS))
    assert captured == 0 and not any(told)
