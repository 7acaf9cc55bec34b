"""A class that lacks a part of its contract is refused when it is loaded, with the part that is missing."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from hookline.core.contracts import Exchange, LogitsProcessor, Needs, Observer, Sampler
from hookline.core.distributed.peer_ranks import make_exchange
from hookline.core.errors import PluginError
from hookline.core.plugin.check_contract import contract_fault
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.testing.plain_model import PlainModel
from hookline.core.testing.plain_pooler import PlainPooler
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


class AttendsPlainly(PlainKernels):
    def attend(self, q_THE: Any, kv_2NSKE: Any, batch: Any) -> Any: ...  # type: ignore[override]


class PlansLater(Scheduler):
    async def plan(self, view: Any) -> Any: ...


class PoolsWithoutATask(PlainPooler):
    task = "embedd"


class Shifts(LogitsProcessor):
    def __init__(self, spec: Any) -> None: ...

    def process(self, logits_NV: Any, rows: Any) -> Any: ...


class FollowsNothing(Shifts):
    follows_tokens = True


class FollowsWithoutALoad(FollowsNothing):
    @staticmethod
    def encode(arguments: Any, request: Any) -> Any: ...

    @staticmethod
    def on_token(state: Any, token_id: int, logprob: float | None) -> Any: ...


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
        ("kernels", AttendsPlainly, Needs(attention=("window",))),
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
        ("kernels", AttendsPlainly, Needs(attention=("window", "sinks")), "its attend cannot be called with (q_THE, "),
        ("scheduler", PlansLater, Needs(), "its plan is an async def, and core calls it as a plain function"),
        ("pooler", PoolsWithoutATask, Needs(), "its task is 'embedd' and must be one of embed, classify, score"),
        ("kernels", lambda config, spec: None, Needs(), "it is a function, not a class"),
    ],
)
def test_what_is_missing_is_named_with_the_contract(kind: str, target: Any, needs: Needs, fault: str) -> None:
    found = contract_fault(kind, target, needs)
    assert found is not None and fault in found
    assert f"hookline.core.contracts.{kind.capitalize()} says what is needed" in found


class HasOneOfAlmostTheSameName(PlainKernels):
    def expert_mlp(self, *given: Any) -> Any: ...
    def expert_mlps(self, *given: Any) -> Any: ...


class OverridesUnderAWrongName(PlainKernels):
    def expert_mpl(self, *given: Any) -> Any: ...


class CountsRowsOnce(PlainKernels):
    own_row_count = (1, 2)


class Processes(LogitsProcessor):
    def process(self, logits_NV: Any, rows: Any) -> Any: ...


class ChangesOneDraw(Processes):
    @staticmethod
    def num_draw(arguments: Any, request: Any) -> int:
        return 1


class ReadsAToken(Processes):
    reads_token = True


class HasHelpers(Processes):
    num_rows = 3
    tables: Any = ()

    def load_words(self) -> Any: ...
    def counts(self) -> Any: ...


class CountsDrawsOfAnObject(Processes):
    def num_draws(self, arguments: Any, request: Any) -> Any: ...  # type: ignore[override]


class Scores(PlainSampler):
    def scores(self, *given: Any) -> Any: ...


class PlansTwice(Scheduler):
    def plann(self, view: Any) -> Any: ...


class OpensElsewhere(PlainModel):
    @classmethod
    def open_checkpiont(cls, config: Any) -> Any: ...


class ForgetsToSample(Sampler):
    pass


class SamplesByItself:
    def __init__(self, config: Any) -> None: ...
    def sample(self, logits_NV: Any, params: Any) -> Any: ...


class Watches(Observer):
    def on_step_ended(self, stats: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "target", "name", "meant"),
    [
        ("kernels", OverridesUnderAWrongName, "expert_mpl", "expert_mlp"),
        ("kernels", CountsRowsOnce, "own_row_count", "own_row_counts"),
        ("processor", ChangesOneDraw, "num_draw", "num_draws"),
        ("processor", ReadsAToken, "reads_token", "reads_tokens"),
        ("sampler", Scores, "scores", "score"),
        ("scheduler", PlansTwice, "plann", "plan"),
        ("model", OpensElsewhere, "open_checkpiont", "open_checkpoint"),
        ("observer", Watches, "on_step_ended", "on_step_end"),
    ],
)
def test_a_name_that_is_almost_one_of_the_contracts_is_refused(kind: str, target: Any, name: str, meant: str) -> None:
    found = contract_fault(kind, target, Needs())
    assert found is not None and found.startswith(f"its {name} is not in the contract. Did you mean '{meant}'? ")


def test_an_exchange_is_held_to_its_contract_when_the_kernels_make_it() -> None:
    class KeepsOwnRow(Exchange):
        def keeps_own_row(self, residual_TD: Any) -> bool: ...

    kernels = PlainKernels(None, cast(Any, None))
    kernels.exchange = lambda peers: KeepsOwnRow()  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"exchange of PlainKernels .* its keeps_own_row is not in the contract"):
        make_exchange(kernels, cast(Any, None))


@pytest.mark.parametrize("target", [FollowsNothing, FollowsWithoutALoad])
def test_a_processor_that_follows_tokens_must_have_what_makes_and_reads_its_state(target: Any) -> None:
    found = contract_fault("processor", target, Needs())
    assert found is not None and found.startswith("its follows_tokens needs on_token, encode and load; hookline.core.")


@pytest.mark.parametrize(
    ("kind", "target"),
    [("kernels", HasOneOfAlmostTheSameName), ("processor", HasHelpers), ("processor", Processes)],
)
def test_helpers_of_other_names_pass(kind: str, target: Any) -> None:
    assert contract_fault(kind, target, Needs()) is None


@pytest.mark.parametrize(
    ("kind", "target", "fault"),
    [
        ("sampler", ForgetsToSample, "it has no method sample(logits_NV, params)"),
        ("sampler", SamplesByItself, "it does not extend hookline.core.contracts.Sampler, which has score"),
        ("processor", CountsDrawsOfAnObject, "its num_draws cannot be called with (arguments, request)"),
    ],
)
def test_what_only_looks_inherited_is_missing(kind: str, target: Any, fault: str) -> None:
    found = contract_fault(kind, target, Needs())
    assert found is not None and found.startswith(fault)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before Python 3.14 annotations have a value at once")
def test_annotations_may_name_what_only_a_type_checker_imports() -> None:
    code = """
class Policy(PlainScheduler):
    def __init__(self, config: OnlyForTypeCheckers) -> None: ...
    def plan(self, view: OnlyForTypeCheckers) -> OnlyForTypeCheckers: ...
"""
    names: dict[str, Any] = {"PlainScheduler": PlainScheduler, "__name__": __name__}
    exec(compile(code, "policy.py", "exec", dont_inherit=True), names)
    assert contract_fault("scheduler", names["Policy"], Needs()) is None
