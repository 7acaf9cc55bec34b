"""The engine with quantised weights on a GPU: the kernels' products give the tokens of the dequantised weights."""

import random

import pytest

from hookline import LLM, SamplingParams
from hookline.core.layers import every_expert
from hookline.plugins.kernels.torch_reference import TorchKernels
from tests.test_gpu_engine import SHAPE
from tests.test_gpu_experts import SHAPE as SHAPE_OF_EXPERTS

pytestmark = pytest.mark.gpu
QUANTIZATIONS = ["fp8", "fp8_block", "int8", "int4"]


def tokens(quantization, count=40, kernels="triton", dtype="float32", model="qwen3", **engine):
    """Ragged prompts, greedy and sampled; equality is exact in float32, whose rows are not rounded."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5000) for _ in range(rng.randint(1, 300))] for _ in range(40)]
    params = [
        SamplingParams(temperature=float(index % 2), max_tokens=rng.randint(1, 40), seed=index, ignore_eos=True)
        for index in range(40)
    ]
    shape = SHAPE if model == "qwen3" else SHAPE_OF_EXPERTS
    model = {"name": model, "checkpoint": "", "weights": "random", "random_shape": shape}
    sizes = {"max_num_seqs": 64, "max_model_len": 1024, "memory_fraction": 0.2, **engine}
    options = {"kernels": kernels, "quantization": quantization, "engine": sizes}
    with LLM(model=model, device="cuda", dtype=dtype, **options) as llm:
        return [output.token_ids for output in llm.generate(prompts[:count], params[:count])]


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_captured_products_give_the_tokens_of_dequantised_weights(monkeypatch, name, model):
    def linear(kernels, x_TD, weight, bias_O):
        return kernels.linear(x_TD, weight.dequantised(x_TD.dtype), bias_O)

    def expert_mlp(kernels, x_TD, expert_TA, weight_TA, *weights):
        return every_expert(x_TD, expert_TA, weight_TA, *(one.dequantised(x_TD.dtype) for one in weights))

    given = {"name": name, "group_size": 64} if name == "int4" else name  # two groups of an expert's 128 inputs
    with monkeypatch.context() as patched:  # plain torch makes each matrix plain for each product
        patched.setattr(TorchKernels, "computes", lambda self, scheme, num_rows, num_columns: True)
        patched.setattr(TorchKernels, "quantized_linear", linear)
        patched.setattr(TorchKernels, "quantized_expert_mlp", expert_mlp)
        plain = tokens(given, kernels="torch", model=model, overlap=False, cuda_graphs=False)
    assert tokens(given, model=model) == plain
    assert tokens(given, model=model, batch_invariant=True) == plain


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
