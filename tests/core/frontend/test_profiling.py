"""`profile=`: what it takes, the trace that it writes, and the errors."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hookline.core.errors import ConfigError
from hookline.core.frontend.profiling import Profile, count_launches, profiled
from hookline.core.sampling_params import SamplingParams
from hookline.core.testing.fakes import fake_engine
from hookline.core.testing.plain_scheduler import PlainScheduler
from hookline.core.testing.scheduler_suite import drain


def traced(path, num_tokens=12, **options):
    engine = fake_engine(PlainScheduler())
    with profiled(SimpleNamespace(engine=engine), Profile(path, **options)):
        engine.add([1, 2, 3], SamplingParams(max_tokens=num_tokens, seed=1))
        drain(engine)
    return engine


def ranges(path):
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_the_wanted_steps_and_their_parts_as_ranges(tmp_path, name):
    engine = traced(tmp_path / name, num_steps=4, num_skipped=3)
    found = ranges(tmp_path / name)
    assert sorted(name for name in found if name.startswith("step")) == ["step 4", "step 5", "step 6", "step 7"]
    for part in "plan", "dispatch", "launch", "wait", "commit":
        assert found.count(part) == 4
    assert engine.watch.tracer is None


def test_a_trace_ends_with_the_run(tmp_path, caplog):
    caplog.set_level("INFO", logger="hookline")
    traced(tmp_path / "trace.json", num_steps=100, num_skipped=9)
    assert [name for name in ranges(tmp_path / "trace.json") if name.startswith("step")] == [
        "step 10",
        "step 11",
        "step 12",
    ]
    assert "wrote a profile of 3 steps to" in caplog.text


@pytest.mark.slow
def test_nothing_of_torchs_own_is_printed_while_tracing(tmp_path):
    """In a process of its own: torch asks how much to print when a process traces for the first time."""
    code = (
        f"from pathlib import Path; from test_profiling import traced; traced(Path({str(tmp_path / 'trace.json')!r}))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "trace.json").exists()


def test_too_few_steps_are_an_error_that_says_how_many_there_were(tmp_path):
    with pytest.raises(ConfigError, match="there were 12 steps, and profile_skip=12 leaves out as many; lower it"):
        traced(tmp_path / "trace.json", num_skipped=12)
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("name", "left"), [("trace.json", None), ("trace.json", b'{"traceEvents": ['), ("trace.json.gz", b"\x1f\x8b\x08\0")]
)
def test_a_full_disk_is_one_line_and_leaves_the_file_that_was_there(tmp_path, monkeypatch, name, left):
    """torch raises, or writes a part and says nothing."""

    def export(self, path):
        if left is None:
            raise OSError(28, "No space left on device")
        Path(path).write_bytes(left)

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", export)
    (tmp_path / name).write_text("before")
    with pytest.raises(ConfigError, match=r"profile=.*trace.json.* cannot be written: .*(No space|the disk full)"):
        traced(tmp_path / name, num_skipped=2)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_launches_are_counted_by_kind(tmp_path):
    names = [
        ("cuda_runtime", "cudaGraphLaunch"),
        ("cuda_runtime", "cudaLaunchKernel"),
        ("cuda_driver", "cuLaunchKernelEx"),
        ("cuda_runtime", "cudaMemcpyAsync"),
        *[("kernel", "attention")] * 5,
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"cat": category, "name": name} for category, name in names]}))
    assert count_launches(path) == {"graph replays": 1, "kernels": 5, "single launches": 2}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"profile": "trace.txt"}, "profile=trace.txt: the name must end in .json or .json.gz"),
        ({"profile": "nowhere/trace.json"}, "the folder nowhere does not exist; make it first"),
        ({"profile": "trace.json", "profile_steps": 0}, "profile_steps=0 must be at least 1"),
        ({"profile": "trace.json", "profile_skip": 1.5}, "profile_skip=1.5 is not an int"),
    ],
)
def test_a_profile_that_cannot_be_made_is_refused_with_key_and_value(tree, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Profile.of(tree)


def test_a_profile_is_found_in_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Profile.of({"profile": "~/trace.json"}).path == tmp_path / "trace.json"


def test_no_profile_is_made_unless_wanted():
    assert Profile.of({"profile": None, "profile_steps": 20, "profile_skip": 10}) is None
