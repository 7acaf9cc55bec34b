"""`hookline warm export=FOLDER`: what it leaves in the folder. That Triton reads it: tests/plugins/test_prebuild.py."""

import json
import os
from pathlib import Path

import pytest

from hookline.core.assembly.exported_kernels import MANIFEST, compiler_versions
from hookline.core.prebuild import build as prebuild
from hookline.core.warm.command import main

FILES = ("_norm.source", "_norm.ttir", "_norm.llir", "_norm.ptx", "_norm.cubin", "_norm.json")


def compile_into_the_cache(key):
    """What Triton leaves of one kernel and of its launcher, and of one that could not be compiled."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    for name in (key, f"{key}L", f"{key}F"):
        (cache / name).mkdir()
    for name in FILES:
        (cache / key / name).write_text(f"{key} {name}")
    group = {"child_paths": {name: str(cache / key / name) for name in FILES}}
    (cache / key / "__grp___norm.json").write_text(json.dumps(group))
    (cache / f"{key}L" / "__triton_launcher.so").write_text(key)
    (cache / f"{key}F" / "_norm.source").write_text(key)


@pytest.fixture
def warm(monkeypatch, tmp_path):
    """Runs the command with a compiler that is quick, and returns its exit code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))

    def run(key, *arguments, failed=()):
        def build(*_):
            compile_into_the_cache(key)
            return prebuild.Built(1, 1, 2.5, failed, (f"_norm-{key}",))

        monkeypatch.setattr(prebuild, "build", build)
        return main(["card=h200", f"export={tmp_path / 'export'}", *arguments])

    return run


def listed(folder):
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def test_an_export_has_what_a_launch_needs_and_no_path(warm, tmp_path, capsys):
    pytest.importorskip("triton")
    target = tmp_path / "export"
    assert warm("A") == 0 and not (tmp_path / "own").exists()
    first = listed(target)
    (stamp,) = (name for name in first if name.startswith("hookline-"))
    kernel = [f"A/{name}" for name in ("_norm.json", "_norm.cubin", "__grp___norm.json")]
    assert sorted(first) == sorted([MANIFEST, stamp, *kernel, "AL/__triton_launcher.so"])
    assert all(str(tmp_path) not in path.read_text() for path in first.values())
    assert json.loads(first["A/__grp___norm.json"].read_text()) == ["_norm.cubin", "_norm.json"]
    assert json.loads(first[stamp].read_text())["variants"] == ["_norm-A"]
    told = capsys.readouterr().err.strip().splitlines()[-2:]
    assert told[0] == "hookline: 1 of 1 kernels compiled in 2.5 s, the others were there"
    assert told[1].startswith(f"hookline: {target} takes 0.0 MB")

    assert warm("B", "model=qwen3_0_6b", "model.weights=random") == 0  # another model's are added
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["versions"] == compiler_versions() and len(manifest["made_for"]) == 2
    assert "Qwen3-0.6B in torch.bfloat16 on h200" in manifest["made_for"][1]
    assert listed(target).keys() >= {*first, "B/_norm.cubin"}
    assert len(listed(target)) == len(first) + 5


def test_a_failed_kernel_leaves_no_stamp_so_that_a_start_tries_again(warm, tmp_path, capsys):
    pytest.importorskip("triton")
    assert warm("A", failed=("_rope: no",)) == 2
    assert "A/_norm.cubin" in listed(tmp_path / "export")
    assert not [name for name in listed(tmp_path / "export") if name.startswith("hookline-")]
    assert "not compiled: _rope: no" in capsys.readouterr().err


def test_a_folder_with_other_things_or_of_other_versions_is_refused(warm, tmp_path, capsys):
    pytest.importorskip("triton")
    target = tmp_path / "export"
    target.mkdir()
    (target / "notes.txt").touch()
    assert warm("A") == 2
    (target / MANIFEST).write_text(json.dumps({"versions": {**compiler_versions(), "triton": "3.5.1"}}))
    assert warm("A") == 2
    told = [
        line.rpartition(f"export={target}: ")[2] for line in capsys.readouterr().err.splitlines() if "error" in line
    ]
    here = compiler_versions()["triton"]
    assert told == [
        f"there is no {MANIFEST} in it that can be read; name another folder",
        f"it was made with triton 3.5.1, here is triton {here}; name another folder",
    ]
