"""tests/conftest.py: when a run is spread over processes, and which tests it says are slow without being marked."""

import gc
import importlib
import sys
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

HERE = Path(__file__).parent


def config(argument=".", worker=None, xdist=True, **options):
    """What pytest hands to the hook, for a run of this file or folder."""
    option = SimpleNamespace(numprocesses=None, tx=[], usepdb=False, capture="fd", dist="no", loadscopereorder=True)
    vars(option).update(options)
    made = SimpleNamespace(option=option, args=[argument], invocation_params=SimpleNamespace(dir=HERE))
    made.pluginmanager = SimpleNamespace(hasplugin=lambda name: xdist)
    if worker is not None:
        made.workerinput = worker
    return made


def num_processes(made):
    conftest.pytest_cmdline_main(made)
    return made.option.numprocesses


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_run_of_a_folder_takes_three_processes_file_by_file():
    made = config("core")
    assert num_processes(made) == 3 and made.option.dist == "loadfile"


@pytest.mark.parametrize(
    "made",
    [
        config("test_conftest.py"),
        config("core/step/test_message.py::test_unpacking_gives_back_what_was_packed"),
        config(usepdb=True),
        config(capture="no"),
        config(xdist=False),
        config(worker={}),
    ],
    ids=["a file", "a test", "--pdb", "-s", "no xdist", "a worker"],
)
def test_other_runs_take_one_process(made):
    assert num_processes(made) is None


def test_a_run_on_a_gpu_takes_one_process(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert num_processes(config()) is None


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_number_that_is_asked_for_stays(number):
    assert num_processes(config(numprocesses=number)) == number


def test_the_longest_files_come_first_then_those_that_run_the_whole_and_those_with_most_slow_tests():
    paths = {"quick": HERE / "core" / "test_a.py", "slow": HERE / "core" / "test_b.py", "whole": HERE / "test_c.py"}
    paths |= {name: HERE / name for name in reversed(conftest.LONGEST)}
    items = [SimpleNamespace(name=name, path=path, keywords={name: 1}) for name, path in paths.items()]
    items.sort(key=conftest.long_files_first(items))
    assert [item.name for item in items] == [*conftest.LONGEST, "whole", "slow", "quick"]
    assert all(path.exists() for name, path in paths.items() if name in conftest.LONGEST)


def report(name, duration, when="call", **keywords):
    return SimpleNamespace(nodeid=name, duration=duration, when=when, keywords=keywords)


def test_a_run_ends_with_the_slow_tests_that_are_not_marked():
    lines = []
    reports = [report("long", 2.0), report("short", 0.1), report("marked", 3.0, slow=1), report("made", 4.0, "setup")]
    reporter = SimpleNamespace(
        stats={"passed": reports, "warnings": [object()]},
        section=lambda title, **options: lines.append(title),
        line=lines.append,
    )
    conftest.pytest_terminal_summary(reporter)
    assert lines == ["over 1 s and not marked slow", "  2.0 s  long"]


def test_a_search_for_garbage_goes_through_little_of_what_was_there_before_the_first_test():
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
    assert len(gc.get_objects()) < gc.get_freeze_count() / 2


def test_bytecode_is_kept_in_pytests_folder_where_it_must_not_lie_beside_its_source(monkeypatch, tmp_path):
    source = tmp_path / "kept_bytecode.py"
    source.write_text("VALUE = 1\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(tmp_path)
    with conftest.bytecode_kept(tmp_path / "kept"):
        assert importlib.import_module("kept_bytecode").VALUE == 1
    assert (sys.dont_write_bytecode, sys.pycache_prefix) == (True, None)
    assert [path.name for path in tmp_path.rglob("*.pyc")] == [Path(cache_from_source(source)).name]
    assert not (tmp_path / "__pycache__").exists()


def test_bytecode_lies_beside_its_source_where_it_may(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = sys.pycache_prefix
    with conftest.bytecode_kept(tmp_path / "kept"):
        assert (sys.dont_write_bytecode, sys.pycache_prefix) == (False, before)
