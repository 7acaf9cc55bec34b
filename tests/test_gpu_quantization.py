"""The engine with quantised weights on a GPU: the kernels' products give the tokens of the dequantised weights."""

import random

import pytest

from hookline import LLM, SamplingParams
from hookline.plugins.kernels.torch_reference import TorchKernels
from tests.test_gpu_engine import SHAPE

pytestmark = pytest.mark.gpu
QUANTIZATIONS = ["fp8", "fp8_block", "int8", "int4"]


def tokens(quantization, count=40, kernels="triton", dtype="float32", **engine):
    """Ragged prompts, greedy and sampled; equality is exact in float32, whose rows are not rounded."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5000) for _ in range(rng.randint(1, 300))] for _ in range(40)]
    params = [
        SamplingParams(temperature=float(index % 2), max_tokens=rng.randint(1, 40), seed=index, ignore_eos=True)
        for index in range(40)
    ]
    model = {"name": "qwen3", "checkpoint": "", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_num_seqs": 64, "max_model_len": 1024, "memory_fraction": 0.2, **engine}
    options = {"kernels": kernels, "quantization": quantization, "engine": sizes}
    with LLM(model=model, device="cuda", dtype=dtype, **options) as llm:
        return [output.token_ids for output in llm.generate(prompts[:count], params[:count])]


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_captured_products_give_the_tokens_of_dequantised_weights(monkeypatch, name):
    with monkeypatch.context() as patched:  # plain torch makes each matrix plain for each product
        patched.setattr(TorchKernels, "computes", lambda self, scheme, num_rows, num_columns: True)
        patched.setattr(
            TorchKernels,
            "quantized_linear",
            lambda self, x_TD, weight, bias_O: self.linear(x_TD, weight.dequantised(x_TD.dtype), bias_O),
        )
        plain = tokens(name, kernels="torch", overlap=False, cuda_graphs=False)
    assert tokens(name) == plain
    assert tokens(name, batch_invariant=True) == plain


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_batch_invariant_rows_have_the_same_tokens_in_a_crowd(name):
    crowd = tokens(name, dtype="bfloat16", batch_invariant=True)
    assert tokens(name, 1, dtype="bfloat16", batch_invariant=True) == crowd[:1]


def test_captured_steps_with_a_cache_in_8_bits_give_the_eager_tokens():
    cache = {"kv_dtype": "fp8_e4m3"}
    for options in ({}, {"num_blocks": 40}):  # which preempts
        captured = tokens("auto", batch_invariant=True, **cache, **options)
        assert captured == tokens("auto", batch_invariant=True, cuda_graphs=False, overlap=False, **cache, **options)
    plain = tokens("auto", kernels="torch", overlap=False, cuda_graphs=False, **cache)
    for found in (tokens("auto", **cache), captured):
        # Keys that kernels compute in other orders may round to neighbours in e4m3, which changes few tokens.
        num_equal = sum(one == other for one, other in zip(found, plain, strict=True))
        assert num_equal >= 30, f"{num_equal} of {len(plain)}"
