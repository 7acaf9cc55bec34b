"""Kernels compiled ahead are those that an engine finds in the compiler's cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.errors import ConfigError
from hookline.core.prebuild.pretended import CARDS, card_named

SCRIPT = Path(__file__).parents[1] / "compiled_kernels.py"


@pytest.mark.slow
def test_what_processes_compiled_is_read_from_the_cache_when_it_is_launched(tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["built"] == [[True, None]] * 4
    names = ["_rms_norm_kernel", "_rms_norm_kernel", "_silu_mul_kernel", "_route_kernel"]
    assert found["launched"] == [[name, True] for name in names]


def test_an_unknown_card_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"card=h20 is not known; known are: a100, h100, h200, l4, l40s"):
        card_named("h20")
    assert card_named("h100") is CARDS["h100"]
