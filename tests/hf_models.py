"""Small random Hugging Face checkpoints for tests, and a way to drive one of our models without an engine.

Knows Qwen3, dense and with experts, and nothing of requests; whoever needs text through the engine takes the folder
from here.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import AttentionSpec, Batch, Model, ModelSpec, Runtime
from hookline.core.distributed.partition import head_parts
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.testing.batches import Row, make_batch
from hookline.core.worker.runner.attention import PagedAttention
from hookline.plugins.kernels.torch_reference import TorchKernels

BUNDLED = Path(__file__).parents[1] / "plugins/models/qwen3_tiny"
BLOCK_SIZE = 8
ALONE = LocalRanks()
QWEN3 = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "eos_token_id": 3,
}
QWEN3_MOE = {
    **{key: value for key, value in QWEN3.items() if key != "intermediate_size"},
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
}


def make_qwen3(folder: Path, *, seed: int = 0, max_shard_size: str = "20KB", **options: Any) -> Any:
    """Save a random float32 Qwen3 checkpoint, in several files, and return transformers' model of it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(Qwen3Config, Qwen3ForCausalLM, {**QWEN3, **options}, folder, seed, max_shard_size)


def make_worded(folder: Path, **options: Any) -> Any:
    """The same with the tokenizer of the bundled checkpoint, whose products take thirty times as many operations."""
    model = make_qwen3(folder, **{"vocab_size": 4096, "tie_word_embeddings": True, "eos_token_id": 4093, **options})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    return model


def make_qwen3_moe(folder: Path, *, seed: int = 0, max_shard_size: str = "20KB", **options: Any) -> Any:
    """The same for Qwen3-MoE; transformers saves one tensor for each expert's matrix."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return _save(Qwen3MoeConfig, Qwen3MoeForCausalLM, {**QWEN3_MOE, **options}, folder, seed, max_shard_size)


def _save(
    config_class: Any, model_class: Any, options: dict[str, Any], folder: Path, seed: int, max_shard_size: str
) -> Any:
    torch.manual_seed(seed)
    config = config_class(**options, initializer_range=0.2, attn_implementation="eager")
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # Norms of one and biases of zero would hide a forgotten weight.
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def attention_spec(spec: ModelSpec, ranks: LocalRanks, **options: Any) -> AttentionSpec:
    """The spec of one rank's kernels."""
    heads, kv_heads = head_parts(spec.num_heads, spec.num_kv_heads, ranks)
    sizes: dict[str, Any] = dict(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256)
    place = dict(device=torch.device("cpu"), dtype=torch.float32)
    return AttentionSpec(heads.size, kv_heads.size, spec.head_dim, **{**sizes, **place, **options})


def build(model_class: Any, config: dict[str, Any], ranks: LocalRanks = ALONE) -> tuple[Model, TorchKernels, Tensor]:
    """A model of one rank with uninitialised weights, its kernels, and a zeroed cache [2, layers, N, S, K, E]."""
    spec = model_class.spec(config)
    attention = attention_spec(spec, ranks)
    kernels = TorchKernels(None, attention)
    model = model_class(config, Runtime(attention.device, attention.dtype, ranks, kernels))
    kv_heads = attention.num_kv_heads
    cache = torch.zeros(2, spec.num_layers, 33, BLOCK_SIZE, kv_heads, spec.head_dim)
    return model, kernels, cache


def one_prompt(token_ids: list[int], num_cached: int = 0) -> Batch:
    """A batch of one sequence whose first `num_cached` tokens are in the cache already; blocks from 1 on."""
    length = len(token_ids)
    row = Row(length, length - num_cached, tuple(range(1, 2 + (length - 1) // BLOCK_SIZE)))
    place = AttentionSpec(1, 1, 4, BLOCK_SIZE, 1, 1, 1, torch.device("cpu"), torch.float32)
    return make_batch(
        [row], place, num_decodes=int(row.num_queries == 1), token_ids_T=torch.tensor(token_ids[num_cached:])
    )


@torch.inference_mode()
def run(model: Model, kernels: TorchKernels, cache: Tensor, batch: Batch, rows: Sequence[int] | None = None) -> Tensor:
    """This rank's logits of every token of the batch, or of those that forward returns when it is asked for some."""
    kernels.prepare(batch)
    rows_N = None if rows is None else torch.tensor(rows)
    attend = PagedAttention(kernels, cache.unbind(1), batch, rows_N)
    return model.logits(model.forward(batch.token_ids_T, batch.positions_T, attend))
