"""Engines on a card that is not there: they start, serve requests of all kinds, and launches wait for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "pretended_steps.py"
SMALL = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 512}


def faults_of(configurations, *waits):
    """The faults of each configuration, as tests/pretended_steps.py finds them."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(SCRIPT), json.dumps(configurations), *waits]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [faults for _, faults in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "configurations",
    [
        [SMALL, {**SMALL, "overlap": False}],
        [{**SMALL, "max_num_seqs": 3, "max_model_len": 64}, {**SMALL, "cuda_graphs": False}],
        [{"max_num_seqs": 1, "max_model_len": 32, "max_num_batched_tokens": 4096}],
        [{"max_num_seqs": 11, "max_model_len": 128, "max_num_batched_tokens": 32}],
    ],
    ids=["plain, in turn", "three, eager", "one", "small steps"],
)
def test_all_kinds_of_requests_are_served_without_a_wait(configurations):
    assert faults_of(configurations) == [[]] * len(configurations)


@pytest.mark.slow
def test_a_launch_that_waits_is_noticed():
    (faults,) = faults_of([SMALL], "waits")
    assert len(faults) == 1 and "a copy that waits for the card" in faults[0]
