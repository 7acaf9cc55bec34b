"""A third party's plugins pass `mypy --strict` over an installed Hookline: its public names are typed to the end."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from hookline.core.new.command import kinds, write_skeleton
from tests.fresh_environment import ROOT, FreshEnvironment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs the extra: pip install hookline[dev]"),
]
UNSEEN = (
    *(f"{name}.*" for name in ("huggingface_hub", "matplotlib", "optuna", "ray", "sympy", "transformers")),
    *(f"torch.{part}.*" for part in ("_dynamo", "_export", "_functorch", "_inductor", "ao", "export", "fx", "onnx")),
)
"""What takes long to check, and shows nowhere in what is under test."""
PUBLIC = """
from hookline import LLM, AsyncLLM, Delta, FinishReason, RequestOutput, SamplingParams
from hookline.core import contracts, errors, layers, outputs, sampling_params, scheduling
from hookline.core.distributed.side_stream import SideStream
from hookline.core.testing import batches, checks, extension_driver, fakes, installed, plain_kernels, plain_scheduler
from hookline.core.testing import processor_driver

def answer(llm: LLM) -> str:
    [output] = llm.generate(["one"], SamplingParams(max_tokens=2))
    return output.text

def scheduler_of(names: list[str]) -> list[str]:
    return [installed.installed_config(scheduler=name).scheduler.name for name in names]
"""
SUITES = """
from collections.abc import Mapping
from typing import Any

import torch

from hookline.core.contracts import AttentionSpec, Kernels, Plan, Scheduler, SchedulerView
from hookline.core.scheduling import PlanDraft, admit_waiting, continue_prompts, decode_running
from hookline.core.testing.extension_suite import ExtensionSuite
from hookline.core.testing.kernels_suite import KernelsSuite
from hookline.core.testing.model_suite import ModelSuite
from hookline.core.testing.plain_kernels import PlainKernels
from hookline.core.testing.plain_model import PlainModel
from hookline.core.testing.processor_suite import ProcessorSuite
from hookline.core.testing.sampler_suite import SamplerSuite
from hookline.core.testing.scheduler_suite import SchedulerSuite

class TestKernels(KernelsSuite):
    dtypes = (torch.float16,)
    block_sizes = (32,)
    head_dims = [64, 128]
    groups = (3,)
    device = "cuda"
    captured_decodes = False
    graph_safe = False
    graph_prefill = True
    tolerances = {torch.float16: 1e-2}

    def make(self, spec: AttentionSpec) -> Kernels:
        return PlainKernels(None, spec)

class TestModel(ModelSuite):
    model_class = PlainModel
    dtypes = (torch.float32,)
    ranks = (2, 4)
    uses_positions = False
    unused_weights = ("lm_head.bias",)

    def hf_config(self) -> dict[str, Any]:
        return {"vocab_size": 47}

class TestProcessor(ProcessorSuite):
    processor = object
    config = dict
    examples = ({"strength": 0.5},)

class TestExtension(ExtensionSuite):
    extension = object
    arguments = dict
    config = Mapping
    examples = ({"strength": 0.5},)
    tolerance = 1e-5

class TestSampler(SamplerSuite):
    temperatures = (0.5,)
    dtypes = (torch.float32,)
    graph_safe = False

class Policy:
    def __init__(self, config: Any) -> None:
        self.config = config

    def plan(self, view: SchedulerView) -> Plan:
        draft = PlanDraft(view, 0.0)
        decode_running(draft)
        continue_prompts(draft)
        admit_waiting(draft, sorted(view.waiting, key=lambda request: request.num_tokens))
        return draft.plan()

class TestPolicy(SchedulerSuite):
    max_gap_steps = 17

    def make(self) -> Scheduler:
        return Policy({})
"""


def strictly_checked(installed: FreshEnvironment, folder: Path) -> tuple[int, str]:
    skip = "follow_imports = skip\nfollow_imports_for_stubs = true\n"
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(UNSEEN)}]\n{skip}")
    done = installed.run(
        "-m",
        "mypy",
        "--strict",
        "--explicit-package-bases",
        f"--cache-dir={os.devnull}",
        ".",
        folder=folder,
    )
    return done.returncode, done.stdout + done.stderr


def test_third_party_plugins_of_every_kind_pass_mypy_strict(installed: FreshEnvironment, tmp_path: Path) -> None:
    for kind in kinds():
        skeleton = write_skeleton(kind, f"new_{kind}", tmp_path / "skeletons" / kind)
        (skeleton / f"hookline_new_{kind}").rename(tmp_path / f"hookline_new_{kind}")
        (skeleton / "tests" / f"test_new_{kind}.py").rename(tmp_path / f"test_new_{kind}.py")
    shutil.copytree(ROOT / "examples" / "hookline-olmo3" / "hookline_olmo3", tmp_path / "hookline_olmo3")
    (tmp_path / "public.py").write_text(PUBLIC)
    (tmp_path / "suites.py").write_text(SUITES)
    (tmp_path / "wrong.py").write_text("from hookline.core.contracts import Plan\nPlan(decode='everybody')\n")
    code, text = strictly_checked(installed, tmp_path)
    assert code == 1 and 'wrong.py:2: error: Argument "decode" to "Plan"' in text, f"nothing was checked: {text}"
    assert text.count(": error: ") == 1, text
