"""The few calls of the CUDA driver that torch does not offer, in torch's current context and on its current stream.

They allocate memory that other processes can open, and copy and signal between GPUs. Addresses are plain numbers.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from hookline.core.errors import CapacityError, HooklineError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_AT_LEAST = 0
_FOR_ALL_GPUS = ctypes.c_uint(0x1 | 0x2)
"""CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP."""
_GIB = 1 << 30


class Driver:
    """Calls of the CUDA driver. Raises: HooklineError if one fails, with its name and error code."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        """Zeroed device memory; returns its address.

        Raises: CapacityError if there is no room.
        """
        address, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        code = self._cuda.cuMemAlloc_v2(ctypes.byref(address), size)
        if code == _OUT_OF_MEMORY:
            raise CapacityError(
                f"the GPU has no room for {num_bytes / _GIB:.2f} GiB that ranks share; lower "
                "engine.max_num_batched_tokens or free the GPU"
            )
        _check("cuMemAlloc_v2", code)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
        torch.cuda.synchronize()
        return address.value

    def handle(self, address: int) -> bytes:
        """The bytes by which another process can `open` this memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Open another process's memory; returns its address in this process, or 0 if it cannot be reached."""
        address = ctypes.c_uint64()
        found = _Handle.from_buffer_copy(handle)
        code = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), found, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return 0 if code else address.value

    def close(self, address: int) -> None:
        """Close memory that `open` returned."""
        if address:
            self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""
        self._cuda.cuMemFree_v2(ctypes.c_uint64(address))

    def register(self, address: int, num_bytes: int) -> int:
        """Make host memory, of whole pages, accessible to all GPUs; returns its address on them."""
        found = ctypes.c_uint64()
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _FOR_ALL_GPUS)
        try:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
        except HooklineError:
            self.unregister(address)
            raise
        return found.value

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Copy between GPUs, or within one, by a copy engine."""
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), size, _stream())

    def signal(self, address: int, value: int) -> None:
        """Write a 32-bit word into any GPU's or registered memory, once all earlier work of the stream is done."""
        no_flags = ctypes.c_uint(0)
        self._call("cuStreamWriteValue32_v2", _stream(), ctypes.c_uint64(address), ctypes.c_uint32(value), no_flags)

    def wait(self, address: int, value: int) -> None:
        """Let the stream wait until a 32-bit word of this GPU's or registered memory is at least the value."""
        at_least = ctypes.c_uint(_AT_LEAST)
        self._call("cuStreamWaitValue32_v2", _stream(), ctypes.c_uint64(address), ctypes.c_uint32(value), at_least)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._cuda, name, None)
        if function is None:
            raise HooklineError(f"the CUDA driver has no {name}, which ranks that share memory need")
        _check(name, function(*arguments))


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _check(name: str, code: int) -> None:
    if code:
        raise HooklineError(f"the CUDA driver's {name} failed with code {code} while ranks shared memory")
