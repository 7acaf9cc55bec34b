"""The header of a GGUF file: its metadata, and where each tensor lies. Imports no torch and reads no tensor.

Every size and count is compared with the file's bytes before anything is allocated for it, so that a broken or hostile
file costs no more than a whole one. GGUF 2 and 3, little-endian:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from hookline.core.errors import CheckpointError, shown_key

MAX_ENTRIES = 2**16
"""Most keys, and most tensors, of a file; models have a few thousand at most."""
MAX_ITEMS = 2**22
"""Most items of all arrays together; the largest vocabularies have 262,144 tokens, with three arrays of them."""
MAX_BYTES = 2**28
"""Largest header; one with a vocabulary of 262,144 tokens has 16 MiB."""
MAX_DIMS = 4
"""ggml's own limit."""
MAX_ALIGNMENT = 2**20
"""Largest `general.alignment`; files have 32."""
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter of each type of a number, by its code."""
_STRING, _ARRAY = 8, 9
_LEAST_BYTES = 8
"""Least bytes of a string, which begins with its length."""
_OTHER_BYTES = "download or copy it again"


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor in a file. shape: outermost dimension first. kind: the code of its type. start: of its bytes."""

    path: Path
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """The header of a file: its metadata by key, and its tensors by the file's names."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredBlocks]


def read_header(path: Path) -> Header:
    """Read a file's header.

    Raises: CheckpointError, in one line, for a file that is none, is cut off, or states what cannot be.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} is not a readable GGUF file ({error}); {_OTHER_BYTES}") from error


class _Reader:
    """Reads a header from its start to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.num_items = path, data, 0, 0
        self.end = min(len(data), MAX_BYTES)

    def header(self) -> Header:
        if self.data[:4] != _MAGIC:
            self.refuse("does not begin as one")
        self.at = 4
        version = self.number("I")
        if version not in _VERSIONS:
            self.refuse(f"has version {version}; versions 2 and 3 are read, little-endian ones")
        num_tensors, num_keys = self.count("tensors"), self.count("keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                self.refuse(f"has the key {shown_key(key)} twice")
            metadata[key] = self.value(self.number("I"))
        found: dict[str, StoredBlocks] = {}
        for _ in range(num_tensors):
            name = self.string()
            if name in found:
                self.refuse(f"has the tensor {shown_key(name)} twice")
            found[name] = self.tensor(name)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.refuse(f"has general.alignment {str(alignment)[:40]}, which is no power of two up to {MAX_ALIGNMENT}")
        base = -(-self.at // alignment) * alignment
        tensors = {name: StoredBlocks(self.path, one.shape, one.kind, base + one.start) for name, one in found.items()}
        return Header(metadata, tensors)

    def tensor(self, name: str) -> StoredBlocks:
        num_dims = self.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            self.refuse(f"has {num_dims} dimensions of tensor {shown_key(name)}; 1 to {MAX_DIMS} are read")
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]
        if not 0 < prod(shape) < 2**48:
            self.refuse(f"has tensor {shown_key(name)} with shape {list(shape)}")
        return StoredBlocks(self.path, shape, self.number("I"), self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            self.refuse(f"has a value of type {kind}, which is unknown")
        inner, num_items = self.number("I"), self.number("Q")
        if inner not in _SCALARS and inner != _STRING:
            self.refuse(f"has an array of type {inner}; arrays of numbers and of texts are read")
        least = _LEAST_BYTES if inner == _STRING else struct.calcsize(f"<{_SCALARS[inner]}")
        self.num_items += num_items
        if self.num_items > MAX_ITEMS:
            self.refuse(f"has arrays of more than {MAX_ITEMS} items")
        if num_items * least > self.end - self.at:
            self.refuse(f"says {num_items} items of an array, more than it has bytes for")
        if inner == _STRING:
            return [self.string() for _ in range(num_items)]
        values = list(struct.unpack_from(f"<{num_items}{_SCALARS[inner]}", self.data, self.at))
        self.at += num_items * least
        return values

    def string(self) -> str:
        size = self.number("Q")
        if size > self.end - self.at:
            self.refuse(f"says a text of {size} bytes, more than it has")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", errors="replace")

    def number(self, letter: str) -> Any:
        size = struct.calcsize(f"<{letter}")
        if self.at + size > self.end:
            self.refuse(
                "is cut off in its header"
                if self.end == len(self.data)
                else f"has more than {MAX_BYTES} bytes of header"
            )
        (found,) = struct.unpack_from(f"<{letter}", self.data, self.at)
        self.at += size
        return found

    def count(self, what: str) -> int:
        found: int = self.number("Q")
        if found > MAX_ENTRIES:
            self.refuse(f"says {found} {what}; at most {MAX_ENTRIES} are read")
        return found

    def refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a readable GGUF file: it {why}; {_OTHER_BYTES}")
