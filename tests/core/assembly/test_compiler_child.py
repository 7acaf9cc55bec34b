"""When the process that compiles kernels is begun before an engine's imports, and what becomes of it."""

import json
import os
import subprocess
import sys

import pytest

from hookline.core.assembly import compiler_child
from hookline.core.assembly.compiler_child import begin_early, end_early
from hookline.core.assembly.exported_kernels import MANIFEST, compiler_versions
from hookline.core.config.settings import validate
from hookline.core.errors import CheckpointError
from hookline.core.plugin.host import PluginHost
from hookline.core.util.child_python import python_command
from hookline.core.util.task_child import TaskChild

HOST = PluginHost.load()


@pytest.fixture(autouse=True)
def card(monkeypatch, tmp_path):
    """A machine with a card and some cores that has compiled nothing, and a process that has not imported torch."""
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(compiler_child, "DRIVER", driver)
    monkeypatch.setattr(compiler_child, "num_usable_cores", lambda: compiler_child.LEAST_CORES)
    monkeypatch.setattr(compiler_child, "find_spec", lambda name: name == "triton" or None)
    monkeypatch.setattr(compiler_child, "python_command", lambda target: [sys.executable, "-c", "input()"])
    monkeypatch.setattr(compiler_child, "_early", [])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield driver
    end_early()


def configured(**settings):
    return validate({"model": "qwen3_0_6b", **settings}, HOST)


def test_it_is_begun_once_and_given_to_the_engine_that_asks():
    begin_early(configured())
    begin_early(configured())
    (early,) = compiler_child._early
    child = compiler_child.compiler_child()
    assert child is early
    other = compiler_child.compiler_child()
    assert other is not early
    for one in (child, other):
        one.end()


def test_a_folder_that_is_not_there_is_told_before_torch_is_imported(tmp_path):
    """model=auto asks every model's class otherwise, which imports torch and transformers, for a typing error."""
    there = {"checkpoint": str(tmp_path)}
    for model in ({}, {"name": "qwen3"}):
        begin_early(configured(model={**model, **there}))
        with pytest.raises(CheckpointError, match=r"nowhere' does not exist; give a folder with config\.json"):
            begin_early(configured(model={**model, "checkpoint": str(tmp_path / "nowhere")}))
    with pytest.raises(CheckpointError, match=r"^model\.checkpoint 'nowhere' does not exist"):
        begin_early(configured(model={"checkpoint": "nowhere"}))
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    "model",
    [{"name": "qwen3", "checkpoint": "nowhere"}, {"checkpoint": "store:nowhere"}, {"checkpoint": "owner/nowhere"}],
)
def test_what_a_model_s_class_may_open_is_left_to_it(model):
    begin_early(configured(model=model))


def test_it_ends_if_nothing_is_to_be_compiled():
    begin_early(configured())
    (early,) = compiler_child._early
    end_early()
    assert early.process.returncode is not None and not compiler_child._early


@pytest.mark.parametrize(
    "settings",
    [{"device": "cpu"}, {"tp": 2}, {"pp": 2}, {"kernels": "torch"}, {"engine": {"compile_ahead": False}}],
    ids=str,
)
def test_it_is_not_begun_for_engines_that_will_not_need_it(settings):
    begin_early(configured(**settings))
    assert not compiler_child._early


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_neither_ends_nor_takes_it():
    begin_early(configured())
    (early,) = compiler_child._early
    forked = os.fork()
    if not forked:
        try:
            end_early()
            other = compiler_child.compiler_child()
            is_another = other.process.pid != early.process.pid
            other.end()
            os._exit(0 if is_another and not compiler_child._early else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert early.process.poll() is None and compiler_child._early == [early]
    end_early()
    assert early.process.returncode is not None


def test_a_process_that_cannot_be_begun_costs_no_start(monkeypatch):
    monkeypatch.setattr(compiler_child, "python_command", lambda target: ["/nowhere/python"])
    begin_early(configured())
    assert not compiler_child._early


@pytest.mark.parametrize("lacks", ["card", "visible card", "cores", "triton", "room", "torch", "an export"])
def test_it_is_not_begun_where_it_would_be_in_the_way(lacks, card, monkeypatch, tmp_path):
    if lacks == "card":
        card.unlink()
    elif lacks == "visible card":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif lacks == "cores":
        monkeypatch.setattr(compiler_child, "num_usable_cores", lambda: compiler_child.LEAST_CORES - 1)
    elif lacks == "triton":
        monkeypatch.setattr(compiler_child, "find_spec", lambda name: None)
    elif lacks == "room":  # something was compiled before, so this engine's kernels probably were, too
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / compiler_child.STAMP.format("1f")).touch()
    elif lacks == "torch":  # it is imported already
        monkeypatch.setitem(sys.modules, "torch", object())
    else:
        (tmp_path / MANIFEST).write_text(json.dumps({"versions": compiler_versions()}))
        begin_early(configured(engine={"kernel_cache": str(tmp_path)}))
        assert compiler_child._early  # as it was made for nothing
        end_early()
        (tmp_path / compiler_child.STAMP.format("1f")).touch()
    begin_early(configured(engine={"kernel_cache": str(tmp_path)} if lacks == "an export" else {}))
    assert not compiler_child._early


@pytest.mark.slow
@pytest.mark.parametrize("task", [None, json.dumps({"plugins": ["a plugin that is not here"]})])
def test_the_child_waits_for_its_task_and_ends_without_one(task):
    pytest.importorskip("triton")
    child = TaskChild(python_command(compiler_child.CHILD))
    child.dismiss() if task is None else child.give(task)
    assert child.process.wait(60) == (0 if task is None else 1)
    child.errors.seek(0)
    errors = child.errors.read().decode()
    assert not errors if task is None else "the process that compiles kernels sees other plugins" in errors
    child.end()


BEGINS = """
import sys
from importlib import import_module
from hookline.core.assembly import compiler_child

def begun(config):
    assert "torch" not in sys.modules, "torch was imported before"
    print("begun for", config.num_ranks)
    raise SystemExit

compiler_child.begin_early = begun
module, function, *arguments = sys.argv[1:]
getattr(import_module("hookline.core." + module), function)(arguments if function == "main" else {})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "run.command main",
        "bench.command main workload=smoke",
        "batch.command main input.jsonl output.jsonl",
        "serve.command main serve.processes=0 serve.port=0",
        "serve.processes.engine_main _load",
    ],
)
def test_whatever_starts_an_engine_begins_it_before_torch_is_imported(start, tmp_path):
    row = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    (tmp_path / "input.jsonl").write_text(json.dumps(row) + "\n")
    command = [sys.executable, "-c", BEGINS, *start.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert done.stdout.strip() == "begun for 1", done.stderr
