"""docs/clients.md, and what other pages say of servers: each command and snippet is run against `hookline serve`.

What cannot be installed here is checked for its form alone.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn", reason="needs the extra: pip install hookline[serve]")

from hookline.core.batch.command import main as batch
from hookline.core.bench.command import main as bench
from hookline.core.config.compose import compose
from hookline.core.plugin.host import PluginHost
from hookline.core.serve.settings import ServeKeys, validate_serve
from tests.doc_pages import ROOT, blocks, commands

PAGE, README, BENCHMARKS = ROOT / "docs/clients.md", ROOT / "README.md", ROOT / "docs/benchmarks.md"
LINES = commands(PAGE)
CURLS = [line for page in (PAGE, README) for line in commands(page) if line.startswith("curl ")]
SERVERS = [line for line in LINES if line.startswith("hookline serve ")]
LOADS = [line for line in commands(BENCHMARKS) if " url=" in line]
LLM, BATCH = 'llm -m hookline "Say hello"', "hookline batch requests.jsonl answers.jsonl model=qwen3_0_6b"
NOT_HERE = ("docker run ", "lm_eval run ", "guidellm run ", "aiperf profile ", "evalscope perf ")
SNIPPETS = {body.split()[1]: body for language, body in blocks(PAGE) if language == "python"}
ADDRESS = "http://localhost:8000"
SMALL = ["workload.num_prompts=2", "repeats=1", "workload.prompt_len=[8,16]"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of the server of README.md, on a free port and under the name of the page's."""
    assert "hookline serve" in commands(README)
    more = ["serve.port=0", "serve.names=[qwen]", "serve.access_log=false", "engine.cpu_cache_gib=0.1"]
    command = [sys.executable, "-m", *shlex.split("hookline serve"), *more]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environ, cwd=tmp_path_factory.mktemp("serve"), **streams) as server:
        lines = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"serving qwen .* at (http://\S+)/v1", line):
                break
        else:
            pytest.fail(f"it did not start: {lines}")
        wait = ["curl", "-sS", "--fail", "--retry", "20", "--retry-delay", "1", "--retry-all-errors"]
        subprocess.run([*wait, f"{found[1]}/ready"], check=True, timeout=240)
        try:
            yield found[1]
        finally:
            server.terminate()
            server.stdout.read()
            assert server.wait(60) == 0


def test_every_command_of_the_page_is_known():
    known = {*CURLS, *SERVERS, LLM, BATCH}
    assert [line for line in LINES if line not in known and not line.startswith(NOT_HERE)] == []
    assert {*known} - {*commands(README)} <= {*LINES}
    assert set(SNIPPETS) == {"openai", "anthropic", "langchain_openai", "litellm"} and len(LOADS) == 3


@pytest.mark.parametrize("line", CURLS)
def test_curl_gets_an_answer(line, address):
    command = [*shlex.split(line.replace(ADDRESS, address)), "-sS", "--fail-with-body"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "-N" in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_the_snippet_of_an_sdk_prints_an_answer(name, address, capsys):
    pytest.importorskip(name)
    exec(compile(SNIPPETS[name].replace(ADDRESS, address), name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", sorted(SNIPPETS))
def test_a_snippet_is_python(name):
    compile(SNIPPETS[name], name, "exec")


def test_llm_answers(address, tmp_path):
    pytest.importorskip("llm")
    [models] = [body for language, body in blocks(PAGE) if language == "yaml"]
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace(ADDRESS, address))
    command = [sys.executable, "-m", "llm", *shlex.split(LLM)[1:], "--key", "none", "--no-stream"]
    environ = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    done = subprocess.run([*command, "-o", "max_tokens", "8"], capture_output=True, text=True, env=environ, timeout=240)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("line", LOADS[:2])
def test_a_benchmark_loads_the_server(line, address, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    turns = ["workload.turns=[2,2]", "workload.shared_prefix_len=8"] if "=chat " in line else []
    arguments = shlex.split(line.replace(ADDRESS, address))[2:]
    assert bench([*arguments, *SMALL, *turns, "workload.output_len=[4,8]", "workload.request_rate=20"]) == 0
    assert "ttft_s" in capsys.readouterr().out


@pytest.mark.parametrize("line", SERVERS)
def test_a_server_takes_the_keys_that_are_shown(line):
    host = PluginHost.load()
    (job,) = compose(shlex.split(line)[2:], host, ServeKeys, "serve")
    assert validate_serve(job.tree, host).serve.names == ("qwen",)


def test_a_batch_answers_the_line_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [line] = [body for language, body in blocks(PAGE) if language == "json"]
    _, _, *arguments = shlex.split(BATCH)
    (tmp_path / arguments[0]).write_text(line)
    assert batch([one for one in arguments if not one.startswith("model=")]) == 0
    answer = json.loads((tmp_path / arguments[1]).read_text())
    assert answer["custom_id"] == "1" and answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"


def test_clients_that_need_an_environment_of_their_own_read_typed_answers(address):
    python = os.environ.get("HOOKLINE_CLIENTS")
    if not python:
        pytest.skip("HOOKLINE_CLIENTS names no Python with instructor, langchain-openai, outlines and pydantic-ai")
    drill = [python, str(ROOT / "tools/drill_clients.py"), f"{address}/v1", "qwen"]
    done = subprocess.run(drill, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\S+) \S+: (\d) typed answers$", done.stdout, re.M) == [
        ("instructor", "2"),
        ("langchain-openai", "2"),
        ("outlines", "1"),
        ("pydantic-ai-slim", "4"),
    ]
