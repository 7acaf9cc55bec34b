"""A model with experts through the engine on a GPU: grouped products in graphs give the tokens of plain torch."""

import random

import pytest

from hookline import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "eos_token_id": 3,
}


def tokens(kernels, **engine):
    """Ragged prompts, greedy and sampled, in float32 so that equality is exact."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5000) for _ in range(rng.randint(1, 300))] for _ in range(40)]
    params = [
        SamplingParams(temperature=float(index % 2), max_tokens=rng.randint(1, 40), seed=index, ignore_eos=True)
        for index in range(40)
    ]
    model = {"name": "qwen3_moe", "weights": "random", "random_shape": SHAPE}
    sizes = {"max_num_seqs": 64, "max_model_len": 1024, "memory_fraction": 0.2, **engine}
    with LLM(model=model, device="cuda", dtype="float32", kernels=kernels, engine=sizes) as llm:
        return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain():
    return tokens("torch", overlap=False, cuda_graphs=False)


@pytest.mark.parametrize("engine", [dict(), dict(cuda_graphs=False), dict(max_num_seqs=37)], ids=str)
def test_grouped_products_graphs_and_overlap_give_the_tokens_of_plain_torch(plain, engine):
    assert tokens("triton", **engine) == plain
