"""docs/plugins.md: its files are taken as they stand, its commands run, its suites pass; its reference is true."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hookline.core.contracts import API_VERSION
from hookline.core.contracts import hooks as hookspecs
from hookline.core.new import command as new
from hookline.core.testing.running import failures
from tests.doc_pages import ROOT, blocks, commands, run_here
from tools.plugin_reference import REFERENCE, reference

PAGE = ROOT / "docs" / "plugins.md"
BLOCKS = blocks(PAGE)
FILES = {match[1]: body for _, body in BLOCKS if (match := re.match(r"# file: (\S+)\n", body))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files in it, importable as from the current folder."""
    for name, body in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    (tmp_path / "patient_presets" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for module in {Path(name).parts[0].removesuffix(".py") for name in FILES} & (set(sys.modules) - before):
        del sys.modules[module]
    importlib.invalidate_caches()


@pytest.mark.slow
@pytest.mark.parametrize("command", commands(PAGE))
def test_the_command_works(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(command, monkeypatch) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("test_")])
def test_the_suite_passes(name: str, folder: Path) -> None:
    module = importlib.import_module(name.removesuffix(".py"))
    suites = [value for key, value in vars(module).items() if key.startswith("Test")]
    assert len(suites) == 1
    assert failures(suites[0]) == []
    del sys.modules[module.__name__]


def test_the_field_of_the_policy_with_an_option_is_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = [line for line in commands(PAGE) if "scheduler.tokens_per_second=50" in line]
    assert run_here(line.replace("second=50", "second=many"), monkeypatch) == 2
    assert "scheduler.tokens_per_second='many' is not a float" in capsys.readouterr().err


@pytest.mark.slow
def test_the_policy_with_an_option_passes_the_suite_of_schedulers(folder: Path) -> None:
    from hookline.core.testing.scheduler_suite import SchedulerSuite

    policies = importlib.import_module("my_policies")

    class Suite(SchedulerSuite):
        def make(self):
            return policies.ShortestFirst(policies.ShortestFirstConfig())

    assert failures(Suite) == []


@pytest.mark.slow
def test_the_policy_made_of_moves_passes_the_suite_of_schedulers(folder: Path) -> None:
    from hookline.core.testing.scheduler_suite import SchedulerSuite

    by_priority = importlib.import_module("by_priority")

    class Suite(SchedulerSuite):
        def make(self):
            return by_priority.ByPriority(None)

    assert failures(Suite) == []


def test_the_sampler_that_is_said_to_fail_its_suite_does(folder: Path) -> None:
    from hookline.core.testing.sampler_suite import SamplerSuite

    likeliest = importlib.import_module("likeliest")

    class Suite(SamplerSuite):
        def make(self):
            return likeliest.Likeliest(None)

    found = failures(Suite)
    assert any(line.startswith("test_draws_follow_the_softmax") for line in found)
    assert not any(line.startswith("test_temperature_zero") for line in found)


def test_every_snippet_of_python_is_a_file_or_part_of_none() -> None:
    for language, body in BLOCKS:
        if language in ("python", "yaml"):
            assert body.startswith("# file: "), body.splitlines()[0]
        if language == "python":
            ast.parse(body)


def test_the_entry_point_is_the_one_that_core_new_writes(tmp_path: Path) -> None:
    shown = tomllib.loads(next(body for language, body in BLOCKS if language == "toml"))
    folder = new.write_skeleton("scheduler", "my_policy", tmp_path / "new")
    written = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert shown["project"]["entry-points"] == written["project"]["entry-points"]


def test_the_public_names_are_there() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Stability")[2].partition("\n\nThe modules under")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", table, re.M))
    assert len(rows) == 13
    for name in rows:
        assert importlib.util.find_spec(name)  # two of them need an extra
    assert set(re.findall(r"`(\w+)`", rows["hookline"])) == set(importlib.import_module("hookline").__all__)


def test_the_version_of_the_interface_is_the_one_stated() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"API_VERSION = (\d+)", text)) == {str(API_VERSION)}
    assert f"It is {API_VERSION};" in text


def test_the_kernels_that_are_public_to_be_subclassed_are_the_registered_ones() -> None:
    kernels = importlib.import_module("hookline.plugins.kernels")
    assert kernels.TritonKernels.__module__ == "hookline.plugins.kernels.triton_backend"
    with pytest.raises(AttributeError, match="has no attribute 'TritonKernel'"):
        kernels.TritonKernel


def test_the_reference_is_what_the_tool_writes() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference(), (
        "hooks or contracts have changed: python tools/plugin_reference.py"
    )


@pytest.mark.parametrize("module", ["contracts", "layers"])
def test_every_public_class_and_function_is_in_the_reference(module: str) -> None:
    public = importlib.import_module(f"hookline.core.{module}")
    described = set(re.findall(r"^### (\w+)$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE))
    values = {name: value for name, value in vars(public).items() if not name.startswith("_")}
    found = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)}
    named = {name for name, value in found.items() if value.__name__ == name}  # other names of a class have its entry
    assert named - described == set()


def test_every_hook_is_in_the_reference_with_its_exact_signature() -> None:
    hooks = {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}
    assert hooks
    for name, hook in hooks.items():
        signature = str(inspect.signature(hook)).replace("'", "")
        assert f"\n{name}{signature}\n" in REFERENCE.read_text(encoding="utf-8"), name
