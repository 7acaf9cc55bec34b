"""The answers of a rank 0 in a process of its own: that a step was launched, its result, or its fault.

Each answer is one frame of 64-bit words: its kind, the number of the message that it answers, and then the contents of
that kind. step_server.py sends them, remote.py reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from hookline.core import errors
from hookline.core.errors import HooklineError, LostStep, RankError, RequestFault
from hookline.core.step.executor import StepResult
from hookline.core.step.timing import DeviceTime
from hookline.core.util.arrays import Array, IntArray, no_ints

LAUNCHED, RESULT, FAULT = range(3)
_WORD = 8
_NUMBERS = struct.Struct("7q2d")
"""The head of a result: kind, number, how many extras and how many arrays apart, whether extensions were timed, two
flags of the time; the time."""


def launched(number: int) -> bytes:
    """The answer that the step, or the late rows, of this number were taken."""
    return _frame(struct.pack("2q", LAUNCHED, number))


def result(number: int, found: StepResult, timed: DeviceTime | None) -> bytes:
    """The answer with the result of the step of this number. timed: None unless steps are timed."""
    time = timed or DeviceTime(0.0, 0.0)
    head = _NUMBERS.pack(
        RESULT,
        number,
        len(found.extras),
        len(found.apart),
        found.extension_seconds is not None,
        timed is not None,
        time.on_host,
        time.device_s,
        time.idle_s,
    )
    parts = [head, *_packed(found.tokens)]
    for name, array in (*found.extras.items(), *found.apart.items()):
        parts += [*_packed_text(name), *_packed_text(array.dtype.str), *_packed(array)]
    if found.extension_seconds is not None:
        parts += _packed(found.extension_seconds)
    return _frame(*parts)


def read_result(words: IntArray) -> tuple[StepResult, DeviceTime | None]:
    """Read an answer that `result` made; the arrays are views of its words."""
    head = _NUMBERS.unpack_from(words.data)
    _, _, num_extras, num_apart, has_seconds, has_time, on_host, device_s, idle_s = head
    rest = _Rest(words, _NUMBERS.size // _WORD)
    tokens = rest.array(np.int64)
    extras, apart = ({rest.text(): rest.array(rest.text()) for _ in range(count)} for count in (num_extras, num_apart))
    seconds = rest.array(np.float64) if has_seconds else None
    time = DeviceTime(device_s, idle_s, bool(on_host)) if has_time else None
    return StepResult(tokens, extras, apart, seconds), time


def fault(number: int, error: LostStep) -> bytes:
    """The answer that the step of this number failed, without any result, while the rank goes on."""
    told: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, RequestFault):
        told |= {"rows": sorted(error.rows), "extensions": error.extensions, "is_refusal": error.is_refusal}
    return _frame(struct.pack("2q", FAULT, number), words_of(told).tobytes())


def read_fault(words: IntArray) -> HooklineError:
    """Read the error of an answer that `fault` made."""
    told = read_words(words[2:])
    kind = getattr(errors, told["kind"], None)
    if kind is RequestFault:
        given = {name: told[name] for name in ("rows", "extensions", "is_refusal")}
        return RequestFault(told["text"], **given)
    if isinstance(kind, type) and issubclass(kind, LostStep):
        return kind(told["text"])
    return RankError(told["text"])


def words_of(told: Mapping[str, Any]) -> IntArray:
    """Plain data as the words of a frame."""
    text = json.dumps(told).encode()
    return np.frombuffer(text.ljust(-(-len(text) // _WORD) * _WORD), dtype=np.int64)


def read_words(words: IntArray) -> dict[str, Any]:
    """Read what `words_of` made."""
    told: dict[str, Any] = json.loads(words.tobytes())
    return told


def _frame(*parts: bytes) -> bytes:
    num_bytes = sum(map(len, parts))
    return b"".join((struct.pack("q", num_bytes // _WORD), *parts))


def _packed_text(text: str) -> list[bytes]:
    return _packed(np.frombuffer(text.encode(), dtype=np.uint8))


def _packed(array: Array) -> list[bytes]:
    """Number of dimensions, the dimensions, and the values, padded to whole words."""
    padding = -array.nbytes % _WORD
    return [struct.pack(f"{1 + array.ndim}q", array.ndim, *array.shape), array.tobytes(), b"\0" * padding]


class _Rest:
    """Reads the words of a frame one after the other."""

    def __init__(self, words: IntArray, start: int) -> None:
        self._words, self._at = words, start

    def number(self) -> int:
        """The next word."""
        self._at += 1
        return int(self._words[self._at - 1])

    def text(self) -> str:
        """The next text, as `_packed_text` wrote it."""
        return bytes(self.array(np.uint8)).decode()

    def array(self, dtype: Any) -> Any:
        """The next array, as `_packed` wrote it."""
        shape = [self.number() for _ in range(self.number())]
        count = int(np.prod(shape))
        num_words = -(-count * np.dtype(dtype).itemsize // _WORD)
        part = self._words[self._at : self._at + num_words] if num_words else no_ints()
        self._at += num_words
        return part.view(dtype)[:count].reshape(shape)
