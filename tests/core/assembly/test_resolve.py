"""What is decided of a model whose layers keep states: sizes of blocks, and which steps are captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.core.assembly.resolve import ResolvedConfig, attention_spec
from hookline.core.config.settings import EngineConfig
from hookline.core.contracts import FullAttention, Kernels, ModelSpec, Needs, NoCache, RecurrentState, StateTensor
from hookline.core.distributed.ranks import ALONE
from hookline.core.kv_cache.groups import CacheGroups

STATE = RecurrentState((("sum", StateTensor((4,))),))


def block_size(*layers: Any, **engine: Any) -> int:
    config = SimpleNamespace(engine=EngineConfig(max_model_len=1000, **engine))
    spec = ModelSpec(len(layers), 2, 2, 8, 16, 50, max_position=4096, layers=layers)
    kernels = SimpleNamespace(needs=Needs(preferred_block_size=64, block_size_multiple=16))
    facts, cpu = SimpleNamespace(dtype="float32"), torch.device("cpu")
    return attention_spec(config, spec, ALONE, facts, cpu, kernels).block_size  # type: ignore[arg-type]


def test_a_block_stands_for_a_whole_request_where_no_layer_keeps_tokens() -> None:
    assert block_size(STATE, NoCache()) == 1008, "max_model_len, as a multiple of what the kernels take"
    assert block_size(STATE, NoCache(), block_size=32) == 32
    assert block_size(STATE, FullAttention()) == 64


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
    resolved = SimpleNamespace(
        uses_graphs=True,
        config=SimpleNamespace(pp=1),
        kernels=SimpleNamespace(needs=needs, load=lambda: kernels),
        groups=CacheGroups.of(ModelSpec(1, 2, 2, 8, 16, 50, max_position=64, layers=(layer,)), 64),
    )
    assert ResolvedConfig.captures_prompts.fget(resolved) is captures  # type: ignore[attr-defined]
