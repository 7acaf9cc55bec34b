"""An export of compiled kernels: when it fits, and that Triton finds its files first and never writes to it."""

import json

import pytest

from hookline.core.assembly import exported_kernels
from hookline.core.assembly.exported_kernels import MANIFEST, compiler_versions, fitting, in_export, use_exported

KEY, STAMP = "SOMEKEY", "hookline-1.json"


@pytest.fixture
def export(tmp_path):
    """An export of one kernel and one launcher."""
    folder = tmp_path / "export"
    (folder / KEY).mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"versions": compiler_versions(), "made_for": ["a model on h200"]}))
    (folder / STAMP).write_text("{}")
    for name in ("_norm.json", "_norm.cubin", "launcher.so"):
        (folder / KEY / name).write_text(f"exported {name}")
    (folder / KEY / "__grp___norm.json").write_text(json.dumps(["_norm.json", "_norm.cubin"]))
    return folder


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Makes Triton's cache manager of a key, its own cache being empty at first."""
    knobs = pytest.importorskip("triton").knobs
    from triton.runtime.cache import FileCacheManager

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(exported_kernels, "_IN_USE", {})
    monkeypatch.setattr(exported_kernels, "_REPLACED", set())
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    yield lambda key: (knobs.cache.manager_class or FileCacheManager)(key)
    monkeypatch.undo()


def test_kernels_are_read_where_the_export_lies_and_nothing_is_written_for_it(export, make, tmp_path):
    moved = export.rename(tmp_path / "moved")
    use_exported(str(moved))
    files = make(KEY)
    group = files.get_group("_norm.json")
    assert group == {name: str(moved / KEY / name) for name in ("_norm.json", "_norm.cubin")}
    assert files.get_file("launcher.so") == str(moved / KEY / "launcher.so")
    assert not (tmp_path / "own").exists()


def test_what_an_export_lacks_is_in_tritons_own_cache(export, make, tmp_path):
    use_exported(str(export))
    use_exported(str(export))  # of a second engine
    for key in (KEY, "OTHERKEY"):
        assert make(key).get_group("_rope.json") is None and make(key).get_file("_rope.cubin") is None
        path = make(key).put(b"binary", "_rope.cubin")
        make(key).put_group("_rope.json", {"_rope.cubin": path})
        assert path == str(tmp_path / "own" / key / "_rope.cubin") == make(key).get_file("_rope.cubin")
        assert make(key).get_group("_rope.json") == {"_rope.cubin": path}
    assert sorted(one.name for one in export.iterdir()) == sorted([KEY, MANIFEST, STAMP])


@pytest.mark.parametrize("damage", ["not json", '["_norm.json", "_lost.cubin"]', "{"])
def test_a_damaged_kernel_is_compiled_again(export, make, damage):
    (export / KEY / "__grp___norm.json").write_text(damage)
    use_exported(str(export))
    assert make(KEY).get_group("_norm.json") is None


def test_a_manager_of_somebody_else_stays_behind_ours(export, make, monkeypatch):
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    class Theirs(FileCacheManager):
        def get_file(self, filename):
            return f"theirs: {filename}"

    monkeypatch.setattr(knobs.cache, "manager_class", Theirs)
    use_exported(str(export))
    assert make("OTHERKEY").get_file("launcher.so") == "theirs: launcher.so"
    assert make(KEY).get_file("launcher.so") == str(export / KEY / "launcher.so")


def test_an_export_of_other_versions_or_none_at_all_is_one_line_and_left_out(export, make, tmp_path, caplog):
    manifest = json.loads((export / MANIFEST).read_text())
    manifest["versions"]["triton"] = "3.5.1"
    (export / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "empty").mkdir()
    stamp = tmp_path / "own" / STAMP
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for name in ("export", "absent", "other", "empty"):  # an image may have a place for kernels, and none in it
        use_exported(str(tmp_path / name))
        assert fitting(str(tmp_path / name)) is None and in_export(str(tmp_path / name), stamp) == stamp
    use_exported(None)
    here = compiler_versions()["triton"]
    assert [one.removeprefix(f"engine.kernel_cache={tmp_path}/") for one in caplog.messages] == [
        f"export is left out: it was made with triton 3.5.1, here is triton {here}",
        "absent is left out: there is no such folder",
        f"other is left out: there is no {MANIFEST} in it that can be read",
    ]
    assert type(make(KEY)).__name__ == "FileCacheManager"


def test_a_stamp_of_the_export_says_that_nothing_is_to_be_compiled(export, tmp_path):
    assert in_export(str(export), tmp_path / "own" / STAMP) == export / STAMP
    assert in_export(str(export), tmp_path / "own" / "hookline-2.json") == tmp_path / "own" / "hookline-2.json"
    assert in_export(None, tmp_path / "own" / STAMP) == tmp_path / "own" / STAMP


def test_a_launcher_that_does_not_load_here_is_compiled_once_and_not_for_each_kernel(export, make, tmp_path):
    use_exported(str(export))
    first = make(KEY)
    assert first.get_file("launcher.so") == str(export / KEY / "launcher.so")
    path = first.put(b"of this system", "launcher.so")
    assert first.get_file("launcher.so") == make(KEY).get_file("launcher.so") == path
    assert path == str(tmp_path / "own" / KEY / "launcher.so")
