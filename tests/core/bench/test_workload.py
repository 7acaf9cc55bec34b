"""The loads that benchmarks run: the published totals, and no token shared between repetitions."""

import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from hookline.core.bench.workload import TokenSource, WorkloadConfig, draw_load
from hookline.core.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf/workload"


def preset(name):
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return WorkloadConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def test_mixed256_has_the_totals_of_the_published_benchmark():
    load = draw_load(preset("mixed256"), 151936)
    assert (load.num_prompt_tokens, load.num_output_tokens) == (142_827, 133_966)


def test_repetitions_have_the_same_lengths_and_other_tokens():
    first, second = (draw_load(preset("smoke"), 4096, repetition) for repetition in range(2))
    assert [len(one.tokens) for one in first.requests] == [len(one.tokens) for one in second.requests]
    assert [one.params for one in first.requests] == [one.params for one in second.requests]
    assert first.requests[0].tokens[0] != second.requests[0].tokens[0]


def test_all_prompts_of_shared_prefix_begin_alike_and_end_differently():
    load = draw_load(preset("shared_prefix"), 151936)
    assert len({tuple(one.tokens[:2048]) for one in load.requests}) == 1
    assert len({tuple(one.tokens[2048:]) for one in load.requests}) == 256


def test_token_ids_stay_inside_a_small_vocabulary():
    load = draw_load(preset("smoke"), 100, repetition=3)
    assert max(max(one.tokens) for one in load.requests) < 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_len": (0, 4)}, r"workload.prompt_len=\[0, 4\] must be two whole numbers"),
        ({"prompt_len": (1, 10**5000)}, r"workload.prompt_len=\[1, <whole.* 1 <= first <= second <= 16777216"),
        ({"turns": (1, 2**24 + 1)}, r"workload.turns=\[1, 16777217\] must be .* <= 16777216"),
        ({"shared_prefix_len": 2**24 + 1}, "shared_prefix_len=16777217 must be at least 0 and at most 16777216"),
        ({"output_len": (9, 4)}, r"workload.output_len=\[9, 4\]"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"top_k": -1}, "workload.top_k=-1 must be at least 0"),
        ({"top_p": 0.0}, "workload.top_p=0.0 must be above 0 and at most 1"),
    ],
)
def test_impossible_workloads_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**values)


# --- arrivals, lengths, conversations


def gaps(**values):
    workload = WorkloadConfig(num_prompts=4000, prompt_len=(1, 1), output_len=(1, 1), **values)
    times = np.array([request.arrival_s for request in draw_load(workload, 100).requests])
    assert times[0] == 0 and (np.diff(times) >= 0).all()
    return np.diff(times)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    found = gaps(request_rate=20.0)
    assert 1 / found.mean() == pytest.approx(20, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(1, rel=0.05)


def test_bursty_arrivals_have_the_rate_and_twice_the_spread():
    found = gaps(request_rate=20.0, burstiness=0.25)
    assert 1 / found.mean() == pytest.approx(20, rel=0.1)
    assert found.std() / found.mean() == pytest.approx(2, rel=0.1)  # 1 / sqrt(shape)


def test_without_a_rate_all_arrive_at_the_start():
    assert not gaps().any()


def test_the_rate_changes_neither_lengths_nor_tokens():
    slow, fast = (draw_load(WorkloadConfig(request_rate=rate), 100) for rate in (1.0, 50.0))
    assert [request.tokens for request in slow.requests] == [request.tokens for request in fast.requests]


def test_lognormal_lengths_stay_in_their_range_and_gather_around_its_geometric_middle():
    workload = WorkloadConfig(num_prompts=4000, prompt_len=(10, 1000), length_distribution="lognormal")
    lengths = np.array([len(request.tokens) for request in draw_load(workload, 100).requests])
    assert lengths.min() >= 10 and lengths.max() <= 1000
    assert np.median(lengths) == pytest.approx(100, rel=0.1)
    assert ((lengths > 10) & (lengths < 1000)).mean() == pytest.approx(0.9, abs=0.02)


def test_a_conversations_turns_follow_each_other_and_only_the_first_has_the_shared_prefix():
    workload = WorkloadConfig(num_prompts=50, turns=(2, 4), think_s=(1.0, 2.0), shared_prefix_len=100)
    requests = draw_load(workload, 100).requests
    firsts = [place for place, request in enumerate(requests) if request.follows is None]
    assert len(firsts) == 50
    sizes = np.diff([*firsts, len(requests)])
    assert set(sizes.tolist()) == {2, 3, 4}
    for place, request in enumerate(requests):
        if request.follows is None:
            assert len(request.tokens) >= 116 and request.arrival_s == 0
        else:
            assert request.follows == place - 1
            assert len(request.tokens) <= 64 and 1 <= request.arrival_s <= 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"length_distribution": "zipf"}, "length_distribution='zipf' is not one of uniform, lognormal"),
        ({"request_rate": 0.0}, "request_rate=0.0 must be a finite number above 0, or null"),
        ({"burstiness": 0.5}, "burstiness=0.5 has no effect without workload.request_rate"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "burstiness=0.0 must be a finite number above 0"),
        ({"turns": (0, 1)}, r"workload.turns=\[0, 1\]"),
        ({"turns": (1, 2), "think_s": (2.0, 1.0)}, r"think_s=\[2.0, 1.0\] must be two finite numbers"),
        ({"think_s": (0.0, 1.0)}, "has no effect without workload.turns"),
        ({"trace": "t.jsonl", "request_rate": 2.0}, "workload.request_rate=2.0 has no effect beside workload.trace"),
    ],
)
def test_values_that_make_no_sense_or_have_no_effect_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**values)


def test_pairs_may_be_lists_as_configurations_bring_them():
    assert WorkloadConfig(prompt_len=[16, 64], trace="t.jsonl").prompt_len == (16, 64)
    with pytest.raises(ConfigError, match=r"think_s=\[0, 1\] has no effect without workload.turns"):
        WorkloadConfig(turns=[1, 1], think_s=[0, 1])


@pytest.mark.parametrize("last", [0, 1, 999, 9999, 65535, 65536])
def test_tokens_are_those_that_randint_draws(last):
    source = TokenSource(random.Random(5), last, 1 << 20)
    reference = random.Random(5)
    assert source.draw(300) == [reference.randint(0, last) for _ in range(300)]
    assert source.rng.random() == reference.random()
