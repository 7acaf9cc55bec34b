"""What a model states of its sizes and weights is checked before it is used, and named if it is wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hookline.core.assembly.model_contract import stated_spec, stated_targets
from hookline.core.contracts import (
    FullAttention,
    ModelSpec,
    NoCache,
    RecurrentState,
    SharedCache,
    SlidingWindow,
    StateTensor,
    WeightTarget,
)
from hookline.core.errors import PluginError
from hookline.core.plugin.registry import Entry, Origin

ENTRY = Entry("model", "theirs", "nowhere:Theirs", Origin("theirs", "nowhere", "their-dist", "1"))
SPEC = ModelSpec(5, 4, 2, 8, 32, 50, 64)
LAYERS = (
    FullAttention(),
    SlidingWindow(4),
    SharedCache(0),
    RecurrentState((("sum", StateTensor((4,))),)),
    NoCache(),
)


def refusal_of_spec(spec: Any) -> str:
    with pytest.raises(PluginError) as caught:
        stated_spec(ENTRY, SimpleNamespace(spec=lambda hf_config: spec), {})
    return str(caught.value)


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, layers=LAYERS, attention=frozenset({"window", "scale", "softcap", "sinks"}))]
)
def test_a_spec_that_keeps_its_contract_is_handed_on(spec: ModelSpec) -> None:
    assert stated_spec(ENTRY, SimpleNamespace(spec=lambda hf_config: spec), {}) is spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_layers": 1}, "it returned dict {'num_layers': 1}, not a ModelSpec"),
        (None, "it returned NoneType None, not a ModelSpec"),
        (replace(SPEC, num_heads="1"), "its num_heads='1' is not a whole number of at least 1"),  # type: ignore[arg-type]
        (replace(SPEC, max_position=64.0), "its max_position=64.0 is not a whole number of at least 1"),  # type: ignore[arg-type]
        (replace(SPEC, num_kv_heads=0), "its num_kv_heads=0 is not a whole number of at least 1"),
        (replace(SPEC, num_kv_heads=3), "its num_kv_heads=3 does not divide num_heads=4"),
        (replace(SPEC, value_dim=9), "its value_dim=9 is not None or a whole number from 1 to head_dim=8"),
        (replace(SPEC, value_dim="8"), "its value_dim='8' is not None or a whole number"),  # type: ignore[arg-type]
        (replace(SPEC, attention="sinks"), "its attention='sinks' is not a frozenset of names"),  # type: ignore[arg-type]
        (
            replace(SPEC, attention=frozenset({"sink"})),
            "its attention has 'sink'. Did you mean 'sinks'? There is: window, scale, softcap, sinks",
        ),
        (
            replace(SPEC, attention={"alibi"}),  # type: ignore[arg-type]
            "its attention has 'alibi'. There is: window, scale, softcap, sinks",
        ),
        (replace(SPEC, layers=5), "its layers=5 is not a tuple of what each layer keeps"),  # type: ignore[arg-type]
        (replace(SPEC, layers=(FullAttention,) * 5), "not a FullAttention, SlidingWindow, SharedCache, Rec"),  # type: ignore[arg-type]
        (replace(SPEC, layers=(SlidingWindow("4"),)), "its layers[0].num_tokens='4' is not a whole number"),  # type: ignore[arg-type]
        (replace(SPEC, layers=(NoCache(), SharedCache(0.5))), "its layers[1].layer=0.5 is not the index of a layer"),  # type: ignore[arg-type]
        (replace(SPEC, layers=(RecurrentState(("sum",)),)), "is not a tuple of pairs of a name and a StateTensor"),  # type: ignore[arg-type]
        (replace(SPEC, layers=(NoCache(),)), "the model's spec.layers has 1 entries for num_layers=5"),
    ],
)
def test_a_spec_that_breaks_its_contract_is_named(spec: Any, message: str) -> None:
    found = refusal_of_spec(spec)
    assert found.startswith("model 'theirs' of plugin 'theirs' (their-dist 1) breaks its contract in spec: ")
    assert message in found and "\n" not in found


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"embed": torch.zeros(3, 4)}, "'embed' has shape (3, 4) of float32, not a WeightTarget"),
        ([("embed", None)], "it returned list [('embed', None)], not a mapping of names to WeightTargets"),
        ({3: WeightTarget.ignored()}, "the name 3 is not a str"),
        ({"embed": WeightTarget("w")}, "'embed' has a WeightTarget whose view is str 'w', not a Tensor"),  # type: ignore[arg-type]
    ],
)
def test_weight_targets_that_break_their_contract_are_named(targets: Any, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        stated_targets(ENTRY, SimpleNamespace(weight_targets=lambda: targets))  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"model 'theirs' of plugin 'theirs' (their-dist 1) breaks its contract in weight_targets: {message}"
    )


@pytest.mark.parametrize(
    ("method", "stated"),
    [
        ("spec", classmethod(lambda cls, hf_config: {})),
        ("weight_targets", lambda self: {"embed": torch.zeros(1)}),
        ("targets_for", lambda self, shapes: {name: torch.zeros(shape) for name, shape in shapes.items()}),
    ],
)
def test_an_engine_is_not_started_with_what_a_model_states_wrongly(
    monkeypatch: pytest.MonkeyPatch, method: str, stated: Any
) -> None:
    from hookline import LLM
    from hookline.plugins.models.qwen3 import Qwen3

    monkeypatch.setattr(Qwen3, method, stated, raising=False)
    with pytest.raises(
        PluginError, match=rf"^model 'qwen3' of plugin 'models' \(.*\) breaks its contract in {method}: "
    ):
        LLM(device="cpu", engine={"num_blocks": 8})
