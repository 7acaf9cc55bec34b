"""What was chosen and cannot work stops the start in one line with exit code 2; what was not chosen stops nothing."""

import os
from pathlib import Path

import pytest
import torch

from hookline import LLM
from hookline.core.errors import CapacityError, CheckpointError
from hookline.core.run.command import main

FAULTY = """
from dataclasses import dataclass
from hookline.core.contracts import Needs, hookimpl
from hookline.plugins.schedulers.prefill_first import PrefillFirst
from hookline.plugins.samplers.gumbel import Gumbel
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.models.qwen3 import Qwen3
from hookline.plugins.models import Qwen3Config

API_VERSION = 2

@dataclass
class Config:
    pass

class NoPlan:
    def __init__(self, config): pass

class FailsToStart(PrefillFirst):
    def __init__(self, config): raise ValueError("I want no\\n config")

class FailsInSpec(Qwen3):
    @classmethod
    def spec(cls, hf_config): return hf_config["no_such_key"]

class FailsInWeights(Qwen3):
    def weight_targets(self): return self.no_such_attribute

class NoAttend(TorchKernels):
    attend = None

@hookimpl
def register_schedulers(register):
    register("no_plan", "faulty:NoPlan")
    register("fails_to_start", "faulty:FailsToStart", config=Config)
    register("no_such_module", "faulty_too:Policy")
    register("no_such_class", "faulty:Absent")

@hookimpl
def register_samplers(register):
    register("needs_cuda", "faulty:Gumbel", needs=Needs(devices=("tpu",)))
    register("needs_package", "faulty:Gumbel", needs=Needs(packages=("no_such_package",)))

@hookimpl
def register_models(register):
    register("fails_in_spec", "faulty:FailsInSpec", config=Qwen3Config)
    register("fails_in_weights", "faulty:FailsInWeights", config=Qwen3Config)

@hookimpl
def register_kernels(register):
    register("no_attend", "faulty:NoAttend", priority=1000)
    register("needs_float16", "faulty:TorchKernels", needs=Needs(dtypes=("float16",)), priority=1000)
"""
OTHERS = {
    "of_tomorrow": "API_VERSION = 3\n",
    "broken_import": "import no_such_module\n",
    "exits": "raise SystemExit(3)\n",
    "forgot_the_marker": "API_VERSION = 2\ndef register_schedulers(register): register('unmarked', 'faulty:NoPlan')\n",
    "clashes": (
        "from hookline.core.contracts import hookimpl\nAPI_VERSION = 2\n@hookimpl\ndef register_schedulers(register):\n"
        "    register('clashing', 'faulty:NoPlan')\n    register('prefill_first', 'faulty:NoPlan')\n"
    ),
}
RUN = ["prompt=import os", "sampling.max_tokens=1", "device=cpu"]


@pytest.fixture(autouse=True)
def faulty_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"faulty": FAULTY, **OTHERS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOOKLINE_PLUGINS", ",".join(["faulty", *OTHERS]))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def forget_the_modules():
    import sys

    yield
    for name in ("faulty", "moody", *OTHERS):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "cause"),
    [
        ("scheduler=no_plan", "does not keep its contract: it has no method plan(view)"),
        ("scheduler=fails_to_start", "fails in __init__ while starting: ValueError: I want no config ("),
        ("scheduler=no_such_module", "ModuleNotFoundError: No module named 'faulty_too'"),
        ("scheduler=no_such_class", "has no attribute 'Absent'"),
        (
            "scheduler=unmarked",
            "plugin 'forgot_the_marker' (HOOKLINE_PLUGINS -): function 'register_schedulers' is not",
        ),
        (
            "scheduler=clashing",
            "cannot be used: scheduler 'prefill_first' is already registered by plugin 'schedulers'",
        ),
        ("scheduler=future", "it was written for API_VERSION 3, this Hookline has 2"),
        ("scheduler=whatever", "plugin 'broken_import' (HOOKLINE_PLUGINS -): ModuleNotFoundError: No module named"),
        ("scheduler=whatever", "plugin 'exits' (HOOKLINE_PLUGINS -): SystemExit: 3"),
        ("sampler=needs_cuda", "does not fit: device is cpu, needs tpu"),
        ("sampler=needs_package", "does not fit: package 'no_such_package' is not installed"),
        (
            "model=fails_in_spec",
            "'fails_in_spec' of plugin 'faulty' (HOOKLINE_PLUGINS -) fails in spec while starting: Key",
        ),
        (
            "model=fails_in_weights",
            "'fails_in_weights' of plugin 'faulty' (HOOKLINE_PLUGINS -) fails in weight_targets while start",
        ),
        ("kernels=no_attend", "does not keep its contract: it has no method attend(q_THE, kv_2NSKE, batch)"),
        ("kernels=needs_float16", "do not fit: dtype is float32, needs float16. Would fit: "),
    ],
)
def test_what_was_chosen_and_cannot_work_stops_the_start_with_its_cause(
    choice: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, choice]) == 2
    shown = capsys.readouterr()
    last = shown.err.splitlines()[-1]
    assert last.startswith("hookline: error: ") and cause in last
    assert "Traceback" not in shown.err and shown.out == ""


def test_a_blocked_plugin_that_is_chosen_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOKLINE_BLOCK", "faulty")
    assert main([*RUN, "scheduler=no_plan"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no scheduler named 'no_plan'" in last and "plugin 'faulty'" in last and "blocked by HOOKLINE_BLOCK" in last


def test_a_default_that_is_blocked_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOOKLINE_BLOCK", "samplers")
    assert main(RUN) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no sampler named 'gumbel'" in last and "blocked by HOOKLINE_BLOCK" in last


@pytest.mark.slow
def test_none_of_them_stops_a_run_that_did_not_choose_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    shown = capsys.readouterr()
    assert "1 tokens" in shown.out or "1 token" in shown.out
    for name in OTHERS:
        assert f"hookline: not loaded: plugin '{name}'" in shown.err
    assert "kernels 'no_attend' of plugin 'faulty' (HOOKLINE_PLUGINS -) does not keep its contract" in shown.err
    assert "kernels=auto takes 'torch'" in shown.err


@pytest.mark.slow
def test_a_job_of_a_sweep_that_sees_other_plugins_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moody.py").write_text(
        "import os\nfrom hookline.core.contracts import hookimpl\nAPI_VERSION = 2\n@hookimpl\n"
        "def register_schedulers(register):\n"
        f"    if os.getpid() == {os.getpid()}: register('here_alone', 'faulty:NoPlan')\n"
        "    register('everywhere', 'faulty:NoPlan')\n"
    )
    monkeypatch.setenv("HOOKLINE_PLUGINS", "moody")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])]))
    assert main([*RUN, "-m", "seed=1", "hydra.sweep.dir=swept"]) == 1
    error = capsys.readouterr().err
    assert (
        "sees other plugins than the process that started it: missing: scheduler 'here_alone' of plugin 'moody'"
        in error
    )
    assert "Traceback" not in error


def test_a_machine_without_enough_memory_is_told_what_to_lower(monkeypatch):
    def full(*arguments, **named):
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr("hookline.core.assembly.rank_parts.RequestTable", full)
    with pytest.raises(CapacityError, match=r"lower engine.max_num_seqs, .*: can't allocate memory: you tried to"):
        LLM(device="cpu")


def test_a_config_of_more_layers_than_tensors_is_refused_before_a_model_is_built():
    with pytest.raises(CheckpointError, match=r"too few for the 200 layers of its config\.json"):
        LLM(model={"hf_overrides": {"num_hidden_layers": 200}}, device="cpu")
