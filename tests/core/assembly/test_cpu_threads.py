"""Threads of a CPU: what a command takes, what is asked for, and what is left alone."""

from types import SimpleNamespace

import pytest
import torch

from hookline import LLM
from hookline.core.assembly.engine import num_cpu_threads
from hookline.core.config.settings import EngineConfig
from hookline.core.errors import ConfigError


@pytest.fixture(autouse=True)
def eight_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)


def found(*, asked=None, device="cpu", hidden_size=256, num_ranks=1, is_command=True):
    resolved = SimpleNamespace(
        config=SimpleNamespace(engine=EngineConfig(cpu_threads=asked)),
        device=torch.device(device),
        spec=SimpleNamespace(hidden_size=hidden_size),
        ranks=SimpleNamespace(num_all=num_ranks),
    )
    return num_cpu_threads(resolved, is_command=is_command)


def test_a_command_computes_a_small_model_on_one_thread_a_rank_and_says_so(caplog):
    caplog.set_level("INFO", logger="hookline")
    assert (found(), found(num_ranks=2)) == (1, 2)
    assert caplog.messages[0] == "computing on 1 of 8 CPU threads, as the model is small; engine.cpu_threads=N sets N"


def test_a_command_computes_a_larger_model_on_all_threads(caplog):
    caplog.set_level("INFO", logger="hookline")
    assert found(hidden_size=1024) == 8 and caplog.messages == []


def test_the_users_own_number_of_threads_counts(monkeypatch):
    assert found(asked=3) == 3 == found(asked=3, is_command=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert found() == 8


def test_an_engine_in_python_or_on_a_gpu_leaves_the_threads_alone():
    assert found(is_command=False) is None
    assert found(device="cuda") is None


def test_no_thread_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"engine.cpu_threads=0 must be at least 1"):
        EngineConfig(cpu_threads=0)


@pytest.mark.parametrize(("asked", "expected"), [(3, [3, 3]), (None, [])])
def test_an_engine_sets_the_number_that_is_asked_for_and_no_other(monkeypatch, asked, expected):
    numbers = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    LLM(device="cpu", engine={"cpu_threads": asked, "cpu_cache_gib": 0.05, "max_model_len": 64}).close()
    assert numbers == expected
