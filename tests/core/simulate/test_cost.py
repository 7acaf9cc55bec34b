"""Cost models: curves, shapes of steps, the files, and fitting to steps whose cost is known."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hookline.core.bench.driver import drive
from hookline.core.bench.recorder import Recording
from hookline.core.bench.step_counts import StepCounts
from hookline.core.bench.workload import WorkloadConfig, draw_load
from hookline.core.errors import ConfigError
from hookline.core.simulate.cost import (
    CAPTURED,
    DECODE,
    MIXED,
    PREFILL,
    CostModel,
    Curve,
    HostCost,
    StepShape,
    StepShapes,
    cost_of,
    read_cost,
    write_cost,
)
from hookline.core.simulate.executor import run_on
from hookline.core.simulate.fit import Measured, fit_cost, read_measured
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler

COST = CostModel(
    decode=Curve([1, 64], [0.001, 0.002]),
    prompt=Curve([1, 256], [0.002, 0.010]),
    prefill_pair_s=1e-6,
    context_token_s=2e-6,
    shared_token_s=1e-7,
    gap_s=5e-6,
    host=HostCost(1e-4, 1e-6, 2e-5, 1e-7, {DECODE: 2e-4, PREFILL: 3e-4}),
)


def test_a_curve_is_straight_between_points_and_goes_on_behind_the_last():
    curve = Curve([10, 20, 40], [1.0, 2.0, 3.0])
    assert [curve.at(tokens) for tokens in (5, 10, 15, 20, 30, 60)] == [1.0, 1.0, 1.5, 2.0, 2.5, 4.0]
    assert Curve([8], [0.5]).at(100) == 0.5


@pytest.mark.parametrize(
    ("tokens", "seconds"), [([1, 2], [1.0]), ([2, 1], [1.0, 1.0]), ([], []), ([1], [-1.0]), ([1], [float("nan")])]
)
def test_points_that_are_no_curve_are_refused(tokens, seconds):
    with pytest.raises(ConfigError, match="is no curve: give as many seconds as tokens"):
        Curve(tokens, seconds)


def test_shared_context_costs_its_own_coefficient():
    counts = StepCounts(decode_rows=2, decode_context_tokens=100, decode_shared_tokens=60)
    shape = StepShapes().shape(counts)
    assert COST.device_s(counts, shape) == pytest.approx(COST.decode.at(2) + 40 * 2e-6 + 60 * 1e-7)


def test_captured_steps_are_padded_and_others_are_not():
    shapes = StepShapes.of(100, 1024, 4096, captures=True)
    steps = [
        StepCounts(decode_rows=5),
        StepCounts(prefill_tokens=33, prefill_chunks=16),
        StepCounts(prefill_tokens=33, prefill_chunks=17),
        StepCounts(prefill_tokens=513, prefill_chunks=1),
        StepCounts(prefill_tokens=33, prefill_chunks=1, decode_rows=2),
    ]
    found = [shapes.shape(counts) for counts in steps]
    assert [(shape.kind, shape.num_tokens) for shape in found] == [
        (DECODE, 8), (CAPTURED, 64), (PREFILL, 33), (PREFILL, 513), (MIXED, 35),
    ]  # fmt: skip
    assert [shape.is_captured for shape in found] == [True, True, False, False, False]
    assert [StepShapes().shape(counts).num_tokens for counts in steps] == [5, 33, 33, 513, 35]
    decodes = StepShapes.of(100, 1024, 4096, captures=True, captures_prompts=False)
    assert [decodes.shape(counts).num_tokens for counts in steps] == [8, 33, 33, 513, 35]


def test_mixed_steps_of_a_small_budget_are_captured():
    shapes = StepShapes.of(100, 384, 4096, captures=True)
    steps = [StepCounts(prefill_tokens=tokens, prefill_chunks=2, decode_rows=rows) for rows, tokens in
             [(98, 284), (30, 20), (90, 200), (3, 20)]]  # fmt: skip
    found = [shapes.shape(counts) for counts in steps]
    assert found == [StepShape(CAPTURED, size, is_captured=True) for size in (384, 128, 384, 32)]
    many = StepCounts(prefill_tokens=100, prefill_chunks=32, decode_rows=16)
    assert shapes.shape(many) == StepShape(MIXED, 116)


def test_a_model_comes_back_from_its_file(tmp_path):
    model = replace(COST, origin={"device": "a machine", "num_blocks": 7})
    write_cost(model, tmp_path / "cost.json")
    assert read_cost(tmp_path / "cost.json") == model
    (tmp_path / "marked.json").write_text((tmp_path / "cost.json").read_text(), encoding="utf-8-sig")
    assert read_cost(tmp_path / "marked.json") == model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"tokens": [1], "seconds": [1]}}, "prompt needs tokens and seconds"),
        ({"speed": 3}, "unexpected keyword argument 'speed'"),
        ({"gap_s": -1}, "cost.gap_s=-1 must be a finite number of seconds, at least 0"),
        ({"host": {"step_s": "fast"}}, "cost.host.step_s='fast' must be a finite number"),
        (
            {"host": {"launch_s": {"decoding": 1}}},
            "cost.host.launch_s.decoding names no kind of step; there are decode",
        ),
        ({"format": 9}, "format=9 is not 1; fit the model again"),
        ({"gap_s": 10**400}, "cost.gap_s=<whole number of about 400 digits> must be a finite number"),
        ({"host": {"launch_s": 1}}, "cost.host.launch_s=1 is not a mapping"),
    ],
)
def test_coefficients_that_are_wrong_are_named(values, message):
    curves = {"decode": {"tokens": [1], "seconds": [1]}, "prompt": {"tokens": [1], "seconds": [1]}}
    given = values if "decode" in values else {**curves, **values}
    with pytest.raises(ConfigError, match=r"x\.json") as raised:
        cost_of(given, "x.json")
    assert message in str(raised.value)


def test_a_file_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json cannot be read: No such file"):
        read_cost(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"list.json holds no JSON object"):
        read_cost(tmp_path / "list.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"deep.json cannot be read: it is nested too deeply"):
        read_cost(tmp_path / "deep.json")


# --- fits


def measured(cost=COST, scheduler=None, **options) -> Measured:
    """A benchmark on a machine that takes exactly what a model says."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_blocks": 4000, "max_model_len": 512}
    engine = fake_engine(scheduler or PlainScheduler(), **{**limits, **options})
    run_on(engine, cost)
    engine.time_steps()
    workload = WorkloadConfig(num_prompts=120, prompt_len=(1, 300), output_len=(1, 100), request_rate=100.0)
    recording = drive(engine, draw_load(workload, 50))
    config = {"model": {"name": "m"}, "engine": {**limits, "cuda_graphs": False}}
    result = {"device": "cpu", "kernels": "k", "block_size": 4, "overlap": False, "config": config}
    return Measured(result, recording)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "told", "captures"),
    [
        ("cpu, 2 threads", {}, (False, True)),
        ("H200", {}, (True, True)),
        ("H200", {"captured": {"decodes": True, "prompts": False}}, (True, False)),
        ("H200", {"captured": {"decodes": False, "prompts": False}}, (False, False)),
    ],
)
def test_a_fit_knows_which_steps_were_captured(device, told, captures):
    one = measured()
    config = {**one.result["config"], "engine": {**one.result["config"]["engine"], "cuda_graphs": True}}
    cost = fit_cost([Measured({**one.result, **told, "device": device, "config": config}, one.recording)])
    assert (cost.captures, cost.captures_prompts) == captures


@pytest.mark.slow
def test_a_fit_finds_what_the_steps_cost():
    cost = fit_cost([measured(), measured(overlap=True)])
    for rows, context in ((1, 50), (20, 3000), (60, 12000)):
        counts = StepCounts(decode_rows=rows, decode_context_tokens=context)
        shape = StepShapes().shape(counts)
        assert cost.device_s(counts, shape) == pytest.approx(COST.device_s(counts, shape), rel=0.02)
    for tokens in (20, 200, 500):
        counts = StepCounts(prefill_tokens=tokens, prefill_chunks=1, prefill_pairs=tokens * tokens // 2)
        shape = StepShapes().shape(counts)
        assert cost.device_s(counts, shape) == pytest.approx(COST.device_s(counts, shape), rel=0.05)
    assert cost.context_token_s == pytest.approx(2e-6, rel=0.05)
    assert cost.gap_s == pytest.approx(5e-6, rel=0.01)
    assert cost.host.launch_s[DECODE] + cost.host.step_s == pytest.approx(3e-4, rel=0.2)
    assert cost.origin["residuals"][DECODE]["mean_error_percent"] < 1


def test_a_hiccup_does_not_change_a_fit():
    plain = measured()
    device_s = plain.recording.steps["device_s"].copy()
    device_s[np.flatnonzero(plain.recording.steps["decode_rows"])[5]] = 3.0
    steps = {**plain.recording.steps, "device_s": device_s}
    with_hiccup = Measured(plain.result, replace(plain.recording, steps=steps))
    counts = StepCounts(decode_rows=20, decode_context_tokens=3000)
    shape = StepShapes().shape(counts)
    assert fit_cost([with_hiccup]).device_s(counts, shape) == pytest.approx(COST.device_s(counts, shape), rel=0.1)


def test_no_coefficient_is_ever_negative():
    rng = np.random.default_rng(0)
    one = measured()
    noisy = one.recording.steps["device_s"] * rng.uniform(0.2, 3.0, len(one.recording.steps["device_s"]))
    cost = fit_cost([Measured(one.result, replace(one.recording, steps={**one.recording.steps, "device_s": noisy}))])
    for curve in (cost.decode, cost.prompt):
        assert (np.diff(curve.seconds) >= 0).all() and min(curve.seconds) >= 0
    assert min(cost.prefill_pair_s, cost.context_token_s, cost.shared_token_s) >= 0


def test_benchmarks_of_different_machines_do_not_fit_together():
    one = measured()
    with pytest.raises(ConfigError, match="a fit takes benchmarks of one device; these have 'cpu' and 'gpu'"):
        fit_cost([one, Measured({**one.result, "device": "gpu"}, one.recording)])


@pytest.mark.slow
def test_a_fit_without_decodes_is_refused():
    one = measured()
    chosen = one.recording.steps["decode_rows"] == 0
    steps = {name: column[chosen] for name, column in one.recording.steps.items()}
    recording: Recording = replace(one.recording, steps=steps)
    with pytest.raises(ConfigError, match="a fit needs steps that decode and steps that prefill"):
        fit_cost([Measured(one.result, recording)])


def test_folders_without_measured_steps_are_refused(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps({"status": "done", "simulated": {"cost": "x"}}) + "\n")
    with pytest.raises(ConfigError, match=r"holds no finished benchmark with results.jsonl and steps.npz; make one"):
        read_measured(tmp_path)
