"""What each step extension takes of an engine's time: on the host, on the device, and nothing while none is used."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest

from hookline import LLM, SamplingParams
from hookline.core.bench.command import main as bench
from hookline.core.bench.metrics import cost_lines, extension_costs
from hookline.core.contracts import API_VERSION as CURRENT
from hookline.core.contracts import ExtensionCost, Needs, StepExtension, hookimpl

API_VERSION = CURRENT
SLOW_S = 0.02
"""So long that another process which takes the CPU meanwhile does not matter."""
SIZES = {"cpu_cache_gib": 0.05, "max_model_len": 128, "max_num_seqs": 4}


@dataclass
class SlowArguments:
    host: float = 0.0
    device: float = 0.0


class Slow(StepExtension):
    """Takes as long as it is asked to, on either side."""

    result_width = 1

    def __init__(self, spec):
        pass

    def before_draw(self, logits_NV, rows):
        if seconds := float(rows.columns["device"].max()):
            time.sleep(seconds)
        return logits_NV

    def after_draw(self, tokens_N, rows):
        return tokens_N.unsqueeze(1)

    @staticmethod
    def start(arguments, request):
        return arguments

    @staticmethod
    def on_token(state, token_id, logprob):
        if state.host:
            time.sleep(state.host)


@hookimpl
def register_extensions(register):
    register("slow", f"{__name__}:Slow", arguments=SlowArguments, help="for tests", needs=Needs())


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKLINE_PLUGINS", __name__)


def asked(**slow: float) -> SamplingParams:
    return SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, extra_args={"slow": slow} if slow else {})


@pytest.mark.parametrize("overlap", [False, True])
def test_each_side_has_its_own_time_and_no_request_adds_none(overlap: bool) -> None:
    with LLM(device="cpu", engine={**SIZES, "overlap": overlap}) as llm:
        costs = llm.engine.extension_costs
        llm.generate("one", asked())
        assert costs["slow"] == ExtensionCost()
        llm.generate("one", asked(host=SLOW_S))
        host_s, device_s = costs["slow"].host_s, costs["slow"].device_s
        assert host_s >= 6 * SLOW_S and device_s < host_s
        assert 6 <= costs["slow"].num_steps == costs["slow"].num_timed_steps <= 7
        llm.generate("one", asked(device=SLOW_S))
        further_s = costs["slow"].device_s - device_s
        assert further_s >= 6 * SLOW_S and costs["slow"].host_s - host_s < further_s
        assert costs["token_bias"] == ExtensionCost()


@pytest.mark.slow
def test_a_rank_in_a_process_of_its_own_tells_its_times() -> None:
    with LLM(device="cpu", engine=SIZES, tp=2) as llm:
        llm.generate("one", asked(device=SLOW_S))
        cost = llm.engine.extension_costs["slow"]
    assert cost.device_s >= 6 * SLOW_S and cost.num_timed_steps == cost.num_steps


def test_metrics_have_them_by_the_extensions_name() -> None:
    pytest.importorskip("prometheus_client")

    with LLM(device="cpu", engine=SIZES, observers=["prometheus"]) as llm:
        llm.generate("one", asked(host=SLOW_S))
        text = llm.observers["prometheus"].text()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'extension="slow"' in line)
    values = {name.partition("{")[0]: float(value) for name, value in lines.items()}
    assert values["hookline_extension_host_seconds_total"] >= 6 * SLOW_S
    assert values["hookline_extension_steps_total"] == values["hookline_extension_timed_steps_total"] >= 6
    assert 0 < values["hookline_extension_device_seconds_total"] < values["hookline_extension_host_seconds_total"]


@pytest.mark.slow
def test_a_benchmark_prints_those_that_it_ran(tmp_path, capsys) -> None:
    result = tmp_path / "results.jsonl"
    workload = ["workload.num_prompts=2", "workload.prompt_len=[4,4]", "workload.output_len=[4,4]", "repeats=1"]
    sizes = ["device=cpu", "engine.cpu_cache_gib=0.05", "engine.max_model_len=64"]
    assert bench([*sizes, *workload, f"result={result}", f"extensions.slow.device={SLOW_S}"]) == 0
    costs = json.loads(result.read_text())["metrics"]["extensions"]
    assert list(costs) == ["slow"] and costs["slow"]["steps"] >= 4 and costs["slow"]["device_us"] >= 1e6 * SLOW_S
    assert "extension slow           host " in capsys.readouterr().out


def test_a_step_that_was_not_timed_is_no_zero() -> None:
    costs = extension_costs({"one": ExtensionCost(num_steps=4, host_s=2e-5), "none": ExtensionCost()})
    assert costs == {"one": {"steps": 4, "host_us": 5.0, "device_us": None}}
    assert cost_lines(costs) == ["extension one            host 5.0 us, device not timed a step (means of 4)"]
