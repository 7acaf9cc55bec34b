"""The files of benchmarks and sweeps, written and read: result lines, steps.npz and requests.jsonl.

docs/benchmarks.md describes them; FORMAT changes when they do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hookline.core.bench.recorder import Column, Recording, RequestRecord
from hookline.core.errors import ConfigError
from hookline.core.request_options import LINE_KEYS
from hookline.core.sweep.results import read_lines
from hookline.core.util.files import check_writable, write_whole

STEPS = "steps.npz"
REQUESTS = "requests.jsonl"
_SAID = (*LINE_KEYS, "slo")
_ARRAYS = ("drawn", "chunk_request", "chunk_tokens")


def make_records_folder(folder: Path) -> None:
    """Make a folder for a recording, before there is anything to record.

    Raises: ConfigError if nothing could be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"records={folder} cannot be made: {error.strerror or error}") from error
    check_writable(folder / REQUESTS, "records")


def write_recording(recording: Recording, folder: Path) -> None:
    """Write steps.npz and requests.jsonl into a folder, which is made if it is not there.

    Raises: ConfigError if they cannot be written; each is whole then, or as it was before.
    """
    make_records_folder(folder)
    arrays = {name: _small(getattr(recording, name)) for name in _ARRAYS}
    columns = dict(_stored(name, column) for name, column in recording.steps.items())
    sizes = {"num_blocks": recording.num_blocks, "block_size": recording.block_size, "seconds": recording.seconds}
    packed = BytesIO()
    np.savez_compressed(packed, **{**columns, **arrays, **sizes})  # type: ignore[arg-type]
    write_whole(folder / STEPS, [packed.getvalue()], "records")
    write_whole(folder / REQUESTS, (json.dumps(_line(request)) + "\n" for request in recording.requests), "records")


def read_recording(folder: Path | str) -> Recording:
    """Read the recording that `write_recording` wrote; times are rounded to microseconds.

    Raises: ConfigError naming a file that is not there or not whole.
    """
    folder = Path(folder)
    requests = [_request(line) for line in read_lines(folder / REQUESTS)]
    try:
        with (folder / STEPS).open("rb") as whole, np.load(whole) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile) as error:
        raise ConfigError(f"{folder / STEPS} cannot be read: {error}") from None
    return Recording(
        seconds=float(arrays.pop("seconds")),
        num_blocks=int(arrays.pop("num_blocks")),
        block_size=int(arrays.pop("block_size")),
        requests=requests,
        drawn=arrays.pop("drawn").astype(np.int64),
        chunk_request=arrays.pop("chunk_request").astype(np.int64),
        chunk_tokens=arrays.pop("chunk_tokens").astype(np.int64),
        steps=dict(_restored(name, column) for name, column in arrays.items()),
    )


def _line(request: RequestRecord) -> dict[str, Any]:
    """A record as JSON. Fields of the request's own options, such as its tags, are left out where they are unset."""
    values = asdict(request)
    return {key: _rounded(value) for key, value in values.items() if key not in _SAID or value}


def _request(line: Mapping[str, Any]) -> RequestRecord:
    names = [field.name for field in fields(RequestRecord)]
    return RequestRecord(**{name: line[name] for name in names if name not in _SAID or name in line})


def _stored(name: str, column: Column) -> tuple[str, Column]:
    """Seconds as whole microseconds, -1 for NaN, and everything as the smallest type: half the size of floats."""
    if not name.endswith("_s"):
        return name, _small(column)
    microseconds = np.where(np.isnan(column), -1, np.round(np.nan_to_num(column) * 1e6))
    return f"{name.removesuffix('_s')}_us", _small(microseconds.astype(np.int64))


def _restored(name: str, column: Column) -> tuple[str, Column]:
    if not name.endswith("_us"):
        return name, column.astype(np.int64)
    return f"{name.removesuffix('_us')}_s", np.where(column == -1, np.nan, column / 1e6)


def _small(column: Column) -> Column:
    low, high = np.min_scalar_type(column.min(initial=0)), np.min_scalar_type(column.max(initial=0))
    return column.astype(np.result_type(low, high))


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
