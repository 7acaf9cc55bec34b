"""When an engine with Triton's kernels is ready, no step can launch a kernel that was not compiled and loaded yet."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.asked_script import AskedScript, compiling_environment

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "launched_kernels.py"
SIZES = ("engine.max_num_seqs=40", "engine.max_model_len=16384", "model.random_shape.num_hidden_layers=2")


PERIODS = {"gemma3_4b": ["sliding_window_pattern"], "qwen3_next_80b_a3b": ["full_attention_interval"]}
"""Keys that say how many layers there are until the kinds of layers come again."""


@pytest.fixture(scope="module")
def launched():
    """Asks tests/launched_kernels.py about an engine of these arguments."""
    script = AskedScript(SCRIPT, compiling_environment())
    yield lambda *arguments, num_steps=80: script.ask(num_steps, ["model.weights=random", *SIZES, *arguments])
    script.close()


@pytest.mark.parametrize("model", ["qwen3_0_6b", pytest.param("qwen3_30b_a3b", marks=pytest.mark.nightly)])
def test_random_steps_launch_nothing_that_was_not_launched_before_ready(launched, model):
    found = launched(f"model={model}")
    assert found["ready"] > 40 and found["late"] == []


def test_prompts_of_experts_whose_rows_are_rounded_ahead_launch_nothing_late(launched):
    found = launched("model=qwen3_30b_a3b", "quantization=fp8", "engine.max_model_len=4096", num_steps=40)
    assert found["ready"] > 40 and found["late"] == []


def test_products_of_more_rows_than_a_prompt_may_have_are_launched_before_ready(launched):
    found = launched("model=qwen3_30b_a3b", "engine.batch_invariant=true", "engine.max_model_len=4096")
    assert found["ready"] > 40 and found["late"] == []


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3_4b", "qwen3_next_80b_a3b")]


@pytest.mark.parametrize("model", ["gpt_oss_20b", *NIGHTLY])
def test_models_with_unlike_layers_launch_nothing_late_either(launched, model):
    every_second = [f"model.random_shape.{key}=2" for key in PERIODS.get(model, ())]
    found = launched(f"model={model}", "engine.max_model_len=4096", *every_second, num_steps=40)
    assert found["ready"] > 40 and found["late"] == []


def test_alignment_of_what_lies_in_a_steps_memory_chooses_no_variant():
    """In graphs it lies elsewhere than in eager steps: a variant of each would be compiled, one of them late."""
    command = [sys.executable, "-c", SPECIALISED]
    done = subprocess.run(command, env=compiling_environment(), capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]"], done.stdout + done.stderr


SPECIALISED = """
import importlib, pkgutil
from triton.runtime.jit import JITFunction
from hookline.plugins import kernels
from hookline.plugins.kernels.triton_launch import OF_STEP

found = set()
for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
    if "triton_" not in module.name:
        continue
    for name, kernel in vars(importlib.import_module(module.name)).items():
        for one in kernel.params if isinstance(kernel, JITFunction) and name.endswith("_kernel") else ():
            if one.name in OF_STEP and not one.do_not_specialize_on_alignment:
                found.add(f"{name} {one.name}")
print(sorted(found))
"""


@pytest.mark.nightly
def test_many_requests_with_states_launch_nothing_late(launched):
    sizes = ("engine.max_num_seqs=256", "engine.max_model_len=1024", "model.random_shape.full_attention_interval=2")
    found = launched("model=qwen3_6_27b", *sizes, num_steps=60)
    assert found["ready"] > 40 and found["late"] == []
