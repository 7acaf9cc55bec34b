"""model=transformers on a GPU, in float32: captured decodes give the tokens of eager ones, and those of a CPU."""

import pytest

from hookline import LLM
from tests.test_parity import greedy, random_prompts
from tests.transformers_cases import CASES, make_checkpoint

pytestmark = pytest.mark.gpu
NUM_TOKENS = 48
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 64, which the triton kernels know."""
NAMES = [name for name in ("llama", "phi3", "gpt2", "olmo2", "rwkv") if name in CASES]


def tokens_of(folder, **options):
    prompts = random_prompts(97, (1, 7, 40, 33, 90))
    with LLM(str(folder), model="transformers", dtype="float32", **options) as llm:
        return [output.token_ids for output in llm.generate(prompts, greedy(NUM_TOKENS))], llm.captured


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, CASES[request.param], **SIZES)
    return folder


@pytest.fixture(scope="module")
def on_cpu(checkpoint):
    return tokens_of(checkpoint, device="cpu")[0]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_eager_steps_give_the_tokens_of_a_cpu(checkpoint, on_cpu, kernels):
    engine = {"max_num_seqs": 8, "memory_fraction": 0.2, "cuda_graphs": False}
    assert tokens_of(checkpoint, device="cuda", kernels=kernels, engine=engine)[0] == on_cpu


def test_captured_steps_give_the_tokens_of_a_cpu(checkpoint, on_cpu):
    engine = {"max_num_seqs": 8, "memory_fraction": 0.2, "max_num_batched_tokens": 64, "max_model_len": 256}
    tokens, captured = tokens_of(checkpoint, device="cuda", kernels="triton", engine=engine)
    assert captured["decodes"] and tokens == on_cpu
