"""The conformance suites themselves: each passes a correct plugin, and fails every broken one with a telling message.

A further kind adds a file of faults (faulty class -> the test that fails, a colon and part of what it says) and a case
below.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from hookline.core.contracts import (
    AttentionSpec,
    FullAttention,
    ModelSpec,
    NoCache,
    RecurrentState,
    Sampler,
    StateTensor,
    StoredForm,
)
from hookline.core.errors import RequestFault
from hookline.core.testing.checks import check_nothing_kept
from hookline.core.testing.drafter_suite import DrafterSuite
from hookline.core.testing.executor_suite import ExecutorSuite
from hookline.core.testing.extension_suite import ExtensionSuite
from hookline.core.testing.grammar_suite import GrammarSuite
from hookline.core.testing.kernels_suite import KernelsSuite
from hookline.core.testing.kernels_suite.invariance import InvarianceCases
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.testing.parser_suite import ParserSuite
from hookline.core.testing.plain_grammar import PlainGrammars
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.testing.plain_model import PLAIN_CONFIG, PlainModel
from hookline.core.testing.plain_pooler import PlainPooler
from hookline.core.testing.plain_sampler import PlainSampler
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.pooler_suite import PoolerSuite
from hookline.core.testing.processor_suite import ProcessorSuite
from hookline.core.testing.quantization_suite import QuantizationSuite
from hookline.core.testing.running import failure, failures
from hookline.core.testing.sampler_suite import SamplerSuite
from hookline.core.testing.sampler_suite.counts import chi_square_p_value, most_repeats, num_repeats
from hookline.core.testing.scheduler_suite import SchedulerSuite
from tests.core import (
    faulty_attention,
    faulty_drafters,
    faulty_executors,
    faulty_extensions,
    faulty_grammars,
    faulty_invariance,
    faulty_kernels,
    faulty_models,
    faulty_parsers,
    faulty_poolers,
    faulty_processors,
    faulty_quantizations,
    faulty_recurrence,
    faulty_samplers,
    faulty_schedulers,
    faulty_sizes,
)
from tests.core.faulty_extensions import PlainExtension, PlainExtensionArguments
from tests.core.faulty_parsers import PlainParser
from tests.core.faulty_processors import PlainProcessor, PlainProcessorArguments
from tests.probing_extension import Probe, ProbeArguments, ProbeConfig

PLAIN = [
    PlainKernels,
    faulty_attention.PlainForms,
    faulty_recurrence.PlainRecurrence,
    faulty_kernels.DenseKernels,
    faulty_invariance.InvariantKernels,
    PlainSampler,
    faulty_samplers.SumsProbabilities,
    PlainModel,
    PlainScheduler,
    PlainProcessor,
    faulty_processors.CountsTokens,
    PlainExtension,
    faulty_extensions.SaysThatItWaits,
    faulty_extensions.KeepsStatesUntilTheyEnd,
    PlainGrammars,
    PlainParser,
    PlainPooler,
    faulty_drafters.PlainDrafter,
    faulty_drafters.DraftsAtPlaces,
    faulty_executors.PlainExecutor,
    faulty_quantizations.PlainQuantization,
]
FAULTS = [
    *faulty_kernels.FAULTS.items(),
    *faulty_attention.FAULTS.items(),
    *faulty_invariance.FAULTS.items(),
    *faulty_recurrence.FAULTS.items(),
    *faulty_sizes.FAULTS.items(),
    *faulty_samplers.FAULTS.items(),
    *faulty_models.FAULTS.items(),
    *faulty_processors.FAULTS.items(),
    *faulty_extensions.FAULTS.items(),
    *faulty_parsers.FAULTS.items(),
    *faulty_schedulers.FAULTS.items(),
    *faulty_grammars.FAULTS.items(),
    *faulty_drafters.FAULTS.items(),
    *faulty_executors.FAULTS.items(),
    *faulty_poolers.FAULTS.items(),
    *faulty_quantizations.FAULTS.items(),
]


class SmallKernelsSuite(KernelsSuite):
    plugin: Any
    dtypes = (torch.bfloat16,)
    block_sizes = (16,)
    head_dims = (32,)
    groups = (2,)
    max_num_seqs, max_num_batched_tokens, max_model_len = 36, 71, 416  # DenseKernels take them all times one another

    def make(self, spec: AttentionSpec) -> Any:
        return self.plugin(None, spec)


class SmallInvarianceSuite(InvarianceCases):
    plugin: Any
    batch_invariant = True
    dtypes = (torch.bfloat16,)
    block_sizes = (16,)
    head_dims = (32,)
    groups = (2,)

    def make(self, spec: AttentionSpec) -> Any:
        return self.plugin(None, spec)


class SmallSamplerSuite(SamplerSuite):
    plugin: Any
    sizes_alike = True

    def make(self) -> Any:
        return self.plugin()


class SmallQuantizationSuite(QuantizationSuite):
    plugin: Any

    def make(self, form: StoredForm) -> Any:
        return self.plugin(None, form)

    def write(self, values_OD: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return faulty_quantizations.write(values_OD)


class AnySchedulerSuite(SchedulerSuite):
    plugin: Any

    def make(self) -> Any:
        return self.plugin()


class ChoicesSuite(GrammarSuite):
    plugin: Any
    kinds = ("choice",)

    def make(self, vocabulary: Any) -> Any:
        return self.plugin(None, vocabulary)


class PlainExecutorSuite(ExecutorSuite):
    plugin: Any
    patience_s = 5.0

    def make(self, wanted: Any) -> Any:
        return self.plugin(None, wanted)


class SmallPoolerSuite(PoolerSuite):
    plugin: Any

    def make(self, spec: Any) -> Any:
        return self.plugin(None, spec)


class SmallDrafterSuite(DrafterSuite):
    plugin: Any
    copies = True
    layers = (0,)

    def make(self, spec: Any) -> Any:
        return self.plugin(None, spec)


class SmallModelSuite(ModelSuite):
    plugin: Any
    sizes_alike = True

    def hf_config(self) -> dict[str, Any]:
        return dict(PLAIN_CONFIG)


def suite_for(plugin: type) -> type:
    """The suite of the plugin's kind, bound to it."""
    if issubclass(plugin, PlainModel):
        return type("Suite", (SmallModelSuite,), {"model_class": plugin})
    if issubclass(plugin, PlainProcessor):
        parts = {"processor": plugin, "config": PlainProcessorArguments, "examples": ({"amount": 2.0}, {"token": 5})}
        parts["sizes_alike"] = True
        return type("Suite", (ProcessorSuite,), parts)
    if issubclass(plugin, PlainExtension):
        parts = {"extension": plugin, "arguments": PlainExtensionArguments, "sizes_alike": True}
        parts["examples"] = ({"amount": 2.0, "bonus": 5}, {"amount": -1.0, "bonus": 7}, {"amount": 0.5})
        return type("Suite", (ExtensionSuite,), parts)
    if issubclass(plugin, PlainParser):
        return type("Suite", (ParserSuite,), {"parser": plugin, "examples": faulty_parsers.EXAMPLES})
    if issubclass(plugin, faulty_drafters.PlainDrafter):
        return type("Suite", (SmallDrafterSuite,), {"plugin": plugin})
    if issubclass(plugin, faulty_executors.PlainExecutor):
        return type("Suite", (PlainExecutorSuite,), {"plugin": plugin})
    if issubclass(plugin, PlainPooler):
        return type("Suite", (SmallPoolerSuite,), {"plugin": plugin})
    if issubclass(plugin, PlainGrammars):
        return type("Suite", (ChoicesSuite,), {"plugin": plugin})
    if issubclass(plugin, PlainScheduler):
        return type("Suite", (AnySchedulerSuite,), {"plugin": plugin})
    if issubclass(plugin, faulty_quantizations.PlainQuantization):
        return type("Suite", (SmallQuantizationSuite,), {"plugin": plugin})
    if issubclass(plugin, PlainSampler):
        return type("Suite", (SmallSamplerSuite,), {"plugin": plugin})
    if issubclass(plugin, faulty_invariance.InvariantKernels):
        return type("Suite", (SmallInvarianceSuite,), {"plugin": plugin})
    declared = {name: getattr(plugin, name, False) for name in ("graph_safe", "graph_prefill", "sizes_alike")}
    declared["attention"] = getattr(plugin, "attention", ())
    return type("Suite", (SmallKernelsSuite,), {"plugin": plugin, **declared})


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLAIN)
def test_a_correct_plugin_passes_its_suite(plugin: type) -> None:
    assert failures(suite_for(plugin)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("plugin", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_faulty_plugin_fails_its_suite_with_a_telling_message(plugin: type, message: str) -> None:
    """Only the test that is to find the fault runs: in all of them, the others take fifteen times as long."""
    name, _, told = message.partition(": ")
    assert name.startswith("test_"), f"{message!r} does not begin with the test of the suite that finds the fault"
    assert told, f"{message!r} does not have a colon and words of the test's message"
    found = failure(suite_for(plugin), name)
    assert found and told.strip() in found, found or "nothing fails"


def test_kernels_are_tested_at_the_limits_that_their_author_names() -> None:
    suite: Any = suite_for(faulty_sizes.DropsValuesOfLongestContexts)()
    suite.test_attend_at_the_limits_of_the_spec()
    suite.max_model_len = KernelsSuite.max_model_len
    with pytest.raises(AssertionError, match="as many decodes as there may be"):
        suite.test_attend_at_the_limits_of_the_spec()


class ForgettingProbe(Probe):
    """The extension of the tests of engines, without the states that it keeps there for the tests to see."""

    @staticmethod
    def forget(state: Any) -> None: ...


class TestProbe(ExtensionSuite):
    extension, arguments, config, reads_values_on_cpu = ForgettingProbe, ProbeArguments, ProbeConfig(), True
    examples = ({"strength": 2.0}, {"strength": -0.5, "forbidden": 3}, {"forbidden": 7, "stops_after": 2})


class CoarseProducts(PlainKernels):
    def linear(self, x_TD: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().linear(x_TD, *rest) * 1.1


class CoarseAttention(CoarseProducts):
    def attend_row(self, *given: Any) -> torch.Tensor:
        return super().attend_row(*given) * 1.1


@pytest.mark.parametrize(("plugin", "is_caught"), [(CoarseProducts, False), (CoarseAttention, True)])
def test_a_wider_tolerance_of_products_is_theirs_alone(plugin: type, is_caught: bool) -> None:
    suite: Any = suite_for(plugin)()
    with pytest.raises(AssertionError, match=r"linear of \(1, 64\) without bias"):
        suite.test_linear()
    suite.operation_tolerances = {"linear": {torch.bfloat16: 0.2}}
    suite.test_linear()
    suite.test_tolerances_are_of_operations()
    with pytest.raises(AssertionError, match=r"attend, decodes .* allowed 0\.02") if is_caught else nullcontext():
        suite.test_attend_decodes()


def test_a_tolerance_of_no_operation_is_named() -> None:
    suite: Any = suite_for(PlainKernels)()
    suite.operation_tolerances = {"liner": {torch.bfloat16: 0.2}}
    with pytest.raises(AssertionError, match="operation_tolerances has 'liner', which is no operation of Kernels"):
        suite.test_tolerances_are_of_operations()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "crowd"), faulty_schedulers.STARVERS.items())
def test_a_policy_that_lets_somebody_wait_for_ever_fails_unless_it_says_so(policy: type, crowd: str) -> None:
    suite: Any = suite_for(policy)()
    with pytest.raises(AssertionError, match=f"starves: not done after 500 steps while {crowd} arrive"):
        suite.test_nobody_starves_while_others_keep_arriving()


def test_a_policy_of_strict_priorities_passes_its_suite_if_it_says_so() -> None:
    suite: Any = suite_for(faulty_schedulers.StrictPriorities)()
    suite.may_starve_while = {"more urgent requests"}
    suite.test_nobody_starves_while_others_keep_arriving()


@pytest.mark.parametrize(
    "kind",
    [
        faulty_kernels,
        faulty_attention,
        faulty_invariance,
        faulty_recurrence,
        faulty_sizes,
        faulty_samplers,
        faulty_models,
        faulty_schedulers,
        faulty_processors,
        faulty_extensions,
        faulty_quantizations,
        faulty_parsers,
        faulty_grammars,
        faulty_drafters,
        faulty_executors,
        faulty_poolers,
    ],
)
def test_at_least_five_faults_of_each_kind_are_planted(kind: Any) -> None:
    assert len(kind.FAULTS) >= 5


@pytest.mark.parametrize(
    "suite",
    [
        KernelsSuite,
        SamplerSuite,
        ModelSuite,
        SchedulerSuite,
        ProcessorSuite,
        ExtensionSuite,
        ParserSuite,
        GrammarSuite,
        PoolerSuite,
        DrafterSuite,
        ExecutorSuite,
        QuantizationSuite,
    ],
)
def test_suite_that_names_no_plugin_fails(suite: type) -> None:
    assert failures(suite)


@pytest.mark.parametrize(
    "keeps", [NoCache(), RecurrentState((("state", StateTensor((2,))),)), FullAttention()], ids=str
)
def test_a_model_must_refuse_what_is_about_heads_only_if_a_layer_has_attention(keeps: Any) -> None:
    class Model(PlainModel):
        @classmethod
        def spec(cls, hf_config: Mapping[str, Any]) -> ModelSpec:
            spec = PlainModel.spec(hf_config)
            return replace(spec, layers=(keeps,) * spec.num_layers)

    keys = {key for change in suite_for(Model)().refused_configs() for key in change}
    of_attention = {"rope_scaling", "rope_parameters", "num_attention_heads", "num_key_value_heads"}
    assert keys & of_attention == (of_attention if keeps == FullAttention() else set())
    assert {"model_type", "quantization_config", "num_hidden_layers", "hidden_size", "vocab_size"} <= keys


class HalfOfTheTokens(SmallSamplerSuite):
    """A sampler that leaves out the less likely half; of equal ones, those of higher ids."""

    class plugin(Sampler):
        def __init__(self) -> None: ...

        def sample(self, logits_NV: torch.Tensor, params: Any) -> torch.Tensor:
            return PlainSampler().sample(likelier_half(logits_NV.float()), params)

    def distribution(self, logits_V: torch.Tensor, temperature: float) -> torch.Tensor:
        return super().distribution(likelier_half(logits_V), temperature)


def likelier_half(logits_NV: torch.Tensor) -> torch.Tensor:
    rank_NV = logits_NV.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return logits_NV.masked_fill(rank_NV >= logits_NV.shape[-1] // 2, -torch.inf)


@pytest.mark.slow
def test_a_sampler_of_fewer_tokens_passes_if_it_names_its_distribution() -> None:
    assert failures(HalfOfTheTokens) == []


def test_suites_are_not_collected_themselves() -> None:
    assert not [suite for suite in (KernelsSuite, SamplerSuite, ModelSuite) if suite.__name__.startswith("Test")]


@pytest.mark.parametrize("asked", [{}, {"reads_values_on_cpu": True}], ids=str)
def test_an_extension_may_read_values_on_a_cpu_if_its_suite_says_so(asked: dict[str, bool]) -> None:
    suite: Any = type("Suite", (suite_for(faulty_extensions.WaitsForTokens),), asked)()
    with nullcontext() if asked else pytest.raises(RequestFault, match="after_draw waits for the device"):
        suite.test_never_waits_for_the_host_unless_it_says_so()


def test_products_of_many_rows_may_differ_by_the_tolerance() -> None:
    suite: Any = type("Suite", (suite_for(faulty_extensions.RoundsByTheNumberOfRows),), {})()
    with pytest.raises(AssertionError, match="other hidden states alone than in a crowd"):
        suite.test_a_row_depends_on_itself_alone()
    suite.tolerance = 1e-4
    suite.test_a_row_depends_on_itself_alone()


def test_what_no_graph_captures_may_be_replaced() -> None:
    suite: Any = type("Suite", (suite_for(faulty_extensions.ReplacesWhatAGraphReads),), {"graph_safe": False})()
    suite.test_what_a_captured_graph_reads_stays_where_it_is()


def test_a_heap_that_was_frozen_stays_so_where_it_is_searched_for_what_is_kept() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    kept: list[torch.Tensor] = []
    with pytest.raises(AssertionError, match="keeps what it made for a new size: 1 tensors"), check_nothing_kept("it"):
        kept.append(torch.zeros(1))
    assert gc.get_freeze_count() > before / 2


def test_chi_square_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    counts, shares = torch.tensor([18, 25, 30, 27]), torch.full((4,), 0.25)
    assert chi_square_p_value(counts, shares) == pytest.approx(stats.chisquare(counts.tolist()).pvalue)


def test_chi_square_of_an_impossible_value_is_zero() -> None:
    assert chi_square_p_value(torch.tensor([99, 1]), torch.tensor([1.0, 0.0])) == 0.0


def test_repeats_beyond_the_likely_ones_are_found() -> None:
    even = torch.full((32_000,), 1 / 32_000)
    draws = torch.randint(32_000, (512,), generator=torch.Generator().manual_seed(0))
    assert num_repeats(torch.tensor([3, 0, 1, 2])) == 3 + 1
    assert num_repeats(torch.bincount(draws)) <= most_repeats(even, 512) < num_repeats(torch.bincount(draws // 16))


def test_repeats_have_the_mean_and_the_variance_of_pairs() -> None:
    assert most_repeats(torch.tensor([0.5, 0.5]), 2, num_deviations=0) == 0.5
    assert most_repeats(torch.tensor([0.5, 0.5]), 2, num_deviations=1) == 0.5 + 0.5


def test_chi_square_pools_rare_values() -> None:
    shares = torch.tensor([0.998, 0.001, 0.001])
    assert chi_square_p_value(torch.tensor([998, 2, 0]), shares) == 1.0
