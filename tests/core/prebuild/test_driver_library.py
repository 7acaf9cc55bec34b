"""Launchers are linked where no driver is so that they load where one is."""

import os
import shutil
import subprocess

import pytest

from hookline.core.prebuild import driver_library
from hookline.core.prebuild.driver_library import LIBRARY, linkable_driver

LAUNCHER = """
int cuGetErrorString(int, const char **);
const char *told(int code) { const char *text; cuGetErrorString(code, &text); return text; }
"""


@pytest.mark.parametrize("flags", [[], ["-Wl,--as-needed"]])
def test_what_is_linked_without_a_driver_asks_for_it_when_it_is_loaded(flags, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    if not (shutil.which("gcc") and shutil.which("readelf")):
        pytest.skip("no gcc and readelf on this machine")
    monkeypatch.setattr(driver_library, "_has_driver", lambda: False)
    (tmp_path / "launcher.c").write_text(LAUNCHER)
    with linkable_driver():
        folder = os.environ["TRITON_LIBCUDA_PATH"]
        command = ["gcc", *flags, "-shared", "-fPIC", "launcher.c", f"-L{folder}", f"-l:{LIBRARY}", "-o", "launcher.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
    assert "TRITON_LIBCUDA_PATH" not in os.environ
    read = subprocess.run(["readelf", "-d", "launcher.so"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert f"Shared library: [{LIBRARY}]" in read.stdout


@pytest.mark.parametrize("has_driver", [True, False])
def test_nothing_is_changed_with_a_driver_or_without_a_compiler(has_driver, monkeypatch):
    monkeypatch.setattr(driver_library, "_has_driver", lambda: has_driver)
    if not has_driver:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    before = dict(os.environ)
    with linkable_driver():
        assert dict(os.environ) == before
