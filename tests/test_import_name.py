"""One import name: whatever else is called core, plugins or conf, an installed Hookline works.

The wheel is installed in a fresh environment. Working folders hold modules of those names that end their importer.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hookline.core
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


def test_the_older_spelling_works_after_an_installation(installed: FreshEnvironment, tmp_path: Path) -> None:
    assert "\nscheduler:\n" in succeeded(installed.run("-m", "core.run", "--cfg", "job", folder=tmp_path))
    code = "from core import LLM, SamplingParams\nimport hookline\nassert LLM is hookline.LLM"
    succeeded(installed.run("-c", code, folder=tmp_path))


def test_the_older_spelling_works_in_a_clone() -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HOOKLINE"))}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)

    succeeded(python("-m", "core.run", "--cfg", "job"))
    found = succeeded(python("-c", "from core import LLM; import sys; print(sys.modules[LLM.__module__].__file__)"))
    assert Path(found.strip()).resolve() == ROOT / "core" / "frontend" / "llm.py"


@pytest.mark.parametrize(
    ("old", "instead"),
    [
        ("engine", "import hookline.core.engine"),
        ("hookspecs", "import hookline.core.contracts"),
        ("layers", "import hookline.core.layers"),
        ("llm", "import hookline"),
        ("moves", "import hookline.core.scheduling"),
        ("desk", "what plugins may import is in hookline.core.contracts, layers, scheduling, parsing and testing"),
    ],
)
def test_a_module_under_its_older_name_is_refused_with_the_public_one(
    old: str, instead: str, installed: FreshEnvironment
) -> None:
    done = installed.run("-c", f"import core.{old}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: there is no module core.{old}; {instead}"


def test_every_module_that_such_an_error_names_exists() -> None:
    for name in hookline.core._MOVED.values():
        assert importlib.util.find_spec(name), name


def test_the_wheel_ships_its_types_and_its_version(installed: FreshEnvironment) -> None:
    [wheel] = (installed.folder / "wheels").glob("hookline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"hookline/py.typed", "hookline/core/engine/engine.py", "hookline/conf/config.yaml"} <= names
    assert "hookline/serve/ray.py" in names
    assert [name for name in names if name.startswith(("core/", "plugins/", "conf/"))] == ["core/__init__.py"]
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
