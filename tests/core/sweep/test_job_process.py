"""How a job's process can end, and what is said about it. Each ends in its own way, in a real process."""

import signal
import sys

import pytest

from hookline.core.errors import CapacityError, ConfigError
from hookline.core.sweep.job_process import run_child
from hookline.core.sweep.job_status import failure


def ended(code, tmp_path, **options):
    return run_child([sys.executable, "-c", code], str(tmp_path), None, tmp_path / "log.txt", **options)


def test_what_a_job_prints_goes_to_its_log_and_piped_text_to_the_job(tmp_path):
    code = "import sys; print(sys.stdin.read()); print('aside', file=sys.stderr)"
    done = run_child([sys.executable, "-c", code], str(tmp_path), "été", tmp_path / "log.txt")
    assert done == {"status": "done", "error": None, "exit_code": 0}
    assert sorted((tmp_path / "log.txt").read_text().split()) == ["aside", "été"]


def test_an_error_of_ours_is_the_cause(tmp_path):
    code = "import sys; print('hookline: error: no model named x', file=sys.stderr); print('later'); sys.exit(2)"
    assert ended(code, tmp_path) == {"status": "failed", "error": "no model named x", "exit_code": 2}


def test_of_a_traceback_the_last_line_is_the_cause(tmp_path):
    done = ended("raise ValueError('too odd')", tmp_path)
    assert done == {"status": "failed", "error": "exit code 1: ValueError: too odd", "exit_code": 1}


def test_a_silent_failure_is_said_to_be_one(tmp_path):
    assert ended("raise SystemExit(3)", tmp_path)["error"] == "exit code 3: it printed nothing"


def test_a_killed_job_is_named_with_its_signal(tmp_path):
    done = ended("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert done["status"] == "killed" and done["exit_code"] == -9
    assert done["error"] == "killed by SIGKILL, as the system does when memory runs out"
    assert ended("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", tmp_path)["error"] == "killed by SIGTERM"


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no real-time signals on this system")
def test_a_job_that_a_signal_without_a_name_killed_is_told_with_its_number(tmp_path):
    number = signal.SIGRTMIN + 6
    done = ended(f"import os; os.kill(os.getpid(), {number})", tmp_path)
    assert (done["status"], done["error"], done["exit_code"]) == ("killed", f"killed by signal {number:d}", -number)


def test_a_job_that_takes_too_long_is_killed(tmp_path):
    done = ended("import signal; signal.pause()", tmp_path, timeout_s=0.2)
    assert done == {"status": "timed_out", "error": "not done after job_timeout_s=0.2", "exit_code": None}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("Unable to allocate 3 TiB"), ("out_of_memory", "Unable to allocate 3 TiB")),
        (CapacityError("no room\nfor it"), ("out_of_memory", "no room for it")),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), ("out_of_memory", None)),
        (ConfigError("tp=0 must be at least 1"), ("failed", "tp=0 must be at least 1")),
        (KeyError("x"), ("failed", "KeyError: 'x'")),
    ],
)
def test_an_exceptions_status_and_cause(error, expected):
    found = failure(error)
    assert found["status"] == expected[0]
    assert expected[1] is None or found["error"] == expected[1]


def test_torchs_own_error_counts_as_out_of_memory():
    import torch

    assert failure(torch.OutOfMemoryError("CUDA out of memory"))["status"] == "out_of_memory"


def test_variables_come_beside_those_of_this_process(tmp_path):
    code = "import os, sys; sys.exit(0 if os.environ['OURS'] == 'x' and os.environ['PATH'] else 1)"
    assert ended(code, tmp_path, environ={"OURS": "x"})["status"] == "done"
