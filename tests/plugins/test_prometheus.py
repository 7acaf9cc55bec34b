"""The Prometheus observer: every metric says what happened, and a scrape gets it over HTTP."""

import itertools
import shutil
import subprocess
import urllib.request

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra: pip install hookline[prometheus]")
from prometheus_client.parser import text_string_to_metric_families

from hookline import LLM, SamplingParams
from hookline.core.errors import ConfigError, PluginError, RequestError
from hookline.core.plugin.check_plugin import new_manager
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers
from hookline.core.testing.fakes import FakeExecutor, fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain
from hookline.plugins.observers import PrometheusConfig
from hookline.plugins.observers.prometheus import Prometheus

VLLM_NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success", "iteration_tokens",
    "time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "inter_token_latency_seconds", "num_requests_waiting_by_reason",
}  # fmt: skip


OUR_NAMES = {"step_host_seconds", "step_wait_seconds", "request_refusals", "build_info"} | {
    f"extension_{name}" for name in ("steps", "host_seconds", "timed_steps", "device_seconds")
}


def observed(observer, **options):
    return fake_engine(PlainScheduler(), observers=Observers(new_manager(), {"it": observer}), **options)


def values(text):
    """Sample name, with its reason if it has one -> value; buckets left out."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name.startswith("hookline_") else ():
            reason = next(filter(None, map(sample.labels.get, ("finished_reason", "reason", "kind"))), None)
            name = sample.name.removeprefix("hookline_") + (f"/{reason}" if reason else "")
            if "le" not in sample.labels and not sample.name.endswith("_created"):
                found[name] = sample.value
            assert sample.labels["model_name"] == "tiny"
    return found


def greedy(max_tokens=4):
    return SamplingParams(max_tokens=max_tokens, seed=1)


@pytest.fixture
def prometheus():
    return Prometheus(PrometheusConfig(model_name="tiny"))


def test_the_names_are_those_of_vllm_and_eight_of_our_own(prometheus):
    observed(prometheus)
    families = {family.name for family in text_string_to_metric_families(prometheus.text())}
    families = {name for name in families if not name.endswith("_created")}  # when each began, says the client
    of_the_process = {name for name in families if name.startswith(("process_", "python_"))}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "python_info"} <= of_the_process
    assert families - of_the_process == {f"hookline_{name}" for name in VLLM_NAMES | OUR_NAMES}


def test_counters_and_histograms_add_up(prometheus):
    engine = observed(prometheus)
    for _ in range(2):
        engine.add(list(range(1, 10)), greedy())
        drain(engine)
    engine.abort([engine.add([7], greedy())])
    engine.refuse([], RequestError("the prompt is empty"))
    found = values(prometheus.text())
    assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == 18
    assert found["prefix_cache_hits_total"] == 8
    assert found["generation_tokens_total"] == 8
    assert found["iteration_tokens_sum"] == 9 + 1 + 2 * 3
    assert found["iteration_tokens_count"] == 8
    ends = "request_success_total/"
    reasons = {name.removeprefix(ends): value for name, value in found.items() if name.startswith(ends)}
    assert reasons == {"stop": 0, "length": 2, "abort": 1, "error": 1}
    assert found["request_prompt_tokens_sum"] == 19 and found["request_generation_tokens_sum"] == 8
    assert found["e2e_request_latency_seconds_count"] == found["request_queue_time_seconds_count"] == 3
    assert found["time_to_first_token_seconds_count"] == found["request_decode_time_seconds_count"] == 2
    phases = [found[f"request_{phase}_time_seconds_sum"] for phase in ("prefill", "decode")]
    assert found["step_host_seconds_total"] > 0 and found["step_wait_seconds_total"] > 0
    assert sum(phases) == pytest.approx(found["request_inference_time_seconds_sum"])


def test_gauges_are_true_between_steps(prometheus):
    engine = observed(prometheus, max_num_seqs=1, num_blocks=64)
    for _ in range(3):
        engine.add([1] * 9, greedy())
    assert values(prometheus.text())["num_requests_waiting"] == 3
    engine.step()
    found = values(prometheus.text())
    assert (found["num_requests_running"], found["num_requests_waiting"]) == (1, 2)
    assert found["kv_cache_usage_perc"] == 3 / 64
    engine.close()
    assert values(prometheus.text())["num_requests_running"] == 0


def test_late_compilations_are_read_off_the_executor_by_kind(prometheus, monkeypatch):
    counts = {"kernel_compiled": 0, "graph": 2}
    monkeypatch.setattr(FakeExecutor, "late_work", counts)
    observed(prometheus)
    counts["kernel_compiled"] += 1
    found = values(prometheus.text())
    assert found["late_compilations_total/kernel_compiled"] == 1 and found["late_compilations_total/graph"] == 2


def test_preemptions_are_counted(prometheus):
    engine = observed(prometheus, num_blocks=10, max_model_len=40)
    for seed in range(4):
        engine.add([seed + 1] * 8, SamplingParams(max_tokens=20, seed=seed))
    outputs = drain(engine)
    num_preemptions = sum(output.num_preemptions for output in outputs)
    assert values(prometheus.text())["num_preemptions_total"] == num_preemptions > 0


def test_waiting_requests_are_told_apart_by_what_they_wait_for(prometheus):
    engine = observed(prometheus, num_blocks=10, max_model_len=40, max_num_seqs=2)
    for seed in range(4):
        engine.add([seed + 1] * 8, SamplingParams(max_tokens=30, seed=seed))
    seen = set()
    while engine.has_work:
        engine.step()
        waiting = tuple(engine.waiting_by_reason.values())
        if waiting not in seen:
            found = values(prometheus.text())
            scraped = [
                found[f"num_requests_waiting_by_reason/{reason}"] for reason in ("capacity", "preempted", "grammar")
            ]
            assert tuple(scraped) == waiting and sum(scraped) == found["num_requests_waiting"]
        seen.add(waiting)
    assert (2, 0, 0) in seen and any(preempted for _, preempted, _ in seen)
    engine.close()


def test_every_gap_between_tokens_is_counted_preemptions_and_discarded_tokens_aside(prometheus):
    engine = observed(prometheus, num_blocks=10, max_model_len=40, overlap=True, eos_token_ids=[7])
    engine.clock = itertools.count(1.0, 0.5).__next__
    for seed in range(4):
        engine.add([seed + 1] * 8, SamplingParams(max_tokens=20, seed=seed))
    outputs = drain(engine)
    assert sum(output.num_preemptions for output in outputs) > 0
    found = values(prometheus.text())
    assert found["inter_token_latency_seconds_count"] == sum(len(output.token_ids) - 1 for output in outputs)


def test_the_gaps_of_a_request_are_the_time_from_its_first_to_its_last_token(prometheus):
    engine = observed(prometheus)
    engine.clock = itertools.count(1.0, 0.001).__next__
    engine.add([1, 2, 3], greedy(5))
    [output] = drain(engine)
    lines = [line for line in prometheus.text().splitlines() if "inter_token_latency_seconds_bucket" in line]
    assert lines[-1].endswith(" 4.0") and 'le="+Inf"' in lines[-1]
    assert [float(line.rpartition(" ")[2]) for line in lines] == sorted(
        float(line.rpartition(" ")[2]) for line in lines
    )
    decode_s = output.timings.finished_s - output.timings.first_token_s
    assert values(prometheus.text())["inter_token_latency_seconds_sum"] == pytest.approx(decode_s, abs=0.005)


def test_refusals_are_counted_by_reason(prometheus):
    engine = observed(prometheus, max_queued_requests=1)
    engine.add([1], greedy())
    for attempt in (lambda: engine.add([], greedy()), lambda: engine.add([1] * 200, greedy()), engine.check_room):
        with pytest.raises(RequestError) as refused:
            attempt()
        engine.refuse([], refused.value)
    found = values(prometheus.text())
    reasons = ("invalid", "prompt_too_long", "queue_full")
    assert [found[f"request_refusals_total/{reason}"] for reason in reasons] == [1, 1, 1]
    assert found["request_success_total/error"] == 3


@pytest.mark.slow
def test_a_scrape_over_http_gets_the_same_until_the_engine_stops():
    prometheus = Prometheus(PrometheusConfig(port=0, model_name="tiny"))
    engine = observed(prometheus)
    engine.add([1], greedy())
    drain(engine)
    url = f"http://127.0.0.1:{prometheus.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert values(answer.read().decode())["generation_tokens_total"] == 4
    engine.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


@pytest.mark.slow
def test_a_port_that_is_taken_is_named_as_the_cause():
    first = Prometheus(PrometheusConfig(port=0))
    engine = observed(first)
    with pytest.raises(PluginError, match=r"on_engine_start of observer 'it' raised OSError: .*[Aa]ddress already in"):
        observed(Prometheus(PrometheusConfig(port=first.port)))
    engine.close()


def test_it_is_chosen_by_name_and_two_engines_do_not_mix():
    if PluginHost.load(environ={}).registry.find("observer", "prometheus") is None:
        pytest.skip("hookline was installed before it had this entry point: pip install -e .")
    options = {"device": "cpu", "engine": {"num_blocks": 64}}
    with LLM(observers=[{"name": "prometheus", "model_name": "tiny"}], **options) as one, LLM(**options) as other:
        one.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
        other.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert values(one.observers["prometheus"].text())["generation_tokens_total"] == 3
        assert other.observers == {}


@pytest.mark.parametrize("reference", ["Qwen/Qwen3-0.6B", "package:Qwen/Qwen3-0.6B"])
def test_without_a_name_of_its_own_the_label_is_the_checkpoint(reference):
    prometheus = Prometheus(PrometheusConfig())
    observed(prometheus, model_name=reference)
    assert 'hookline_num_requests_running{model_name="Qwen/Qwen3-0.6B"} 0.0' in prometheus.text()


def test_dashboards_of_another_engine_are_served_by_its_prefix():
    prometheus = Prometheus(PrometheusConfig(model_name="tiny", prefix="vllm:"))
    observed(prometheus)
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in prometheus.text()
    with pytest.raises(ConfigError, match=r"prefix='0 x' must begin the names of metrics, as hookline_ does"):
        Prometheus(PrometheusConfig(prefix="0 x"))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
def test_promtool_finds_nothing_to_complain_of(prometheus):
    engine = observed(prometheus)
    engine.add([1, 2, 3], greedy())
    drain(engine)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=prometheus.text(), text=True, capture_output=True, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
