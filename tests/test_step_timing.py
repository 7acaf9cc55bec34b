"""Step times with a real model: consistent with each other, and without an effect on the tokens."""

import json

import pytest

from hookline import LLM, SamplingParams
from hookline.core.bench.command import measure
from hookline.core.bench.settings import BenchKeys
from hookline.core.config.compose import compose
from hookline.core.plugin.host import PluginHost


def test_device_times_are_part_of_the_launch_on_a_cpu_and_change_no_token():
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    with LLM() as llm:
        plain = llm.generate([[5, 6, 7]], params)[0].token_ids
        llm.engine.time_steps()
        llm.engine.add([8, 9], params)
        while llm.engine.has_work:
            llm.engine.step()
            stats = llm.engine.last_stats
            assert 0 < stats.device_s < stats.launch_s and stats.idle_s >= 0
            assert stats.host_s < stats.plan_s + stats.dispatch_s + stats.launch_s + stats.commit_s
        llm.engine.pool.reset_cache()
        assert llm.generate([[5, 6, 7]], params)[0].token_ids == plain


@pytest.mark.slow
def test_a_benchmark_tells_step_times_by_kind_and_writes_a_profile(tmp_path):
    host, path = PluginHost.load(), tmp_path / "trace.json"
    arguments = [f"profile={path}", "profile_steps=3", "profile_skip=2", "repeats=1", "workload.num_prompts=2"]
    result, _ = measure(compose(arguments, host, BenchKeys, "bench")[0].tree, host)
    times = result["metrics"]["step_times"]
    assert times["prefill"]["steps"] >= 1 and times["decode"]["steps"] >= 7
    assert times["decode"]["device_ms"] > 0 and 0 < times["decode_idle_percent"] < 100
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert sum(name.startswith("step ") for name in names) == 3
