"""Real sweeps of the bundled checkpoint: every way a job can end, and what is left of it afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hookline.core.bench.files import read_recording
from hookline.core.run.command import main as run
from hookline.core.simulate.command import main as simulate
from hookline.core.sweep.results import read_lines, read_results

ROOT = Path(__file__).parents[1]
FAULTY = """
import os, signal
from hookline.core.contracts import Plan, hookimpl

API_VERSION = 2

class Raising:
    def __init__(self, config): pass
    def plan(self, view): raise ValueError("cannot make up its mind")

class Killed:
    def __init__(self, config): pass
    def plan(self, view): os.kill(os.getpid(), signal.SIGKILL)

@hookimpl
def register_schedulers(register):
    register("raising", "faulty_schedulers_of_a_test:Raising")
    register("killed", "faulty_schedulers_of_a_test:Killed")
"""
PRESETS = {
    "plain": "engine: {num_blocks: 64}",
    "raising": "defaults: [{override /scheduler: raising}]",
    "killed": "defaults: [{override /scheduler: killed}]",
    "huge": "engine: {num_blocks: 500000000}",  # 2 TB of this checkpoint, more than any machine of the tests has
}
"""A way to end each, so that one swept key has them all: every job is a process that imports torch."""
SWEPT = ["--config-dir", "presets", "workload=smoke", "repeats=1", "hydra.sweep.dir=sweep"]


def bench(folder, *arguments):
    """A benchmark in a process of its own, whose plugins include the faulty schedulers."""
    (folder / "faulty_schedulers_of_a_test.py").write_text(FAULTY)
    environ = {
        **os.environ,
        "HOOKLINE_PLUGINS": "faulty_schedulers_of_a_test",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "core.bench", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def mishaps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mishaps")
    (folder / "presets/experiment").mkdir(parents=True)
    for name, text in PRESETS.items():
        (folder / f"presets/experiment/{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    done = bench(folder, "-m", f"experiment={','.join(PRESETS)}", *SWEPT)
    return done, read_results(folder / "sweep"), folder


@pytest.mark.slow
def test_a_sweep_ends_with_the_others_results_whatever_happens_to_a_job(mishaps):
    done, records, _ = mishaps
    assert done.returncode == 1, done.stderr
    statuses = [record["status"] for record in records]
    assert statuses == ["done", "failed", "killed", "out_of_memory"]
    assert [record["exit_code"] for record in records] == [0, 2, -9, 2]


@pytest.mark.slow
def test_failed_jobs_are_named_with_their_cause(mishaps):
    done, records, _ = mishaps
    raising = "scheduler 'raising' of plugin 'faulty_schedulers_of_a_test' (HOOKLINE_PLUGINS -)"
    assert records[1]["error"].startswith(f"{raising} fails in plan: ValueError: cannot make up its mind (")
    assert records[2]["error"] == "killed by SIGKILL, as the system does when memory runs out"
    assert records[3]["error"].startswith("the KV cache of 500000000 blocks takes ")
    end = done.stderr[done.stderr.index("hookline: job 1 (") :]
    for record in records[1:]:
        assert f"{record['status'].replace('_', ' ')}: {record['error']}" in end
    assert "hookline: 1 of 4 jobs succeeded" in end
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_job_that_is_done_leaves_its_figures_and_records(mishaps):
    done, records, folder = mishaps
    metrics = records[0]["metrics"]
    recording = read_recording(folder / "sweep" / records[0]["folder"])
    assert metrics["steps"] == len(recording.steps["end_s"]) > 8
    assert metrics["output_tokens"] == sum(request.output_tokens for request in recording.requests)
    assert recording.num_blocks == records[0]["num_blocks"] == 64
    assert records[0]["config"]["workload"]["num_prompts"] == 8 == len(recording.requests)
    assert records[0]["versions"]["torch"] and records[0]["device"].startswith("cpu")
    assert done.stdout.splitlines()[1].split()[:2] == ["0", "done"]
    assert f"{metrics['output_tok_s']:.4g}" in done.stdout.replace(",", "")


@pytest.mark.slow
def test_the_same_folder_runs_only_what_failed(mishaps):
    _, records, folder = mishaps
    again = bench(folder, "-m", "experiment=plain,raising", *SWEPT)
    assert "job 0 is finished already" in again.stderr
    assert "job 1 failed: scheduler 'raising' of plugin" in again.stderr
    assert len((folder / "sweep/results.jsonl").read_text().splitlines()) == len(records) + 1


@pytest.mark.slow
def test_a_single_run_that_fails_says_so_in_its_result_file(tmp_path):
    done = bench(tmp_path, "scheduler=raising", "result=result.jsonl")
    assert done.returncode == 2
    record = json.loads((tmp_path / "result.jsonl").read_text())
    assert (record["status"], record["config"]["scheduler"]["name"]) == ("failed", "raising")


@pytest.mark.slow
def test_a_benchmarks_own_requests_are_a_trace(mishaps, tmp_path):
    _, records, folder = mishaps
    requests = folder / "sweep" / records[0]["folder"] / "requests.jsonl"
    done = bench(tmp_path, f"workload.trace={requests}", "records=again", "repeats=1")
    assert done.returncode == 0, done.stderr
    recording, original = read_recording(tmp_path / "again"), read_recording(requests.parent)
    assert [one.prompt_tokens for one in recording.requests] == [one.prompt_tokens for one in original.requests]
    np.testing.assert_array_equal(recording.steps["decode_rows"], original.steps["decode_rows"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sampling.temperature=0.1", "sampling has no effect in a benchmark, whose requests are the workload's"),
        ("prompt=hello", "prompt has no effect in a benchmark"),
        ("objective=speed", "no metric named objective=speed"),
        ("job_timeout_s=5", "job_timeout_s is for the jobs of a sweep; add -m, or leave it out"),
        ("repeats=0", "repeats=0 must be at least 1"),
        ("engine.max_model_len=8", "every request of the workload was refused: the prompt has"),
    ],
)
def test_what_a_benchmark_cannot_use_is_refused(argument, message, tmp_path, capsys, monkeypatch):
    from hookline.core.bench.command import main

    monkeypatch.chdir(tmp_path)
    assert main([argument]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_a_limit_that_is_none_is_named(tmp_path):
    done = bench(tmp_path, "-m", "job_timeout_s=0.2,never", "hydra.sweep.dir=sweep")
    assert done.returncode == 1, done.stderr
    slow, wrong = read_lines(tmp_path / "sweep/results.jsonl")  # one job twice: the limit is no part of it
    assert (slow["status"], slow["error"]) == ("timed_out", "not done after job_timeout_s=0.2")
    assert (wrong["status"], wrong["error"]) == (
        "failed",
        "job_timeout_s=never must be a number of seconds above 0, or null",
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", [run, simulate])
@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("hydra.sweep.dir=file", "file"),
        ("hydra.sweep.dir=file/deep/down", "file"),
        ("hydra.sweep.dir=file/${now:%Y}", "file"),
    ],
)
def test_a_sweeps_folder_that_cannot_be_made_is_one_line(command, argument, path, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert command(["-m", "seed=1,2", argument, *(["prompt=x"] if command is run else [])]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"hookline: error: hydra.sweep.dir: {path}") and " cannot be written: " in said


@pytest.mark.slow
def test_a_jobs_folder_that_cannot_be_made_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/0").touch()
    monkeypatch.chdir(tmp_path)
    assert run(["-m", "hydra.sweep.dir=here", "prompt=x"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said == "hookline: error: hydra.sweep.dir: here/0 cannot be written: File exists"
