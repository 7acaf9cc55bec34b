"""One import name: whatever else is called core, plugins or conf, an installed Hookline works.

The wheel is installed in a fresh environment. Working folders hold modules of those names that end their importer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.fresh_environment import ROOT, FreshEnvironment

pytestmark = pytest.mark.slow
INTRUDERS = [f"{name}{form}" for name in ("core", "plugins", "conf") for form in (".py", "/__init__.py")]
ENDS = "print('a stranger was imported', flush=True)\nraise SystemExit(3)\n"
IN_EACH = """
import os, sys
import torch  # which takes longest, for all folders once

for folder in sys.argv[1:]:
    if os.fork() == 0:
        os.chdir(folder)  # which '' on the path of modules stands for
        import hookline.core.assembly.engine as engine
        print(engine.__file__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Imports the engine in a process for each folder of its arguments, as `python -c` would there."""
POLICY = """
from hookline.core.contracts import hookimpl
from hookline.core.scheduling import plan_mixed

API_VERSION = 2

class Mine:
    def __init__(self, config): pass
    def plan(self, view): return plan_mixed(view, 0.0)

@hookimpl
def register_schedulers(register):
    register("mine", "mine:Mine")
"""
SCRIPT = """
from hookline import LLM, SamplingParams

with LLM(tp=2) as llm:
    [output] = llm.generate(["def f"], SamplingParams(max_tokens=2))
print(len(output.token_ids), "tokens")
"""


def place(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(ENDS)
    return folder


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A working folder with every intruder in it."""
    return place(tmp_path, *INTRUDERS)


@pytest.fixture
def crowded_command(crowded: Path) -> Path:
    """One for the console command, which imports nothing of a working folder but the plugin it is told."""
    (crowded / "mine.py").write_text(POLICY)
    return place(crowded, "json.py", "socket.py")


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stranger" not in done.stdout + done.stderr
    return done.stdout


def test_a_module_of_that_name_in_the_working_folder_is_in_nobodys_way(
    installed: FreshEnvironment, tmp_path: Path
) -> None:
    folders = [tmp_path / str(number) for number in range(len(INTRUDERS))]
    for folder, intruder in zip(folders, INTRUDERS, strict=True):
        folder.mkdir()
        place(folder, intruder)
        assert succeeded(installed.hookline("--version", folder=folder)).startswith("hookline ")
    found = succeeded(installed.run("-c", IN_EACH, *map(str, folders))).splitlines()
    assert len(found) == len(INTRUDERS) and all(Path(file).is_relative_to(installed.site) for file in found)
    (tmp_path / "hookline.py").write_text(ENDS)
    done = installed.run("-c", IN_EACH, str(tmp_path))
    assert done.returncode == 1 and "stranger" in done.stdout, "else nothing was shown"


def test_a_run_over_two_ranks_with_a_plugin_of_the_working_folder_works(
    installed: FreshEnvironment, crowded_command: Path
) -> None:
    arguments = ["prompt=def f", "sampling.max_tokens=2", "tp=2", "scheduler=mine"]
    done = installed.hookline(*arguments, folder=crowded_command, HOOKLINE_PLUGINS="mine")
    assert succeeded(done).startswith("=== 1/1: 2 tokens, length")


def test_a_sweep_with_a_plugin_of_the_working_folder_works(installed: FreshEnvironment, crowded_command: Path) -> None:
    arguments = ["-m", "scheduler=mine,chunked", "prompt=def f", "sampling.max_tokens=2"]
    done = installed.hookline(*arguments, folder=crowded_command, HOOKLINE_PLUGINS="mine")
    assert "hookline: 2 of 2 jobs succeeded" in done.stderr, done.stderr
    succeeded(done)


def test_a_script_beside_such_modules_generates_over_two_ranks(installed: FreshEnvironment, crowded: Path) -> None:
    (crowded / "script.py").write_text(SCRIPT)
    assert succeeded(installed.run("script.py", folder=crowded)) == "2 tokens\n"


def test_a_wheel_brings_no_module_named_core(installed: FreshEnvironment, tmp_path: Path) -> None:
    done = installed.run("-c", "import core", folder=tmp_path)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'core'"


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HOOKLINE"))}


def in_the_clone(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environ = clean_environment()
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_in_a_clone_the_commands_and_the_users_names_are_found_as_core() -> None:
    assert "\nscheduler:\n" in succeeded(in_the_clone("-m", "core.run", "--cfg", "job"))
    found = succeeded(
        in_the_clone("-c", "from core import LLM; import sys; print(sys.modules[LLM.__module__].__file__)")
    )
    assert Path(found.strip()).resolve() == ROOT / "core" / "frontend" / "llm.py"


def test_an_editable_installation_finds_them_from_any_folder(tmp_path: Path) -> None:
    environment = FreshEnvironment(tmp_path)
    environment.install_editable(ROOT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert succeeded(environment.run("-m", "core.info", "chunked", folder=elsewhere)).startswith("scheduler=chunked: ")
    assert succeeded(environment.hookline("info", "chunked", folder=elsewhere)).startswith("scheduler=chunked: ")
    code = "from core import SamplingParams\nimport hookline\nassert SamplingParams is hookline.SamplingParams"
    succeeded(environment.run("-c", code, folder=elsewhere))


def test_under_the_name_core_no_module_is_imported_a_second_time() -> None:
    code = """
import importlib, sys

before = list(sys.meta_path)
import core
for command in core.COMMANDS:
    twin = importlib.import_module(f"hookline.core.{command}.command")
    assert importlib.import_module(f"core.{command}").main is twin.main, command
from core import LLM
known = {f"core.{command}" for command in core.COMMANDS}
assert {name for name in sys.modules if name.startswith("core.")} == known
assert sys.meta_path == before, "an import must not change how modules are found"
"""
    succeeded(in_the_clone("-c", code))


@pytest.mark.parametrize("name", ["engine", "layers", "serve.settings", "run.command", "desk"])
def test_any_other_module_of_core_is_not_found_under_that_name(name: str) -> None:
    done = in_the_clone("-c", f"import core.{name}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: No module named 'core.{name}'")


def test_the_wheel_ships_its_types_and_its_version(installed: FreshEnvironment) -> None:
    [wheel] = (installed.folder / "wheels").glob("hookline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"hookline/py.typed", "hookline/core/engine/engine.py", "hookline/conf/config.yaml"} <= names
    assert "hookline/serve/ray.py" in names
    assert {name.partition("/")[0] for name in names} == {
        "hookline",
        f"{wheel.stem.removesuffix('-py3-none-any')}.dist-info",
    }
    assert not [name for name in names if name.startswith("hookline/core/commands/")], "those are for clones"
    version = succeeded(installed.run("-c", "import hookline; print(hookline.__version__)")).strip()
    assert wheel.name.startswith(f"hookline-{version}-")


def test_a_wheel_that_ships_a_core_of_its_own_comes_and_goes(installed: FreshEnvironment, tmp_path: Path) -> None:
    [own] = (installed.folder / "wheels").glob("hookline-*.whl")
    other = other_wheel(tmp_path)
    try:
        installed.install_wheels([other])
        assert_works(installed)
        installed.pip("uninstall", "-y", "other-core")
        assert not (installed.site / "core" / "__init__.py").exists(), "else this test shows nothing"
        assert_works(installed)
    finally:
        installed.install_wheels([own])


def assert_works(installed: FreshEnvironment) -> None:
    assert succeeded(installed.hookline("info", "chunked")).startswith("scheduler=chunked: ")
    succeeded(installed.run("-c", "import hookline; print(hookline.SamplingParams())"))


def other_wheel(folder: Path) -> Path:
    """A distribution with a top-level package core."""
    files = {
        "core/__init__.py": ENDS,
        "other_core-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other-core\nVersion: 1.0\n",
        "other_core-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "other_core-1.0.dist-info/RECORD"
    path = folder / "other_core-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, record: "".join(f"{name},,\n" for name in [*files, record])}.items():
            archive.writestr(name, text)
    return path
