"""Settings of the whole suite: Triton's interpreter where there is no GPU, a printed reason for each skipped test."""

import os
import signal

import pytest
import torch
from hypothesis import settings

# A shell that starts this in the background has Ctrl-C ignored, and so would every run that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # at these sizes two threads mostly wait for each other, several times the run time
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, so before any test does
settings.register_profile("nightly", max_examples=5000)  # pytest --hypothesis-profile=nightly


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a small random Qwen3."""
    from tests.hf_models import make_qwen3

    folder = tmp_path_factory.mktemp("checkpoint")
    make_qwen3(folder)
    return str(folder)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A fresh environment with Hookline's wheel in it, and nothing of this tree."""
    from tests.fresh_environment import ROOT, FreshEnvironment

    environment = FreshEnvironment(tmp_path_factory.mktemp("installed"))
    environment.install([ROOT])
    return environment
