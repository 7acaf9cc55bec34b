"""The lines of OpenAI's batch files: requests of the input, read and checked, and answers of the output.

The id of an output line has the input line's number and a checksum of its text. From it a second run knows that the
line is done, and that it belongs to the same input.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hookline.core.errors import ConfigError, shown
from hookline.core.util.json_lines import BOM, json_object

PATHS = (
    *(f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings")),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
"""Endpoints that a row may use."""
MAX_LINE_BYTES = 32 * 2**20
SUCCESS = '"status_code": 200'
"""Text that an answer's line contains, and a failure's does not."""
_RESPONSE = re.compile(b'"response": ({%b)?' % SUCCESS.encode())
_ID = re.compile(rb'\{"id": "batch_req_(\d{1,12})_([0-9a-f]{8})"')
EXAMPLE = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}'
"""A line of an input."""


class RowError(Exception):
    """A line without a valid request; the message says why. code: the kind of error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class InputLine:
    """A line of the input. number: counted from 1. text: None if it is too long to be kept."""

    number: int
    text: bytes | None
    checksum: int

    @property
    def id(self) -> str:
        """The id of its answer."""
        return f"batch_req_{self.number}_{self.checksum:08x}"


@dataclass(frozen=True)
class Row:
    """A request. body: as JSON."""

    custom_id: str
    path: str
    body: bytes


def lines_of(file: BinaryIO, number: int = 0) -> Iterator[InputLine]:
    """Yield the lines that are not empty; a line that is too long is reported without its text. number: of the line
    before the first.
    """
    while text := file.readline(MAX_LINE_BYTES):
        number, checksum, is_whole = number + 1, zlib.crc32(text), True
        text = text.removeprefix(BOM) if number == 1 else text
        while not text.endswith(b"\n") and (more := file.readline(MAX_LINE_BYTES)):
            checksum, is_whole, text = zlib.crc32(more, checksum), False, more
        if text.strip() or not is_whole:
            yield InputLine(number, text if is_whole else None, checksum or 1)


def num_lines(path: Path) -> int:
    """Count the lines of a file; the count may be one too high."""
    with path.open("rb") as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(2**20), b"")) + 1


def parse(line: InputLine) -> Row:
    """Parse the request of a line.

    Raises: RowError saying what the line must be.
    """
    if line.text is None:
        raise RowError("invalid_line", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        values = json_object(line.text.decode())
    except (ValueError, UnicodeDecodeError) as error:
        raise RowError("invalid_line", f"{error}; a line is a request, as {EXAMPLE}") from None
    custom_id, path, body = (values.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise RowError("invalid_line", f"custom_id={shown(custom_id)} must be a text that is not empty")
    if values.get("method") != "POST":
        raise RowError("invalid_line", f"method={shown(values.get('method'))} must be POST")
    if path not in PATHS:
        raise RowError("unsupported_url", f"url={shown(path)} is not one of {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise RowError("invalid_line", f"body={shown(body)} must be an object")
    if body.get("stream"):
        raise RowError("invalid_line", "body.stream=true: a batch gives whole answers; leave it out")
    whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return Row(custom_id, path, json.dumps(whole).encode())


def custom_id_of(line: InputLine) -> str | None:
    """The custom_id of an invalid line, if it has any."""
    try:
        found = json_object((line.text or b"").decode()).get("custom_id")
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def answer_line(
    line: InputLine, custom_id: str | None, response: dict[str, Any] | None, error: RowError | None = None
) -> bytes:
    """A line of the output."""
    told = None if error is None else {"code": error.code, "message": f"line {line.number}: {error}"}
    answer = {"id": line.id, "custom_id": custom_id, "response": response, "error": told}
    return json.dumps(answer).encode() + b"\n"


def has_failed(answer: bytes) -> bool:
    """Whether an output line reports a failure, by our own spelling of it, without parsing the line."""
    found = _RESPONSE.search(answer)
    return found is not None and found[1] is None


class Done:
    """The answered lines of an output: four bytes for each line of the input, however long the answers are."""

    def __init__(self) -> None:
        self._checksums = array("I")
        self.count = self.num_failed = 0

    @classmethod
    def read(cls, file: BinaryIO, path: Path) -> Done:
        """Read the answered lines of a file, and cut off its last line if it is incomplete.

        Raises: ConfigError if the file is not the output of a batch.
        """
        found, end = cls(), 0
        file.seek(0)
        while head := file.readline(MAX_LINE_BYTES):
            text = head
            while not text.endswith(b"\n") and (more := file.readline(MAX_LINE_BYTES)):
                text = more
            if not text.endswith(b"\n"):
                break
            known = _ID.match(head)
            if known is None:
                raise ConfigError(f"{path} holds a line that no batch wrote: {shown(head[:60])}; take another output")
            found._add(int(known[1]), int(known[2], 16))
            found.num_failed += has_failed(head)
            end = file.tell()
        file.truncate(end)
        return found

    def holds(self, line: InputLine) -> bool:
        """Whether a line is answered.

        Raises: ConfigError if the output has another line with this number: it belongs to another input.
        """
        checksum = self._checksums[line.number] if line.number < len(self._checksums) else 0
        if checksum and checksum != line.checksum:
            raise ConfigError(
                f"line {line.number} of the input is not the one that the output answers: the input was changed; "
                "take another output"
            )
        return bool(checksum)

    def _add(self, number: int, checksum: int) -> None:
        if number >= len(self._checksums):
            self._checksums.extend(bytes_of_zeros(number + 1 - len(self._checksums)))
        self.count += not self._checksums[number]
        self._checksums[number] = checksum


def bytes_of_zeros(count: int) -> array[int]:
    """An array of `count` zeros, four bytes each."""
    return array("I", bytes(count * array("I").itemsize))
