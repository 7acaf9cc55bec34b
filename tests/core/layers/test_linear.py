"""Tensor-parallel layers: concatenated or summed over hand-made ranks they equal the plain layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import AttentionSpec, Runtime, WeightTarget
from hookline.core.distributed.partition import even_part, head_parts
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import ConfigError
from hookline.core.layers import (
    ColumnParallelLinear,
    GatedMLP,
    MergedColumnParallelLinear,
    ParallelHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from hookline.core.layers.linear import plain_gelu_tanh_mul
from hookline.core.layers.weights import PlainWeight
from hookline.core.testing.model_suite.thread_ranks import on_ranks
from hookline.core.testing.plain_kernels import PlainKernels

SIZES = [1, 2, 4]
TOKENS, HIDDEN = 5, 24


@dataclass(frozen=True)
class SilentRanks(LocalRanks):
    """A rank whose collectives do nothing but remember what they were given."""

    sent: list[Tensor] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sent.append(x)
        return x


def runtime(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float64) -> Runtime:
    return Runtime(torch.device("cpu"), dtype, SilentRanks(rank, size), PlainKernels(None, cast(AttentionSpec, None)))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(targets: dict[str, WeightTarget], whole: dict[str, Tensor]) -> None:
    """Load as core/weights does, from tensors in memory."""
    for name, target in targets.items():
        assert target.view is not None and target.shape == tuple(whole[name].shape)
        target.view.copy_(target.cut(whole[name]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_column_shards_concatenate_to_the_plain_layer(size: int, bias: bool) -> None:
    x, whole = random(TOKENS, HIDDEN, seed=1), {"w.weight": random(16, HIDDEN), "w.bias": random(16, seed=2)}
    shards = []
    for rank in range(size):
        layer = ColumnParallelLinear(HIDDEN, 16, runtime(rank, size), bias=bias)
        fill(layer.targets("w"), whole)
        shards.append(layer(x))
    expected = functional.linear(x, whole["w.weight"], whole["w.bias"] if bias else None)
    torch.testing.assert_close(torch.cat(shards, -1), expected)


@pytest.mark.parametrize("size", SIZES)
def test_merged_shards_hold_their_part_of_each_matrix(size: int) -> None:
    x = random(TOKENS, HIDDEN, seed=1)
    whole = {"gate.weight": random(8, HIDDEN), "up.weight": random(8, HIDDEN, seed=2)}
    gates, ups = [], []
    for rank in range(size):
        layer = MergedColumnParallelLinear(HIDDEN, [8, 8], runtime(rank, size), what="inner")
        fill(layer.targets("gate", "up"), whole)
        gate, up = layer(x).chunk(2, -1)
        gates.append(gate)
        ups.append(up)
    torch.testing.assert_close(torch.cat(gates, -1), x @ whole["gate.weight"].T)
    torch.testing.assert_close(torch.cat(ups, -1), x @ whole["up.weight"].T)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_each_rank_has_its_query_heads_and_the_kv_heads_they_read(size: int, num_kv_heads: int, bias: bool) -> None:
    num_heads, head_dim, x = 8, 4, random(TOKENS, HIDDEN, seed=1)
    rows = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    whole = {f"{name}.weight": random(count, HIDDEN, seed=ord(name)) for name, count in rows.items()}
    whole |= {f"{name}.bias": random(count, seed=count) for name, count in rows.items()}
    plain = {
        name: functional.linear(x, whole[f"{name}.weight"], whole[f"{name}.bias"] if bias else None) for name in "qkv"
    }
    heads = {name: plain[name].unflatten(-1, (-1, head_dim)) for name in "qkv"}
    for rank in range(size):
        layer = QKVParallelLinear(HIDDEN, num_heads, num_kv_heads, head_dim, runtime(rank, size), bias=bias)
        fill(layer.targets("q", "k", "v"), whole)
        q, k, v = (
            layer(x).unflatten(-1, (-1, head_dim)).split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), 1)
        )
        for local in range(layer.num_heads):
            head = rank * layer.num_heads + local
            kv_head, local_kv_head = (
                head // (num_heads // num_kv_heads),
                local // (layer.num_heads // layer.num_kv_heads),
            )
            torch.testing.assert_close(q[:, local], heads["q"][:, head])
            torch.testing.assert_close(k[:, local_kv_head], heads["k"][:, kv_head])
            torch.testing.assert_close(v[:, local_kv_head], heads["v"][:, kv_head])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_row_shards_sum_to_the_plain_layer_with_one_bias(size: int, bias: bool) -> None:
    x, whole = random(TOKENS, HIDDEN, seed=1), {"w.weight": random(16, HIDDEN), "w.bias": random(16, seed=2)}
    total = torch.zeros(TOKENS, 16, dtype=torch.float64)
    for rank, mine in enumerate(x.chunk(size, -1)):
        layer = RowParallelLinear(HIDDEN, 16, runtime(rank, size), bias=bias)
        fill(layer.targets("w"), whole)
        total += layer.local(mine)
    torch.testing.assert_close(total, functional.linear(x, whole["w.weight"], whole["w.bias"] if bias else None))


@pytest.mark.parametrize("size", SIZES)
def test_gated_shards_sum_to_the_plain_feed_forward(size: int) -> None:
    x, shapes = random(TOKENS, HIDDEN, seed=1), {"gate": (8, HIDDEN), "up": (8, HIDDEN), "down": (HIDDEN, 8)}
    whole = {f"mlp.{name}.weight": random(*shape, seed=len(name)) for name, shape in shapes.items()}
    gate, up, down = whole.values()
    expected = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    residual, weight = random(TOKENS, HIDDEN, seed=5), 1 + 0.1 * random(HIDDEN, seed=6)

    def work(ranks: LocalRanks) -> tuple[Tensor, ...]:
        place = Runtime(torch.device("cpu"), torch.float64, ranks, PlainKernels(None, cast(AttentionSpec, None)))
        layer = GatedMLP(HIDDEN, 8, place)
        fill(layer.targets("mlp", "gate", "up", "down"), whole)
        return layer(x), *layer.add_rms_norm(x, residual.clone(), weight, 1e-6), layer.local(x)

    shards = on_ranks(size, work)
    torch.testing.assert_close(torch.stack([local for *_, local in shards]).sum(0), expected)
    for product, normed, total, _ in shards:
        torch.testing.assert_close(product, expected)
        torch.testing.assert_close(total, residual + expected)
        torch.testing.assert_close(normed, functional.rms_norm(residual + expected, (HIDDEN,), weight, 1e-6))


def test_row_parallel_layer_adds_its_partial_sums_over_the_ranks() -> None:
    layer = RowParallelLinear(HIDDEN, 16, runtime(1, 2))
    layer.weight_OD.zero_()
    out = layer(random(TOKENS, HIDDEN // 2))
    assert isinstance(layer.ranks, SilentRanks)
    assert len(layer.ranks.sent) == 1 and layer.ranks.sent[0] is out


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab_size", [5, 8, 11])
def test_embedding_shards_sum_to_the_plain_embedding(size: int, vocab_size: int) -> None:
    whole, total = {"e.weight": random(vocab_size, HIDDEN)}, torch.zeros(vocab_size, HIDDEN, dtype=torch.float64)
    for rank in range(size):
        layer = VocabParallelEmbedding(vocab_size, HIDDEN, runtime(rank, size))
        fill(layer.targets("e"), whole)
        total += layer.local(torch.arange(vocab_size))
    torch.testing.assert_close(total, whole["e.weight"])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("is_tied", [False, True])
def test_head_shards_concatenate_to_the_plain_head_and_its_padding_never_wins(size: int, is_tied: bool) -> None:
    vocab_size, x, whole = 11, random(TOKENS, HIDDEN, seed=1), {"h.weight": random(11, HIDDEN)}
    shards, firsts = [], []
    for rank in range(size):
        embedding = VocabParallelEmbedding(vocab_size, HIDDEN, runtime(rank, size)) if is_tied else None
        head = ParallelHead(vocab_size, HIDDEN, runtime(rank, size), tied_to=embedding)
        fill(embedding.targets("h") if embedding else head.targets("h"), whole)
        shards.append(head(x))
        firsts.append(head.first_token)
    logits = torch.cat(shards, -1)
    assert firsts == [rank * shards[0].shape[-1] for rank in range(size)]
    assert logits.shape[-1] % size == 0
    torch.testing.assert_close(logits[:, :vocab_size], x @ whole["h.weight"].T)
    assert bool((logits[:, vocab_size:] == -torch.inf).all())


def test_tied_head_shares_the_embedding_and_says_whose_weight_it_has() -> None:
    embedding = VocabParallelEmbedding(8, HIDDEN, runtime())
    head = ParallelHead(8, HIDDEN, runtime(), tied_to=embedding)
    assert head.weight_VD is embedding.weight_VD
    assert head.targets("lm_head")["lm_head.weight"].view is None


def test_row_parallel_layers_that_really_sum_give_every_rank_the_plain_result() -> None:
    x, whole = random(TOKENS, HIDDEN, seed=1), {"w.weight": random(16, HIDDEN)}

    def work(ranks: LocalRanks) -> Tensor:
        place = Runtime(torch.device("cpu"), torch.float64, ranks, PlainKernels(None, cast(AttentionSpec, None)))
        layer = RowParallelLinear(HIDDEN, 16, place)
        fill(layer.targets("w"), whole)
        return layer(x.chunk(2, -1)[ranks.rank])

    first, second = on_ranks(2, work)
    torch.testing.assert_close(first, x @ whole["w.weight"].T)
    assert torch.equal(first, second)


def test_an_indivisible_size_is_refused_with_the_tp_values_that_work() -> None:
    with pytest.raises(ConfigError) as error:
        even_part(8, LocalRanks(0, 3), "inner")
    assert str(error.value) == "tp=3 does not divide inner 8. Valid tp values: 1, 2, 4, 8"


def test_indivisible_heads_are_refused_with_the_tp_values_that_work() -> None:
    with pytest.raises(ConfigError) as error:
        head_parts(12, 2, LocalRanks(0, 3))
    assert str(error.value) == ("tp=3 cannot split 12 attention heads and 2 kv heads. Valid tp values: 1, 2, 4, 6, 12")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_rank_finds_its_rows_of_queries_keys_and_values_in_one_tensor(size: int, bias: bool) -> None:
    heads, kv_heads, head_dim = 4, 2, 6  # four ranks hold each kv head twice
    rows = (heads + 2 * kv_heads) * head_dim
    stored = {"qkv.weight": random(rows, HIDDEN), "qkv.bias": random(rows, seed=1)}
    apart = {
        f"{name}.{kind}": part
        for kind in ("weight", "bias")
        for name, part in zip(
            "qkv", stored[f"qkv.{kind}"].split([heads * head_dim, *[kv_heads * head_dim] * 2]), strict=True
        )
    }
    for rank in range(size):
        joined = QKVParallelLinear(HIDDEN, heads, kv_heads, head_dim, runtime(rank, size), bias=bias)
        separate = QKVParallelLinear(HIDDEN, heads, kv_heads, head_dim, runtime(rank, size), bias=bias)
        fill(separate.targets("q", "k", "v"), apart)
        for name, target in joined.joined_targets("qkv").items():
            assert target.shape == tuple(stored[name].shape)
            target.fill(stored[name])
        assert torch.equal(joined.weight_OD, separate.weight_OD)
        assert not bias or torch.equal(joined.bias_O, separate.bias_O)


@pytest.mark.parametrize("size", [1, 2])
def test_a_gated_mlp_finds_gate_and_up_in_one_tensor(size: int) -> None:
    gate_up, down, x = random(2 * 16, HIDDEN), random(HIDDEN, 16, seed=1), random(TOKENS, HIDDEN, seed=2)
    sums = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for rank in range(size):
        mlp = GatedMLP(HIDDEN, 16, runtime(rank, size))
        for name, target in mlp.joined_targets("mlp", "gate_up_proj", "down_proj").items():
            target.fill({"mlp.gate_up_proj.weight": gate_up, "mlp.down_proj.weight": down}[name])
        sums += mlp.local(x)
    gate, up = (x @ gate_up.T).chunk(2, -1)
    torch.testing.assert_close(sums, (functional.silu(gate) * up) @ down.T)


def test_a_gated_mlp_with_gelu_equals_its_definition_with_and_without_an_operation_of_the_kernels() -> None:
    x_TD, plain = random(TOKENS, HIDDEN), PlainKernels(None, cast(AttentionSpec, None))
    mlp = GatedMLP(HIDDEN, 16, runtime(), activation="gelu_tanh", bias=True)
    for target in mlp.targets("mlp", "gate", "up", "down").values():
        target.fill(random(*target.shape, seed=1))
    gate, up = (x_TD @ mlp.gate_up.weight_OD.T + mlp.gate_up.bias_O).chunk(2, -1)
    expected = (functional.gelu(gate, approximate="tanh") * up) @ mlp.down.weight_OD.T + mlp.down.bias_O
    torch.testing.assert_close(mlp(x_TD), expected)
    torch.testing.assert_close(plain_gelu_tanh_mul(x_TD), plain.gelu_tanh_mul(x_TD))


class HalvingWeight(PlainWeight):
    """A weight whose product is its own."""

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        return super().linear(x_TD, bias_O) / 2


@pytest.mark.parametrize("weight", [PlainWeight, HalvingWeight])
def test_only_a_plain_weights_product_is_fused_with_its_gelu(weight: type[PlainWeight]) -> None:
    made = SimpleNamespace(matrix=lambda runtime, rows, columns: weight(random(rows, columns, seed=rows), runtime))
    mlp = GatedMLP(HIDDEN, 16, replace(runtime(), weights=made), activation="gelu_tanh")
    x_TD, half = random(TOKENS, HIDDEN), 0.5 if weight is HalvingWeight else 1.0
    gate, up = (x_TD @ random(32, HIDDEN, seed=32).T * half).chunk(2, -1)
    expected = (functional.gelu(gate, approximate="tanh") * up) @ random(HIDDEN, 16, seed=HIDDEN).T * half
    torch.testing.assert_close(mlp(x_TD), expected)
