"""What the driver's calls are given and what becomes of their codes, by a library that notes them."""

import ctypes
from typing import Any

import pytest

from hookline.core.distributed import cuda_driver
from hookline.core.distributed.cuda_driver import HANDLE_BYTES, Driver
from hookline.core.errors import CapacityError, HooklineError


class Library:
    """Every function returns its code, 0 if it has none, and is noted with its plain arguments."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.calls = codes, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *(getattr(argument, "value", None) for argument in arguments)))
            return self.codes.get(name, 0)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(**codes: int) -> Any:
        library = Library(**codes)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        monkeypatch.setattr(cuda_driver, "_stream", lambda: ctypes.c_void_p(7))
        monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
        return Driver(), library

    return make


def test_no_room_says_how_much_was_asked_for_and_what_to_lower(driver: Any) -> None:
    made, _ = driver(cuMemAlloc_v2=2)
    with pytest.raises(CapacityError) as error:
        made.allocate(3 << 29)
    assert str(error.value) == (
        "the GPU has no room for 1.50 GiB that ranks share; lower engine.max_num_batched_tokens or free the GPU"
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cuMemAlloc_v2", lambda made: made.allocate(64)),
        ("cuMemsetD8_v2", lambda made: made.allocate(64)),
        ("cuIpcGetMemHandle", lambda made: made.handle(1)),
        ("cuMemcpyDtoDAsync_v2", lambda made: made.copy(1, 2, 3)),
        ("cuMemHostRegister_v2", lambda made: made.register(1 << 40, 4096)),
        ("cuMemHostGetDevicePointer_v2", lambda made: made.register(1 << 40, 4096)),
        ("cuStreamWriteValue32_v2", lambda made: made.signal(1, 2)),
        ("cuStreamWaitValue32_v2", lambda made: made.wait(1, 2)),
    ],
)
def test_a_call_that_fails_is_named_with_its_code(driver: Any, name: str, call: Any) -> None:
    made, _ = driver(**{name: 801})
    with pytest.raises(
        HooklineError, match=rf"^the CUDA driver's {name} failed with code 801 while ranks shared memory$"
    ):
        call(made)


def test_a_call_that_an_old_driver_lacks_is_named(driver: Any) -> None:
    made, library = driver()
    library.cuStreamWriteValue32_v2 = None
    with pytest.raises(HooklineError, match=r"^the CUDA driver has no cuStreamWriteValue32_v2"):
        made.signal(1, 2)


def test_copies_signals_and_waits_go_to_the_current_stream(driver: Any) -> None:
    made, library = driver()
    made.copy(1 << 40, 2 << 40, 3 << 32)
    made.signal(5 << 40, 6)
    made.wait(7 << 40, 8)
    assert library.calls == [
        ("cuMemcpyDtoDAsync_v2", 1 << 40, 2 << 40, 3 << 32, 7),
        ("cuStreamWriteValue32_v2", 7, 5 << 40, 6, 0),
        ("cuStreamWaitValue32_v2", 7, 7 << 40, 8, 0),
    ]


def test_memory_that_cannot_be_opened_has_no_address(driver: Any) -> None:
    made, _ = driver(cuIpcOpenMemHandle_v2=1)
    assert made.open(bytes(HANDLE_BYTES)) == 0
    made.close(0)


def test_host_memory_is_registered_for_all_gpus_and_unregistered(driver: Any) -> None:
    made, library = driver()
    made.register(3 << 40, 4096)
    made.unregister(3 << 40)
    assert library.calls == [
        ("cuMemHostRegister_v2", 3 << 40, 4096, 3),
        ("cuMemHostGetDevicePointer_v2", None, 3 << 40, 0),
        ("cuMemHostUnregister", 3 << 40),
    ]


def test_memory_without_an_address_on_the_gpu_does_not_stay_registered(driver: Any) -> None:
    made, library = driver(cuMemHostGetDevicePointer_v2=1)
    with pytest.raises(HooklineError):
        made.register(3 << 40, 4096)
    assert library.calls[-1] == ("cuMemHostUnregister", 3 << 40)
