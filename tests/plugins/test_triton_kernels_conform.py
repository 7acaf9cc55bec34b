"""The Triton kernels against the conformance suite: under the interpreter on a CPU, and for real on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hookline.core.contracts import ATTENTION_FEATURES, AttentionSpec
from hookline.core.testing.kernels_suite import KernelsSuite
from tests.interpreted_rounding import round_to_e4m3_as_cards_do

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # under the interpreter
ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_e4m3_as_cards_do(monkeypatch)


class TestTritonKernels(KernelsSuite):
    graph_prefill = sizes_alike = True
    attention = ATTENTION_FEATURES
    kv_dtypes = (torch.float8_e4m3fn,)
    device = "cuda" if ON_GPU else "cpu"
    dtypes = (torch.bfloat16,) if ON_GPU else (torch.float32,)
    block_sizes = (16,)
    head_dims = (64, 128) if ON_GPU else (32,)
    groups = (1, 2, 4, 8) if ON_GPU else (4,)
    kv_heads = (2, 1, 5) if ON_GPU else (2, 1, 3)
    max_num_seqs, max_num_batched_tokens, max_model_len = (64, 1021, 1024) if ON_GPU else (36, 71, 416)

    def make(self, spec: AttentionSpec):
        from hookline.plugins.kernels.triton_backend import TritonKernels

        return TritonKernels(None, spec)


needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the class above is what the interpreter has time for")


@needs_gpu
class TestTritonKernelsInFloat32(TestTritonKernels):
    dtypes = (torch.float32,)
    head_dims = (128,)
    groups = (2, 8)


@needs_gpu
class TestTritonKernelsWithLargeBlocks(TestTritonKernels):
    block_sizes = (256,)
    head_dims = (128,)
    groups = (4,)


@needs_gpu
class TestTritonKernelsWithHeadsOf512(TestTritonKernels):
    head_dims = (512,)
    groups = (4,)
    kv_heads = (2,)


@pytest.mark.skipif(not ON_GPU, reason="takes minutes under the interpreter; see test_triton_invariant.py")
class TestTritonKernelsInBatchInvariantMode(KernelsSuite):
    graph_prefill = sizes_alike = batch_invariant = True
    attention = tuple(name for name in ATTENTION_FEATURES if name != "latent")
    kv_dtypes = (torch.float8_e4m3fn,)
    device = "cuda"
    head_dims = (64, 128)

    def make(self, spec: AttentionSpec):
        from hookline.plugins.kernels.triton_backend import TritonKernels

        return TritonKernels(None, replace(spec, batch_invariant=True))
