"""A fresh virtual environment with distributions installed from wheels, as a stranger's would be.

torch and the other dependencies are not installed again: a .pth file lends those of the running environment. Hookline
itself and what is under test are built to wheels and pip-installed, so nothing is imported from the source tree.
Their build backend is called as pip would call it, for all sources in one process: pip starts three for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
BACKEND = "hatchling.build"
BUILD = f"""
import os, sys
from {BACKEND} import build_wheel

for source in sys.argv[2:]:
    os.chdir(source)
    build_wheel(sys.argv[1])
"""
"""Builds the wheels of the folders after the first argument into the first."""


class FreshEnvironment:
    """A virtual environment below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        call([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
        lent = [path for path in sys.path if Path(path).name == "site-packages"]
        (self.site / "dependencies_of_the_tests.pth").write_text("\n".join([*lent, ""]))

    @property
    def site(self) -> Path:
        return next((self.folder / "venv" / "lib").glob("python3*/site-packages"))

    def install(self, sources: Sequence[Path]) -> list[Path]:
        """Build the wheels of some source folders and pip-install them; returns the wheels."""
        wheels = self.folder / "wheels"
        for source in sources:
            project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
            assert project["build-system"]["build-backend"] == BACKEND, source
        call([sys.executable, "-c", BUILD, str(wheels), *map(str, sources)], self.folder)
        built = sorted(wheels.glob("*.whl"))
        self.install_wheels(built)
        return built

    def install_editable(self, source: Path) -> None:
        """Install a source folder as `pip install -e` does."""
        build = f"from {BACKEND} import build_editable; build_editable({str(self.folder)!r})"
        call([sys.executable, "-c", build], source)
        [wheel] = self.folder.glob("*.whl")
        self.install_wheels([wheel])

    def install_wheels(self, wheels: Sequence[Path]) -> None:
        """Install wheels, again if they are there already."""
        self.pip("install", "--no-deps", "--no-index", "--force-reinstall", *map(str, wheels))

    def pip(self, *arguments: str) -> None:
        """Run pip for this environment; it must succeed."""
        call([*PIP, "--python", str(self.python), *arguments], self.folder)

    def run(self, *arguments: str, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run this environment's python; the result is the caller's to check."""
        return self._started([str(self.python), *arguments], folder, environ)

    def hookline(self, *arguments: str, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the console command `hookline`, as `run` does."""
        return self._started([str(self.python.with_name("hookline")), *arguments], folder, environ)

    def _started(
        self, command: Sequence[str], folder: Path | None, environ: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HOOKLINE"))}
        return subprocess.run(
            command,
            cwd=folder or self.folder,
            env={**kept, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


def call(command: Sequence[str], folder: Path) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
