"""tools/card: what its checks run is there and composes, budgets end what runs, tables say what the tools said.

Each check is also run in small, its tools in this process, on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from hookline import LLM
from hookline.core.assembly.resolve import resolve
from hookline.core.assembly.worker import make_kernels
from hookline.core.bench.settings import BenchKeys
from hookline.core.config.compose import compose
from hookline.core.config.settings import ENGINE_KEYS, Config, validate
from hookline.core.contracts import ModelSpec, RecurrentState, SharedCache, SlidingWindow, StateTensor, WeightTarget
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import CONF
from hookline.core.prebuild.dry_run import on_cuda, unloaded_model
from hookline.core.prebuild.pretended import CARDS, pretended
from hookline.plugins.quantizations.loading import ScaledLoading
from tests.small_models import CONFIGS
from tools import gpu_tests
from tools.bench_decode import BYTES_PER_S, IDLE, added_times, step_bytes
from tools.card import jobs as card_jobs
from tools.card.__main__ import main, parsed
from tools.card.checks import CHECKS, DECODES, other_tree
from tools.card.jobs import ROOT, SECONDS_LEFT, Job, run_job, run_jobs
from tools.card.tables import SIX


def jobs_of(check: str, *arguments: str) -> list[Job]:
    options = parsed([check, *arguments])
    options.scratch = Path("scratch")
    return CHECKS[check].jobs(options)


def config_of(overrides: list[str], host: PluginHost) -> Config:
    tree = compose(overrides, host, BenchKeys, "bench")[0].tree
    return validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)


def job(label: str, *records: dict[str, object], lines: tuple[str, ...] = (), status: str = "done") -> Job:
    return Job(label, ["tools/x.py"], lines=[*lines, *map(json.dumps, records)], status=status)


# ---- what is run


@pytest.mark.parametrize("check", CHECKS)
def test_each_job_is_a_tool_of_this_tree(check):
    assert jobs_of(check)
    for one in jobs_of(check):
        assert (ROOT / one.command[0]).is_file()


@pytest.mark.slow
def test_what_fits_a_large_shape_into_a_card_composes():
    (one,) = jobs_of("decode", "--shapes", "qwen3_next_80b_a3b")
    config = config_of([key for key in one.command[1:] if "=" in key], PluginHost.load())
    assert config.model.config.hf_overrides == {"num_hidden_layers": 12}


def test_the_presets_that_are_named_are_there():
    names = {word for check in CHECKS for one in jobs_of(check) for word in one.command if word.startswith("batch32")}
    assert names == {"batch32", "batch32_json", "batch32_records"}
    assert all((CONF / "workload" / f"{name}.yaml").is_file() for name in names)
    assert all((CONF / "model" / f"{name}.yaml").is_file() for name in DECODES)


@pytest.mark.parametrize("cores, processes", [(None, "1"), (1, "1"), (6, "3"), (64, "8")])
def test_kernels_tests_have_a_process_for_two_cores(cores, processes, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    (one,) = jobs_of("tests", "--from", "tests/test_gpu_memory.py")
    assert one.command[3:] == ["--processes", processes, "--from", "tests/test_gpu_memory.py"]


def test_budgets_and_starts_of_all_checks_fit_into_calls_of_ten_minutes():
    assert all(check.budget_s <= 560 for check in CHECKS.values())


def test_the_other_tree_comes_first_on_the_path_and_runs_its_own_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/site")
    assert other_tree(tmp_path, tmp_path) == ({"PYTHONPATH": f"{tmp_path}{os.pathsep}/site"}, ROOT)
    (tmp_path / "tools").mkdir()
    assert other_tree(tmp_path, tmp_path)[1] == tmp_path
    labels = [one.label for one in jobs_of("workloads", "--before", str(tmp_path))]
    assert labels == ["before", "now", "before", "now", "before", "now"]


# ---- budgets and processes


def test_what_does_not_fit_into_the_budget_is_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(card_jobs.time, "monotonic", lambda: now[0])
    given = []

    def run(one, seconds, log):
        given.append(seconds)
        now[0] += 6
        one.status = "done"

    some = [Job(name, ["x.py"]) for name in "abc"]
    run_jobs(some, 10, io.StringIO(), run)
    assert given == [10, 4] and [one.status for one in some] == ["done", "done", "left"]


def script(folder: Path, text: str, *arguments: str) -> Job:
    (folder / "tool.py").write_text(text)
    return Job("one", [str(folder / "tool.py"), *arguments])


LEAVES_A_CHILD = """import os, subprocess, sys
held = os.open(sys.argv[2], os.O_WRONLY)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[held])
print('RESULT {"told": %s}' % sys.argv[1])
"""


@pytest.mark.slow
def test_a_job_ends_with_its_children_and_its_records_are_kept(tmp_path):
    held = tmp_path / "held"
    os.mkfifo(held)
    reading, log, poll = os.open(held, os.O_RDONLY | os.O_NONBLOCK), io.StringIO(), select.poll()
    one = script(tmp_path, LEAVES_A_CHILD, SECONDS_LEFT, str(held))
    run_job(one, 500, log)
    assert one.status == "done" and one.record("told") == {"told": 450} and "RESULT" in log.getvalue()
    poll.register(reading, 0)
    assert poll.poll(60_000) == [(reading, select.POLLHUP)]  # nobody holds the other end any more
    os.close(reading)


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_one_that_fails_says_so(tmp_path):
    one = script(tmp_path, "import time; time.sleep(600)")
    run_job(one, 0.2, io.StringIO())
    assert one.status == "out of time"
    one = script(tmp_path, "raise SystemExit('no card')")
    run_job(one, 60, io.StringIO())
    assert (one.status, one.lines) == ("failed", ["no card"])


# ---- tables


def bench(name: str, tokens: float, first: float, **step: float) -> dict[str, object]:
    metrics = {"output_tok_s": tokens, "prompt_tok_s": 10 * tokens, "step_times": {"decode": step}}
    return {"name": name, "metrics": metrics, "first": {**metrics, "output_tok_s": first, "prompt_tok_s": first}}


def test_starts_have_phases_and_what_was_compiled():
    ended = job(
        "cold",
        {"start_phases_s": {"imports": 4.0, "graphs": 2.5}, "late_work": {"graph": 0, "kernel_compiled": 2}},
        lines=(
            "hookline: compiled again although compiled ahead, 1.5 s: _decode_kernel 17; Triton's cache has them",
            "hookline: engine start: 6.5 s = imports 4.0 + graphs 2.5; kernels compiled 3 in 1.0 s",
        ),
    )
    rows = CHECKS["start"].table([ended, job("warm", status="left")])
    assert rows[:4] == [
        ["seconds", "cold", "warm"],
        ["ready", "6.5", "–"],
        ["imports", "4.0", "–"],
        ["graphs", "2.5", "–"],
    ]
    assert rows[4] == ["kernels", "kernels compiled 3 in 1.0 s", "–"]
    assert rows[5][1].startswith("1.5 s: _decode_kernel 17") and rows[5][2] == "none"
    assert rows[6] == ["late work", "kernel_compiled 2", "–"]


def test_workloads_of_two_trees_are_the_fastest_of_their_turns():
    host = "chunked         256 decoding,   0 waiting:    300.0 us a step"
    before = job("before", bench("single", 100, 90), bench("prefill", 5, 25), lines=(host,))
    now = job("now", bench("single", 110, 99, host_ms=0.3, device_ms=0.5), lines=(host.replace("300", "330"),))
    rows = CHECKS["workloads"].table([before, now, job("before", bench("single", 105, 105)), job("now")])
    assert rows[0][1:4] == ["before", "now", "now / before"]
    assert rows[1] == ["single", "105; 1.000", "110; 0.900", "1.048", "0.300, 0.500"]
    assert rows[6] == ["prefill", "50; 0.500", "–; –", "–", "–, –"]
    assert rows[7] == ["host, us: chunked 256 decoding, 0 waiting", "300.0", "330.0", "1.100", ""]


def test_structured_output_stands_beside_plain_completions_of_its_process():
    turns = [job("as it is", bench("batch32", 200, 1), bench("batch32_json", speed, 1)) for speed in (180, 190)]
    rows = CHECKS["grammars"].table([*turns, job("one thread", status="failed")])
    assert rows[0][1:] == ["as it is", "one thread"]
    assert rows[2] == ["batch32_json", "180 (0.900); 190 (0.950)", "–"]


def test_a_decode_step_stands_beside_its_floor():
    told = {"floor_ms": 6.7, "device_ms": 10.0, "first_device_ms": 10.1, "bytes": {"weights": 7.5e9}, "late_work": {}}
    rows = CHECKS["decode"].table([job("gemma3_4b", told), job("qwen3_8b", status="out of time")])
    assert rows[1] == ["gemma3_4b", "10.00", "6.70", "0.670", "weights 7.50", "10.10", "none"]
    assert rows[2][4] == "out of time" and rows[2][1] == "–"


def test_shapes_have_a_row_for_each_workload_and_the_waits_of_an_open_loop():
    waits = {"ttft_s": {"p50": 0.0144, "p99": 0.0171}, "tpot_s": {"p50": 0.0068, "p99": 0.0096}}
    open_loop = bench("poisson", 3916, 3900)
    open_loop["metrics"] = {**open_loop["metrics"], **waits}
    closed = job("qwen3_8b", bench("single", 240, 237, device_ms=4.19), bench("batch32", 5000, 4000))
    rows = CHECKS["shapes"].table([closed, job("qwen3_8b 60/s", open_loop), job("other", status="left")])
    assert rows[1:] == [
        ["qwen3_8b single", "240", "0.988", "4.190", "", ""],
        ["qwen3_8b batch32", "5,000", "0.800", "–", "", ""],
        ["qwen3_8b 60/s poisson", "3,916", "0.996", "–", "14.4, 17.1", "6.8, 9.6"],
        ["other", "left", "", "", "", ""],
    ]
    assert {len(row) for row in rows} == {6}


def test_shapes_are_asked_for_by_preset():
    closed, open_loop = jobs_of("shapes", "--shapes", "llama3_8b")
    assert "model=llama3_8b" in closed.command and "workload.request_rate=60" in open_loop.command
    assert "poisson" in open_loop.command and open_loop.label == "llama3_8b 60/s"


def test_the_mode_s_table_has_its_tests_too():
    tests = job("bits", {"files": {"a.py": 9}}, lines=(".as it is, chunked: 125 batches, 3 preemptions, 9 cached",))
    rows = CHECKS["invariance"].table([job("off", bench("single", 100, 1)), job("on", bench("single", 60, 1)), tests])
    assert rows[1] == ["single", "100", "60", "0.600"] and rows[3] == ["mixed256", "–", "–", "–"]
    assert rows[4:6] == [["tests: file", "passed", "failed", "skipped"], ["tests: a.py", "0", "0", "0"]]
    assert rows[6][0] == "as it is, chunked: 125 batches, 3 preemptions, 9 cached"


def test_serving_has_the_open_loops_and_the_first_minutes():
    loop = {"first": {"ttft_ms": [5.0, 6.0, 7.0], "gap_ms": [1.0, 2.0, 3.0]}}
    parts = {"p50": 4.0, "p99": 9.0}, {"p50": 5.0, "p99": 6.0}
    minute = {"first_20_s": parts[0], "after": parts[1], "late_work": {"graph": 0}}
    rows = CHECKS["serving"].table([job("freeze_gc=true", loop), job("40/s", minute), job("120/s", status="left")])
    assert rows[1] == ["AsyncLLM freeze_gc=true", "5.0, 7.0", "1.0, 3.0", "", ""]
    assert rows[2] == ["40/s", "20 s: 4.0, 9.0; after: 5.0, 6.0", "", "1.500", "none"]
    assert rows[3][:2] == ["120/s", "left"]


def test_files_that_were_not_begun_are_left():
    done = {"file": "a.py", "passed": 3, "failed": ["a.py::test_it"], "skipped": 0, "seconds": 2.5, "left": 1}
    rows = CHECKS["tests"].table([job("tests", {"files": {"a.py": 5, "b.py": 7}}, done)])
    assert rows[1:] == [
        ["a.py", "3", "1", "0", "1", "2.5"],
        ["FAILED a.py::test_it", "", "", "", "", ""],
        ["b.py", "0", "0", "0", "7", "0"],
    ]


# ---- the floor of a decode step


@pytest.mark.slow
def test_a_real_shape_has_its_floor_without_memory_for_it():
    """With windows, experts, and an embedding of which a step reads a few rows."""
    host = PluginHost.load()
    config = config_of(["model=gpt_oss_20b", "model.weights=random"], host)
    with pretended(CARDS["h200"], lambda *_: None):
        resolved = resolve(on_cuda(config), host)
        model = unloaded_model(resolved, make_kernels(resolved))
        num_bytes = step_bytes(model, resolved.checkpoint.config, 256, 576, torch.bfloat16)
    assert {name: round(size / 1e9, 2) for name, size in num_bytes.items()} == {
        "weights": 40.67,
        "cache": 4.43,
        "states": 0,
    }
    assert round(1000 * sum(num_bytes.values()) / BYTES_PER_S, 2) == 10.74


class Half:
    """A model of a layer with a window, one with a state, and one that sees what the first one keeps."""

    @classmethod
    def spec(cls, hf_config):
        state = RecurrentState((("s", StateTensor((4, 5), "float32")), ("t", StateTensor((3,)))))
        return ModelSpec(3, 4, 2, 8, 16, 100, 64, layers=(SlidingWindow(10), state, SharedCache(0)))

    def weight_targets(self):
        embedding, head, fused = torch.zeros(100, 16), torch.zeros(100, 16), torch.zeros(2, 16)
        experts = torch.zeros(10, 16)  # the last one is of every token
        return {
            "model.embed_tokens.weight": WeightTarget.whole(embedding),
            "lm_head.weight": WeightTarget.whole(head),
            "layers.0.up.weight": WeightTarget.whole(fused[0]),
            "layers.0.down.weight": WeightTarget.whole(fused[1]),
            "layers.1.experts.up.weight": WeightTarget.joined(
                [WeightTarget.whole(one) for one in experts[:8].split(4)]
            ),
            "layers.1.shared_experts.up.weight": WeightTarget.whole(experts[8:]),
            "layers.1.unused": WeightTarget.ignored(),
        }


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_the_bytes_of_a_step_are_what_its_rows_need(name):
    config = {name: 4, "num_experts_per_tok": 1}
    found = step_bytes(Half(), config, 2, 30, torch.bfloat16)
    assert found["weights"] == 4 * (1600 + 32 + 32 + 128 * (1 - 0.75**2))  # no embedding; a fused weight once
    assert found["cache"] == 2 * (10 + 10) * 2 * 2 * 8 * 2
    assert found["states"] == 2 * 2 * (20 * 4 + 3 * 2)


class Latent(Half):
    """Values are the last six numbers of their keys."""

    @classmethod
    def spec(cls, hf_config):
        return ModelSpec(3, 4, 1, 8, 16, 100, 64, value_dim=6)


def test_values_that_are_part_of_their_keys_are_read_with_them():
    assert step_bytes(Latent(), {}, 2, 30, torch.bfloat16)["cache"] == 2 * 3 * 30 * 8 * 2


def test_the_floor_of_quantised_weights_allocates_nothing(monkeypatch):
    """The cache has the memory by then: 30B-A3B in FP8 went out of memory when its weights were counted."""
    config = {**CONFIGS["llama"], "tie_word_embeddings": False}
    model = {"name": "llama", "checkpoint": "", "weights": "random", "random_shape": config}
    allocated: list[torch.Tensor] = []
    zeros = ScaledLoading._zeros
    monkeypatch.setattr(ScaledLoading, "_zeros", lambda *a, **k: allocated.append(zeros(*a, **k)) or allocated[-1])
    with LLM(model=model, quantization={"name": "fp8_block"}, device="cpu", engine={"num_blocks": 20}) as llm:
        loaded, num_loaded = llm.engine.executor.runner.model, len(allocated)
        found = step_bytes(loaded, config, 1, 30, torch.float32)
    assert len(allocated) == 2 * num_loaded
    assert all(isinstance(one, FakeTensor) for one in allocated[num_loaded:])
    assert found["weights"] > sum(one.nbytes for one in allocated[:num_loaded]) > 0


def test_a_kernel_counts_with_what_it_adds_behind_those_before_it():
    spans = [
        ("norm", 14.0, 15.0),
        ("product", 0.0, 10.0),
        ("norm", 4.0, 11.0),
        ("inside", 5.0, 6.0),
        ("copy", 15.0, 17.5),
    ]
    found = added_times(spans)
    assert {name: (one.launches, one.added_us, one.own_us) for name, one in found.items()} == {
        "product": (1, 10.0, 10.0),
        IDLE: (1, 3.0, 3.0),
        "copy": (1, 2.5, 2.5),
        "norm": (2, 2.0, 8.0),  # the first waited for the product
        "inside": (1, 0.0, 1.0),
    }
    outer_first = added_times([("inner", 0.0, 1.0), ("outer", 0.0, 10.0)])
    assert {name: one.added_us for name, one in outer_first.items()} == {"outer": 10.0, "inner": 0.0}
    assert next(iter(found)) == "product", "the largest first"
    assert sum(one.added_us for one in found.values()) == 17.5


# ---- the tools, in small


def run_here(one: Job, seconds: float, log: io.StringIO) -> None:
    """In place of a process of its own."""
    out, before = io.StringIO(), sys.argv
    sys.argv = [str(one.root / one.command[0]), *one.command[1:]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            sys.path.insert(0, str(ROOT / "tools"))
            runpy.run_path(sys.argv[0], run_name="__main__")
        one.status = "done"
    except SystemExit as ended:
        one.status = "failed" if ended.code else "done"
    finally:
        sys.path.remove(str(ROOT / "tools"))
        sys.argv = before
        one.lines = out.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("check", [name for name in CHECKS if name not in ("invariance", "tests")])
def test_a_check_in_small_fills_its_table(check, tmp_path, capsys):
    assert main([check, "--small", "--device", "cpu", "--turns", "1", "--out", str(tmp_path)], run_here) == 0
    told = json.loads((tmp_path / f"{check}.json").read_text())
    assert {one["status"] for one in told["jobs"]} == {"done"}
    missing = ("kernels", *(SIX[1:5] if check == "workloads" else ()))  # not compiled, and not run in small
    assert [row for row in told["table"] if row[1].startswith("–") and row[0] not in missing] == []
    shown = capsys.readouterr().out.splitlines()
    assert shown[-len(told["table"]) + 1] == f"| {' | '.join(told['table'][1])} |"


def decode_kernels(*arguments: str) -> Job:
    one = Job("decode", ["tools/bench_decode.py", "--tokens", "16", "--kernels", *arguments, "repeats=1"])
    run_here(one, 60, io.StringIO())
    return one


@pytest.mark.slow
def test_a_decode_step_is_told_by_kernel():
    """Of decodes alone: with overlap the first step that is committed is one of prompts, of which there are several."""
    sizes = ["engine.max_num_seqs=8", "engine.max_num_batched_tokens=16", "engine.overlap=true"]
    one = decode_kernels("--rows", "2", "--prompt", "40", *sizes)
    assert one.status == "done"
    kernels = one.record("kernels")["kernels"]
    launches = {name: each["launches"] for name, each in kernels.items()}
    assert launches["aten::log_"] == 8, "one random draw in each of eight steps"
    assert launches["aten::linear"] % 8 == 0 and kernels["aten::linear"]["added_us"] > 0


@pytest.mark.slow
def test_what_does_not_go_on_decoding_is_not_told_as_a_decode_step():
    with pytest.raises(ValueError, match="never decoded in one step"):
        decode_kernels("--rows", "3", "--prompt", "8", "engine.max_num_seqs=2", "engine.max_model_len=64")


# ---- test files until a time is up

FILES = {
    "test_a.py": "def test_one(): pass\n\n\ndef test_two(): assert False\n",
    "test_b.py": "import pytest\n\npytest.skip('no card', allow_module_level=True)\n",
    "test_c.py": "import no_such_module\n",
    "test_d.py": "import pytest\n\n\n@pytest.mark.skip\ndef test_one(): pass\n\n\ndef test_two(): pass\n",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which pytest adds the folder
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield list(FILES)
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def run_files(capsys, *arguments: str) -> tuple[int, Job]:
    code = gpu_tests.main([*arguments, "--", "-p", "no:timeout"])  # whose timer is the outer test's
    return code, Job("tests", [], lines=capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_each_file_is_told_with_its_outcomes_even_if_it_cannot_be_imported(files, capsys, monkeypatch):
    monkeypatch.setattr(gpu_tests, "TOLD_EVERY_S", -1)
    code, one = run_files(capsys, *files)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert [told["left"] for told in one.records if told.get("file") == "test_a.py"] == [1, 1, 0]  # a failure at once
    assert [row[:5] for row in CHECKS["tests"].table([one])[1:]] == [
        ["test_a.py", "1", "1", "0", "0"],
        ["FAILED test_a.py::test_two", "", "", "", ""],
        ["test_d.py", "1", "0", "1", "0"],
        ["test_c.py", "0", "1", "0", "0"],
        ["FAILED test_c.py", "", "", "", ""],
        ["test_b.py", "0", "0", "1", "0"],
    ]


@pytest.mark.slow
def test_when_the_time_is_up_the_rest_is_left(files, capsys):
    code, one = run_files(capsys, "--seconds", "0", "test_d.py", "test_a.py")
    assert code == pytest.ExitCode.INTERRUPTED
    rows = CHECKS["tests"].table([one])
    assert [row[:5] for row in rows[1:]] == [["test_d.py", "0", "0", "0", "2"], ["test_a.py", "0", "0", "0", "2"]]


def command_in(folder: Path, files: dict[str, str], *arguments: str) -> list[str]:
    """The tool's, with these files of the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    settings = [f"--rootdir={folder}", "-p", "no:schemathesis"]  # which takes a second of each process
    return [sys.executable, str(ROOT / "tools" / "gpu_tests.py"), *arguments, *files, "--", *settings]


def run_in(folder: Path, files: dict[str, str], *arguments: str) -> tuple[int, Job]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = command_in(folder, files, *arguments)
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, Job("tests", [], lines=ran.stdout.splitlines())


PROCESS = "import os\n\n\ndef test_process(): assert 'PYTEST_XDIST_WORKER' {} os.environ\n"
KERNELS = {f"tests/plugins/test_triton_{name[5:]}": text for name, text in FILES.items()}


@pytest.mark.slow
def test_kernels_have_processes_of_their_own_after_engines(tmp_path):
    files = {
        "tests/plugins/test_cublaslt.py": PROCESS.format("in"),
        **KERNELS,
        "tests/test_gpu_one.py": PROCESS.format("not in"),
    }
    code, one = run_in(tmp_path, files, "--processes", "2")
    assert code == pytest.ExitCode.TESTS_FAILED
    rows = [row[:5] for row in CHECKS["tests"].table([one])[1:]]
    assert sorted(rows) == [
        ["FAILED tests/plugins/test_triton_a.py::test_two", "", "", "", ""],
        ["FAILED tests/plugins/test_triton_c.py", "", "", "", ""],
        ["tests/plugins/test_cublaslt.py", "1", "0", "0", "0"],
        ["tests/plugins/test_triton_a.py", "1", "1", "0", "0"],
        ["tests/plugins/test_triton_b.py", "0", "0", "1", "0"],
        ["tests/plugins/test_triton_c.py", "0", "1", "0", "0"],
        ["tests/plugins/test_triton_d.py", "1", "0", "1", "0"],
        ["tests/test_gpu_one.py", "1", "0", "0", "0"],
    ]
    ended = [told["file"] for told in one.records if "file" in told and told["left"] == 0 and told["passed"]]
    assert ended[0] == "tests/test_gpu_one.py"


@pytest.mark.slow
@pytest.mark.parametrize("folder, told", [("tests/plugins/test_triton", "in"), ("tests/test_gpu", "not in")])
def test_one_file_has_the_processes_of_its_kind(tmp_path, folder, told):
    name = f"{folder}_one.py"
    files = {"tests/test_gpu_before.py": "", name: PROCESS.format(told)}
    code, one = run_in(tmp_path, files, "--processes", "2", "--from", name)
    assert code == 0 and [row[:5] for row in CHECKS["tests"].table([one])[1:]] == [[name, "1", "0", "0", "0"]]


CARD = """import os, pathlib, time

def test_process():
    assert ("PYTEST_XDIST_WORKER" in os.environ) is {is_worker}
    pathlib.Path("card_" + os.environ["CUDA_VISIBLE_DEVICES"]).touch()
    time.sleep(0.5)  # for the other card's process
"""


@pytest.mark.slow
def test_engines_of_one_gpu_and_kernels_are_spread_over_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    looks_early = "import os, pathlib\n\npathlib.Path('early_' + os.environ['CUDA_VISIBLE_DEVICES']).touch()\n"
    (tmp_path / "conftest.py").write_text(looks_early)
    several, kernels = "tests/test_gpu_ranks.py", "tests/plugins/test_triton_a.py"
    names = [kernels, *(f"tests/test_gpu_{name}.py" for name in ("one", "two")), several]
    files = {name: CARD.format(is_worker=name != several) for name in names}
    code, one = run_in(tmp_path, files, "--processes", "2", "--cards", "2")
    rows = sorted(row[:5] for row in CHECKS["tests"].table([one])[1:])
    assert rows == [[name, "1", "0", "0", "0"] for name in sorted(names)] and code == 0
    ended = [told["file"] for told in one.records if told.get("left") == 0 and told["passed"]]
    assert (ended[0], ended[-1]) == (several, kernels)
    seen = {"5,6,7", "5", "6"}
    assert {path.name for path in tmp_path.glob("card_*")} == {f"card_{card}" for card in seen}
    assert {path.name for path in tmp_path.glob("early_*")} == {f"early_{card}" for card in seen}


def test_files_that_look_for_several_gpus_have_them():
    asking = {path for path in (ROOT / "tests").glob("test_gpu_*.py") if "device_count" in path.read_text()}
    assert {str(path.relative_to(ROOT)) for path in asking} == set(gpu_tests.SEVERAL_GPUS)


ENDS_THE_TIME = """import pytest

@pytest.mark.parametrize("number", range(40))
def test_it(number, request):
    request.config.pluginmanager.get_plugin("time limit").ends_at = 0
"""


@pytest.mark.slow
def test_workers_keep_the_files_order_and_end_with_the_test_in_which_the_time_is_up(tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_collection_modifyitems(items): items.reverse()\n")
    files = {"tests/plugins/test_triton_a.py": ENDS_THE_TIME, "tests/plugins/test_triton_b.py": ENDS_THE_TIME}
    code, one = run_in(tmp_path, files, "--processes", "2")
    assert code == pytest.ExitCode.INTERRUPTED
    assert [row[:5] for row in CHECKS["tests"].table([one])[1:]] == [
        ["tests/plugins/test_triton_a.py", "2", "0", "0", "38"],  # one of each worker
        ["tests/plugins/test_triton_b.py", "0", "0", "0", "40"],
    ]


@pytest.mark.slow
def test_kernels_for_which_no_time_was_left_are_counted(tmp_path):
    files = {**KERNELS, "tests/test_gpu_a.py": FILES["test_a.py"]}
    code, one = run_in(tmp_path, files, "--processes", "2", "--seconds", "0")
    left = {row[0]: row[4] for row in CHECKS["tests"].table([one])[1:]}
    assert code == pytest.ExitCode.INTERRUPTED
    assert (left["tests/test_gpu_a.py"], left["tests/plugins/test_triton_a.py"]) == ("2", "2")


@pytest.mark.slow
def test_a_worker_s_end_fails_its_test_alone(tmp_path):
    text = "import os\n\n\ndef test_one(): os._exit(3)\n\n\ndef test_two(): pass\n"
    code, one = run_in(tmp_path, {"tests/plugins/test_triton_a.py": text}, "--processes", "2")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert [row[:5] for row in CHECKS["tests"].table([one])[1:]] == [
        ["tests/plugins/test_triton_a.py", "1", "1", "0", "0"],
        ["FAILED tests/plugins/test_triton_a.py::test_one", "", "", "", ""],
    ]


FAILS_AND_STAYS = """import threading

def test_fails():
    left = 3
    assert left == 4, "the reason"

def test_stays(): threading.Event().wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_failure_is_told_with_its_traceback_while_other_tests_run(tmp_path, processes):
    command = command_in(tmp_path, {"tests/plugins/test_triton_a.py": FAILS_AND_STAYS}, "--processes", processes)
    lines: list[str] = []
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith('{"file":'):
                break
        os.killpg(process.pid, signal.SIGKILL)
    rows = CHECKS["tests"].table([Job("tests", [], lines=lines)])
    assert rows[1][2] == "1" and rows[2][0] == "FAILED tests/plugins/test_triton_a.py::test_fails"
    assert "E   AssertionError: the reason" in lines


@pytest.mark.slow
def test_without_pytest_xdist_one_process_runs_all(tmp_path, monkeypatch, capsys):
    name = "tests/plugins/test_triton_a.py"
    command = command_in(tmp_path, {name: PROCESS.format("not in")}, "--processes", "2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None)
    assert gpu_tests.main([*command[2:], "-p", "no:timeout"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "pytest-xdist is not installed: one process runs all tests"
    assert CHECKS["tests"].table([Job("tests", [], lines=lines)])[1][:2] == [name, "1"]


def test_a_later_call_goes_on_with_a_file(files, monkeypatch):
    assert gpu_tests.files_from(files, "test_c.py") == ["test_c.py", "test_d.py"]
    with pytest.raises(SystemExit, match=r"--from test_e.py is none of: test_a.py"):
        gpu_tests.files_from(files, "test_e.py")
    monkeypatch.setattr(gpu_tests, "ROOT", ROOT)
    found = gpu_tests.files_from([], None)
    assert "tests/test_gpu_engine.py" in found and "tests/plugins/test_triton_kernels.py" in found
    assert len(found) == len(set(found))


IMPORTED_WITH_A_CARD = """
import importlib, os, torch
torch.cuda.is_available = lambda: True
from tools.gpu_tests import files_from
for name in files_from([], None):
    try:
        importlib.import_module(name[:-3].replace("/", "."))
    except BaseException as error:  # a card that is really there, or flash-attn
        print(name, type(error).__name__)
    assert "TRITON_INTERPRET" not in os.environ, f"{name} has Triton interpret what other files want compiled"
"""


@pytest.mark.slow
def test_no_file_that_needs_a_card_has_triton_interpret_where_there_is_one():
    """They share one process, and kernels that are defined after that is set are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED_WITH_A_CARD],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) <= 2, ran.stdout
