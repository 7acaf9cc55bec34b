"""A class that lacks a part of its contract is refused when it is loaded, with the part that is missing."""

from __future__ import annotations

from typing import Any

import pytest

from hookline.core.contracts import Needs
from hookline.core.plugin.check_contract import contract_fault
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.testing.plain_model import PlainModel
from hookline.core.testing.plain_sampler import PlainSampler
from hookline.core.testing.plain_scheduler import PlainScheduler


class Scheduler(PlainScheduler):
    def __init__(self, config: Any) -> None: ...


class TakesTwoViews(Scheduler):
    def plan(self, view: Any, other: Any) -> Any: ...  # type: ignore[override]


class PlansNothing:
    def __init__(self, config: Any) -> None: ...


class HasNoUseForAConfig(PlainScheduler):
    def __init__(self) -> None: ...


class PlansByAnAttribute(Scheduler):
    plan = 3  # type: ignore[assignment]


class SamplesWhole(PlainSampler):
    sample_shard = None  # type: ignore[assignment]


class WantsTheSpecOfAnInstance(PlainModel):
    def spec(self, hf_config: Any) -> Any: ...  # type: ignore[override]


class HandsOn:
    def __init__(self, config: Any, spec: Any) -> None:
        self.inner = PlainKernels(config, spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PlansStatically(Scheduler):
    @staticmethod
    def plan(view: Any) -> Any: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("kind", "target", "needs"),
    [
        ("model", PlainModel, Needs()),
        ("kernels", PlainKernels, Needs()),
        ("sampler", PlainSampler, Needs(vocabulary_shards=True)),
        ("scheduler", Scheduler, Needs()),
        ("kernels", HandsOn, Needs()),
        ("scheduler", PlansStatically, Needs()),
        ("sampler", SamplesWhole, Needs()),
        ("a kind without a contract", 3, Needs()),
    ],
)
def test_what_keeps_its_contract_passes(kind: str, target: Any, needs: Needs) -> None:
    assert contract_fault(kind, target, needs) is None


@pytest.mark.parametrize(
    ("kind", "target", "needs", "fault"),
    [
        ("scheduler", PlansNothing, Needs(), "it has no method plan(view)"),
        ("scheduler", PlansByAnAttribute, Needs(), "it has no method plan(view)"),
        ("scheduler", TakesTwoViews, Needs(), "its plan cannot be called with (view): missing a required argument"),
        ("scheduler", HasNoUseForAConfig, Needs(), "its constructor cannot be called with (config): too many"),
        (
            "sampler",
            SamplesWhole,
            Needs(vocabulary_shards=True),
            "no method sample_shard(logits_NV, params, ",
        ),
        ("model", WantsTheSpecOfAnInstance, Needs(), "its spec cannot be called with (hf_config)"),
        ("kernels", PlainScheduler, Needs(), "its constructor cannot be called with (config, spec)"),
        ("kernels", lambda config, spec: None, Needs(), "it is a function, not a class"),
    ],
)
def test_what_is_missing_is_named_with_the_contract(kind: str, target: Any, needs: Needs, fault: str) -> None:
    found = contract_fault(kind, target, needs)
    assert found is not None and fault in found
    assert f"hookline.core.contracts.{kind.capitalize()} says what is needed" in found
