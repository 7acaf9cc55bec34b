"""An engine that was closed has given its GPU memory back, on every card, when `close` returns."""

from __future__ import annotations

import pytest
import torch

from hookline import LLM, SamplingParams
from hookline.core.errors import StepFault
from hookline.core.worker.worker import Worker
from tests.test_gpu_engine import EXTRAS, SHAPE, load

pytestmark = pytest.mark.gpu
COUNT = torch.cuda.device_count()
SIZES = [pytest.param(size, marks=pytest.mark.skipif(size > COUNT, reason=f"needs {size} GPUs")) for size in (1, 2)]
MOST_LEFT = 300 << 20
"""Of libraries and contexts, which a process keeps once it has them."""
MODEL = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
ENGINE = {"max_num_seqs": 64, "max_model_len": 2048, "memory_fraction": 0.2}


def used(tp: int) -> list[int]:
    """Bytes in use on each card, by whomever."""
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(tp))]


@pytest.mark.parametrize("tp", SIZES)
def test_a_closed_engine_has_given_its_memory_back(tp):
    torch.zeros(1, device="cuda")
    first = None
    for _ in range(3):
        llm = LLM(model=MODEL, device="cuda", dtype="float32", tp=tp, engine=ENGINE)
        llm.generate(*load(count=8))
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True, **EXTRAS[0]))
        assert all(one > 10 * MOST_LEFT for one in used(tp))
        llm.close()
        first = first or used(tp)  # libraries are loaded by now
        assert all(after - before < MOST_LEFT for before, after in zip(first, used(tp), strict=True))
    assert all(one < 10 * MOST_LEFT for one in first)
    assert torch.cuda.memory_allocated() < MOST_LEFT, "of streams that products ran on, 32 MiB each"


def test_an_error_that_is_kept_keeps_no_memory(monkeypatch):
    llm = LLM(model=MODEL, device="cuda", dtype="float32", engine={**ENGINE, "cuda_graphs": False})
    before = used(1)
    kernels = llm.engine.executor.runner.kernels
    kept = []

    def fails(qkv_TC, kv_2NSKE, *others):
        try:
            raise RuntimeError("on purpose")
        except RuntimeError as error:
            kept.append(error)
            raise

    monkeypatch.setattr(kernels, "qkv_attend", fails)
    with pytest.raises(StepFault, match="on purpose"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    llm.close()
    assert kept and used(1)[0] < before[0] - 10 * MOST_LEFT


def test_an_engine_that_did_not_start_leaves_no_memory(monkeypatch):
    torch.zeros(1, device="cuda")
    before, failed = used(1), []
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "warm_up", lambda self, *args, **options: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) as caught:
                LLM(model=MODEL, device="cuda", dtype="float32", engine=ENGINE)
            failed.append(caught.value)
    assert used(1)[0] < before[0] + MOST_LEFT
