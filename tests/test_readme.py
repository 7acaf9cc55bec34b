"""Every command and snippet of README.md is run: here, in .ci/run, or by a test that is named here."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.plugin.host import PluginHost
from hookline.core.testing.running import failures
from hookline.core.testing.scheduler_suite import SchedulerSuite

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines() if line]
SETUP = [line for line in COMMANDS if ".venv/bin/" in line]
ELSEWHERE = {
    # needs the hub or a folder of its own; test_parity.py loads checkpoints from folders, test_presets.py the presets
    'python -m core.run model=qwen3_0_6b prompt="The capital of France is"',
    "python -m core.run model=qwen3_8b model.checkpoint=/path/to/folder prompts_file=prompts.txt output=answers.jsonl",
    # needs a GPU for its size; docs/log.md has the figures
    "python -m core.bench workload=mixed256 model=qwen3_0_6b model.weights=random",
    "python -m core.bench workload=poisson model=qwen3_0_6b model.weights=random slo.ttft_s=0.2",
    "python -m core.bench -m scheduler=prefill_first,chunked engine.max_num_seqs=64,256 workload=mixed256 "
    "model=qwen3_0_6b model.weights=random",
    # need extras; test_launchers.py runs the like of them
    "python -m core.bench -m hydra/launcher=joblib hydra.launcher.n_jobs=2 scheduler=prefill_first,chunked",
    "python -m core.bench -m hydra/launcher=submitit_local scheduler=prefill_first,chunked",
    "python -m core.bench -m hydra/launcher=ray scheduler=prefill_first,chunked",
    "python -m core.bench -m hydra/sweeper=study hydra.sweeper.n_trials=8 objective=goodput_s slo.ttft_s=0.1 "
    "'engine.max_num_seqs=range(1,8)'",
}
REPORTS = [line for line in COMMANDS if "core.report" in line]
"""Of a sweep that an earlier line makes."""
POLICY = [line for line in COMMANDS if line.startswith("HOOKLINE_PLUGINS=my_policies ")]
"""Of a module that a snippet shows."""
RUN_HERE = [line for line in COMMANDS if line not in {*SETUP, *ELSEWHERE, *REPORTS, *POLICY}]


def run(line, folder):
    """Run a line as a shell would, with this interpreter as python."""
    line = line.replace("python -m", f"{shlex.quote(sys.executable)} -m")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # more threads mostly wait for each other at these sizes
    return subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("line", RUN_HERE)
def test_the_command_works(line, tmp_path):
    done = run(line, tmp_path)
    assert done.returncode == 0, done.stderr
    for report in (one for one in REPORTS if f"sweep.dir={one.split()[3]}" in line):
        page = run(report, tmp_path)
        assert page.returncode == 0, page.stderr
        assert (tmp_path / page.stdout.splitlines()[0]).read_text().startswith("<!doctype html>")
    assert done.stdout or "output=" in line or " -m " in line.replace("python -m", "")


def test_commands_that_are_not_run_here_are_still_in_the_readme():
    assert set(COMMANDS) >= ELSEWHERE
    assert REPORTS and all(any(f"sweep.dir={one.split()[3]}" in line for line in RUN_HERE) for one in REPORTS)
    assert len(RUN_HERE) >= 8


def test_the_two_set_up_lines_are_what_ci_runs():
    assert len(SETUP) == 2
    script = (ROOT / ".ci/run").read_text()
    for part in (part.strip() for line in SETUP for part in line.split("&&")):
        assert part in script, part


SNIPPETS = {
    "llm.generate": "length",
    'delta in llm.stream("def': "num_completion_tokens",
    "AsyncLLM(": "Usage(num_prompt_tokens=",
    "llm.observers": "hookline:generation_tokens_total",
}
"""What names a snippet of the library -> something it prints."""


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_library_snippet_prints_text(name, tmp_path):
    if name == "llm.observers" and PluginHost.load(environ={}).registry.find("observer", "prometheus") is None:
        pytest.skip("hookline was installed before it had observers: pip install -e .")
    if name == "llm.observers":
        pytest.importorskip("prometheus_client", reason="needs the extra: pip install hookline[prometheus]")
    snippet = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if name in block)
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert SNIPPETS[name] in done.stdout


@pytest.fixture
def policy_folder(tmp_path):
    """A folder with the policy of the README in it."""
    name, snippet = next(
        (block.split()[1], block)
        for block in re.findall(r"```python\n(.*?)```", README, re.S)
        if "register_schedulers" in block
    )
    (tmp_path / name).write_text(snippet)
    return tmp_path


def test_the_policy_of_the_readme_serves_and_its_field_is_an_option(policy_folder):
    [line] = POLICY
    done = run(line, policy_folder)
    assert done.returncode == 0, done.stderr
    assert "=== 3/3: 64 tokens, length" in done.stdout
    refused = run(line.replace("second=50", "second=many"), policy_folder)
    assert refused.returncode == 2
    assert "scheduler.tokens_per_second='many' is not a float" in refused.stderr


def test_the_policy_of_the_readme_passes_the_suite_as_it_says(policy_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(policy_folder))
    policies = importlib.import_module("my_policies")
    monkeypatch.delitem(sys.modules, "my_policies")

    class Suite(SchedulerSuite):
        def make(self):
            return policies.ShortestFirst(policies.ShortestFirstConfig())

    assert failures(Suite) == []


def test_the_error_in_the_readme_is_the_error(tmp_path):
    done = run("python -m core.run model=qwen4", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("hookline: error: no model named 'qwen4'. Did you mean 'qwen3'? Available: qwen3, ")
    assert "Traceback" not in done.stderr
