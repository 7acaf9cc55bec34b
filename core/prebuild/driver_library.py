"""Stands in for the driver's library where launchers of kernels are compiled without one, as in an image's build."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

LIBRARY = "libcuda.so.1"


@contextmanager
def linkable_driver() -> Iterator[None]:
    """Inside, Triton can link its launchers, with an empty library in place of the driver's if that is not here.

    What is linked so asks for the library by its name when it is loaded, and so finds the true one on a machine with a
    card. Without a C compiler nothing is changed: launchers are compiled at the first start then.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or _has_driver():
        yield
        return
    with TemporaryDirectory() as folder:
        command = [compiler, "-shared", f"-Wl,-soname,{LIBRARY}", "-x", "c", os.devnull, "-o", Path(folder, LIBRARY)]
        is_made = not subprocess.run(command, capture_output=True).returncode
        with patch.dict(os.environ, {"TRITON_LIBCUDA_PATH": folder} if is_made else {}):
            yield


def _has_driver() -> bool:
    """Whether Triton finds the driver's library."""
    try:
        from triton.backends.nvidia.driver import libcuda_dirs

        return bool(libcuda_dirs())
    except Exception:  # whatever it raises without
        return False
