"""Stands in for the driver's library where launchers of kernels are compiled without one, as in an image's build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

LIBRARY = "libcuda.so.1"
_CALLED = re.compile(r"\bcu[A-Z]\w*(?=\()")
"""A function of the driver where C code calls it."""


@contextmanager
def linkable_driver() -> Iterator[None]:
    """Inside, Triton can link its launchers: against functions that do nothing, where the driver's library is not.

    What is linked so asks for the library by its name when it is loaded, and so finds the true one on a machine with a
    card. Without a C compiler nothing is changed: launchers are compiled at the first start then. A linker that is told
    `--as-needed`, as some are by default, would leave out a library that has none of the functions.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or _has_driver():
        yield
        return
    with TemporaryDirectory() as folder:
        source = Path(folder, "driver.c")
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in _called_functions()))
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", str(source), "-o", f"{folder}/{LIBRARY}"]
        is_made = not subprocess.run(command, capture_output=True).returncode
        with patch.dict(os.environ, {"TRITON_LIBCUDA_PATH": folder} if is_made else {}):
            yield


def _called_functions() -> list[str]:
    """The driver's functions that Triton's C code calls, its own and that of launchers."""
    package = find_spec("triton")
    if package is None or package.origin is None:
        return []
    files = Path(package.origin).parent.glob("backends/nvidia/driver.*")
    return sorted(
        {name for file in files if file.suffix in (".c", ".py") for name in _CALLED.findall(file.read_text())}
    )


def _has_driver() -> bool:
    """Whether Triton finds the driver's library."""
    try:
        from triton.backends.nvidia.driver import libcuda_dirs

        return bool(libcuda_dirs())
    except Exception:  # whatever it raises without
        return False
