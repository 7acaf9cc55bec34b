"""What the driver refuses while ranks share memory is named with its code; memory that cannot be opened is no error."""

import ctypes

import pytest
import torch

from core.errors import HooklineError
from core.peer_memory import HANDLE_BYTES, _Driver


class FakeCuda:
    """A CUDA driver in which the named calls fail with code 2."""

    def __init__(self, *failing):
        self.failing, self.called = failing, []

    def __getattr__(self, name):
        def call(*arguments):
            self.called.append(name)
            return 2 if name in self.failing else 0

        return call


def driver(monkeypatch, *failing):
    fake = FakeCuda(*failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return _Driver(), fake


@pytest.mark.parametrize("name", ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuIpcGetMemHandle"])
def test_a_call_of_the_driver_that_fails_is_named_with_its_code(monkeypatch, name):
    one, fake = driver(monkeypatch, name)
    with pytest.raises(HooklineError, match=f"the CUDA driver's {name} failed with code 2 while ranks shared memory"):
        one.handle(one.allocate(1 << 20))
    assert fake.called[-1] == name


def test_memory_of_another_process_that_cannot_be_opened_has_no_address(monkeypatch):
    one, fake = driver(monkeypatch, "cuIpcOpenMemHandle_v2")
    assert one.open(bytes(HANDLE_BYTES)) == 0
    one.close(0)
    assert fake.called == ["cuIpcOpenMemHandle_v2"], "nothing was opened, so nothing is closed"
