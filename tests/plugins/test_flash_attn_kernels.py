"""kernels=flash_attn against the same float64 reference and cases as the Triton kernels; needs a GPU and flash-attn."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flash_attn")

from hookline.plugins.kernels.flash_attn_backend import FlashAttnKernels
from hookline.plugins.kernels.triton_backend import TritonKernels
from tests.plugins.test_triton_kernels import RELATIVE_ERROR, Case, make_case, relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]


def attend(case: Case, backend: type[TritonKernels] = FlashAttnKernels) -> torch.Tensor:
    kernels = backend(None, case.spec)
    kernels.prepare(case.batch)
    return kernels.attend(case.q, case.kv, case.batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (8, 128)])
def test_mixed_batch_equals_reference(dtype, block_size, group, head_dim):
    query_lens, context_lens = [1, 1, 1, 300, 77, 64, 1, 500], [300, 1, 2000, 300, 4096, 65, 900, 8192]
    case = make_case(query_lens, context_lens, dtype, block_size, group, head_dim, num_kv_heads=2)
    assert relative_error(attend(case), case.expected) < RELATIVE_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [40, 700, 2]])
def test_decode_and_prefill_equal_triton(dtype, query_lens):
    case = make_case(query_lens, [100, 1000, 2000], dtype, 256, 2, 128, num_kv_heads=4)
    assert relative_error(attend(case), case.expected) < RELATIVE_ERROR[dtype]
    assert relative_error(attend(case), attend(case, TritonKernels)) < RELATIVE_ERROR[dtype]


def test_captured_decode_follows_the_lengths_on_the_device():
    case = make_case([1] * 4, [600, 1, 3, 2000], torch.bfloat16, 256, 2, 128, 8)
    lengths, case.batch.context_lens_host = case.batch.context_lens_B.clone(), None
    kernels = FlashAttnKernels(None, case.spec)
    kernels.attend(case.q, case.kv, case.batch)
    case.batch.context_lens_B.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.prepare(case.batch)
        out = kernels.attend(case.q, case.kv, case.batch)
    case.batch.context_lens_B.copy_(lengths)
    graph.replay()
    assert relative_error(out, case.expected) < RELATIVE_ERROR[torch.bfloat16]
