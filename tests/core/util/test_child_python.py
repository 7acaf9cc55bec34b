"""Child processes: what lies in the working folder is not run in place of a library's modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.util.child_python import python_command

ROOT = str(Path(__file__).parents[3])


@pytest.mark.parametrize("name", ["json.py", "importlib.py"])
def test_a_child_runs_no_module_of_the_working_folder(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [ROOT, *(one for one in sys.path if one not in ("", ".", ROOT))])
    (tmp_path / name).write_text("import os\nos._exit(7)\n")
    done = subprocess.run(python_command("builtins:int"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_has_the_modules_and_the_arguments_of_its_parent(tmp_path, monkeypatch):
    (tmp_path / "of_the_parent.py").write_text("import sys\ndef run():\n    return len(sys.argv)\n")
    monkeypatch.setattr(sys, "path", [ROOT, *sys.path, str(tmp_path)])
    assert subprocess.run(python_command("of_the_parent:run", "a", "b"), check=False).returncode == 3
