"""Kernels compiled ahead are those that an engine finds in the compiler's cache."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from hookline import plugins
from hookline.core.errors import ConfigError
from hookline.core.prebuild.build import compile_one
from hookline.core.prebuild.pretended import CARDS, card_named

SCRIPT = Path(__file__).parents[1] / "compiled_kernels.py"


@pytest.mark.slow
def test_what_processes_compiled_is_read_from_the_cache_and_from_a_moved_export_when_it_is_launched(tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_CACHE_DIR": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one[:2] for one in found["built"]] == [[True, None]] * 4
    variants = [variant for _, _, variant in found["built"]]
    assert len(set(variants)) == 4 and found["launched"] == [[variant, True] for variant in variants] * 2
    assert not found["written"]
    compiled_c = [".so"] if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") else []
    assert found["suffixes"] == [".cubin", ".json", *compiled_c]  # without a driver, too
    names = ["_rms_norm_kernel", "_rms_norm_kernel", "_silu_mul_kernel", "_route_kernel"]
    assert [variant.partition("-")[0] for variant in variants] == names
    assert len(set(found["told"])) == 4 and found["asked"] == found["told"] * 2  # so an engine waits for the right one


def jit_functions():
    """All that plugins have Triton compile, by what they are called in."""
    root = Path(plugins.__path__[0])
    for path in sorted(root.rglob("*.py")):
        if "triton.jit" in path.read_text():
            name = ".".join((plugins.__name__, *path.relative_to(root).with_suffix("").parts))
            for function in vars(import_module(name)).values():
                if getattr(getattr(function, "fn", None), "__module__", None) == name:
                    yield function


def constants_and_calls(function):
    """Names of the compile-time constants that a function reads from its module, and the functions it calls."""
    from triton.language import constexpr

    read = inspect.getclosurevars(function.fn).globals
    constants = {name for name, value in read.items() if isinstance(value, constexpr)}
    return constants, [value for value in read.values() if hasattr(value, "fn")]


def constants_below(function):
    """Those of the functions that it calls, and of those they call."""
    constants = set()
    for called in constants_and_calls(function)[1]:
        constants |= constants_and_calls(called)[0] | constants_below(called)
    return constants


def test_no_kernels_key_depends_on_what_its_process_launched_before():
    """Triton 3.6 forgets the constants of a function that is called, unless the function's key was computed before."""
    pytest.importorskip("triton")
    functions = list(jit_functions())
    assert len(functions) > 90
    told = {one.__name__: constants_below(one) - constants_and_calls(one)[0] for one in functions}
    assert {name: names for name, names in told.items() if names} == {}


class Keyed:
    """A kernel that notes when its key is computed and when it is compiled."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    @property
    def cache_key(self):
        self.notes.append(f"key of {self.name}")

    def preload(self, specialization):
        self.notes.append(f"{self.name} compiled")


def test_keys_are_computed_in_the_order_in_which_an_engine_launches(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    module, notes = ModuleType("somebodys_kernels"), []
    module.first, module.second = Keyed("first", notes), Keyed("second", notes)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = [(module.__name__, name) for name in ("first", "is_gone", "second")]
    compile_one(CARDS["h200"], module.__name__, "second", "{}", before)
    assert notes == ["key of first", "key of second", "second compiled"]


def test_an_unknown_card_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"card=h20 is not known; known are: a100, rtx3090, rtx4090, l4, l40s"):
        card_named("h20")
    assert card_named("h100") is CARDS["h100"]
