"""When an engine with Triton's kernels is ready, no step can launch a kernel that was not compiled and loaded yet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "launched_kernels.py"
SIZES = ("engine.max_num_seqs=40", "engine.max_model_len=16384", "model.random_shape.num_hidden_layers=2")


PERIODS = {"gemma3_4b": ["sliding_window_pattern"], "qwen3_next_80b_a3b": ["full_attention_interval"]}
"""Keys that say how many layers there are until the kinds of layers come again."""


def launched(*arguments: str, num_steps: int = 80) -> dict:
    """What tests/launched_kernels.py prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, SCRIPT, str(num_steps), "model.weights=random", *SIZES, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("model", ["qwen3_0_6b", pytest.param("qwen3_30b_a3b", marks=pytest.mark.nightly)])
def test_random_steps_launch_nothing_that_was_not_launched_before_ready(model):
    found = launched(f"model={model}")
    assert found["ready"] > 40 and found["late"] == []


def test_prompts_of_experts_whose_rows_are_rounded_ahead_launch_nothing_late():
    found = launched("model=qwen3_30b_a3b", "quantization=fp8", "engine.max_model_len=4096", num_steps=40)
    assert found["ready"] > 40 and found["late"] == []


def test_products_of_more_rows_than_a_prompt_may_have_are_launched_before_ready():
    found = launched("model=qwen3_30b_a3b", "engine.batch_invariant=true", "engine.max_model_len=4096")
    assert found["ready"] > 40 and found["late"] == []


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3_4b", "qwen3_next_80b_a3b")]


@pytest.mark.parametrize("model", ["gpt_oss_20b", *NIGHTLY])
def test_models_with_unlike_layers_launch_nothing_late_either(model):
    every_second = [f"model.random_shape.{key}=2" for key in PERIODS.get(model, ())]
    found = launched(f"model={model}", "engine.max_model_len=4096", *every_second, num_steps=40)
    assert found["ready"] > 40 and found["late"] == []
