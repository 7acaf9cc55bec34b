"""What is decided of a model whose layers keep states: sizes of blocks, and which steps are captured."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.core.assembly.resolve import ResolvedConfig, attention_spec, resolve
from hookline.core.config.settings import EngineConfig, validate
from hookline.core.contracts import (
    FullAttention,
    Kernels,
    ModelConfig,
    ModelSpec,
    Needs,
    NoCache,
    RecurrentState,
    StateTensor,
)
from hookline.core.distributed.ranks import ALONE, LocalRanks
from hookline.core.errors import CheckpointError
from hookline.core.kv_cache.groups import CacheGroups
from tests.core.plugin_fakes import OPTIONS, full_plugin, host_with, plugin_module, registering

STATE = RecurrentState((("sum", StateTensor((4,))),))


def block_size(*layers: Any, **engine: Any) -> int:
    config = SimpleNamespace(engine=EngineConfig(max_model_len=1000, **engine))
    spec = ModelSpec(len(layers), 2, 2, 8, 16, 50, max_position=4096, layers=layers)
    kernels = SimpleNamespace(needs=Needs(preferred_block_size=64, block_size_multiple=16))
    facts, cpu = SimpleNamespace(dtype="float32", kv_dtype=None), torch.device("cpu")
    return attention_spec(config, spec, ALONE, facts, cpu, kernels).block_size  # type: ignore[arg-type]


def test_a_block_stands_for_a_whole_request_where_no_layer_keeps_tokens() -> None:
    whole = block_size(STATE, NoCache(), prefix_caching=False)
    assert whole == 1008, "max_model_len, as a multiple of what the kernels take"
    assert block_size(STATE, NoCache()) == 64, "states are copied at ends of blocks"
    assert block_size(STATE, NoCache(), block_size=32) == 32
    assert block_size(STATE, FullAttention()) == 64


@pytest.mark.parametrize(
    ("max_model_len", "rank", "told"),
    [
        (8192, 0, ["engine.max_model_len=8192 counts as 2048: the checkpoint has no more positions"]),
        (8192, 1, []),
        (2048, 0, []),
        (EngineConfig.max_model_len, 0, []),
    ],
)
def test_a_length_beyond_the_checkpoints_positions_is_told_once_if_it_was_set(
    max_model_len: int, rank: int, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(engine=EngineConfig(max_model_len=max_model_len))
    spec = ModelSpec(1, 2, 2, 8, 16, 50, max_position=2048)
    facts, kernels = SimpleNamespace(dtype="float32", kv_dtype=None), SimpleNamespace(needs=Needs())
    ranks, cpu = LocalRanks.numbered(rank, 2, 1), torch.device("cpu")
    with caplog.at_level(logging.WARNING, "hookline"):
        sizes = attention_spec(config, spec, ranks, facts, cpu, kernels)  # type: ignore[arg-type]
    assert sizes.max_model_len == 2048 and caplog.messages == told


def test_a_model_without_a_checkpoint_of_its_own_asks_for_one() -> None:
    target = "hookline.core.testing.plain_model:PlainModel"
    plain = plugin_module(register_models=registering("model", "plain", target=target, config=ModelConfig))
    host = host_with(full_plugin(), plain)
    config = validate({**OPTIONS, "model": "plain", "device": "cpu"}, host)
    with pytest.raises(CheckpointError, match=r"^model=plain needs model.checkpoint=...: a folder, or a hub id"):
        resolve(config, host)


class PlainStates(Kernels):
    """Leaves the operations of layers with states to plain torch."""


class OwnStates(PlainStates):
    def short_convolution(self, *given: Any) -> Any: ...

    def gated_delta_rule(self, *given: Any) -> Any: ...


@pytest.mark.parametrize(
    ("kernels", "layer", "captures"),
    [(PlainStates, FullAttention(), True), (PlainStates, STATE, False), (OwnStates, STATE, True)],
)
def test_steps_with_prompts_of_a_model_with_states_are_captured_if_no_operation_asks_the_host(
    kernels: type[Kernels], layer: Any, captures: bool
) -> None:
    needs = Needs(graph_safe=True, graph_prefill=True)
    spec = ModelSpec(1, 2, 2, 8, 16, 50, max_position=64, layers=(layer,))
    resolved = SimpleNamespace(
        uses_graphs=True,
        taps=(),
        config=SimpleNamespace(pp=1),
        kernels=SimpleNamespace(needs=needs, load=lambda: kernels),
        spec=spec,
        groups=CacheGroups.of(spec, 64),
    )
    assert ResolvedConfig.captures_prompts.fget(resolved) is captures  # type: ignore[attr-defined]
    resolved.taps = (0,)  # whose hidden states graphs of prompts do not keep
    assert ResolvedConfig.captures_prompts.fget(resolved) is False  # type: ignore[attr-defined]
