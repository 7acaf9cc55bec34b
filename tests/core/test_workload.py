"""The loads that benchmarks run: the published totals, and no token shared between repetitions."""

from pathlib import Path

import pytest
import yaml

from core.errors import ConfigError
from core.workload import WorkloadConfig, draw_load

CONF = Path(__file__).parent.parent.parent / "conf/workload"


def preset(name):
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return WorkloadConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def test_mixed256_has_the_totals_of_the_published_benchmark():
    load = draw_load(preset("mixed256"), 151936)
    assert (load.num_prompt_tokens, load.num_output_tokens) == (142_827, 133_966)


def test_repetitions_have_the_same_lengths_and_other_tokens():
    first, second = (draw_load(preset("smoke"), 4096, repetition) for repetition in range(2))
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    assert first.params == second.params
    assert first.prompts[0][0] != second.prompts[0][0]


def test_all_prompts_of_shared_prefix_begin_alike_and_end_differently():
    load = draw_load(preset("shared_prefix"), 151936)
    assert len({tuple(prompt[:2048]) for prompt in load.prompts}) == 1
    assert len({tuple(prompt[2048:]) for prompt in load.prompts}) == 256


def test_token_ids_stay_inside_a_small_vocabulary():
    load = draw_load(preset("smoke"), 100, repetition=3)
    assert max(max(prompt) for prompt in load.prompts) < 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_len": (0, 4)}, r"workload.prompt_len=\[0, 4\] must be two whole numbers"),
        ({"output_len": (9, 4)}, r"workload.output_len=\[9, 4\]"),
        ({"num_prompts": 0}, "num_prompts"),
    ],
)
def test_impossible_workloads_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        WorkloadConfig(**values)
