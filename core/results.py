"""Shows finished outputs: readable text on standard output, or JSON lines in a file, whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from core.errors import ConfigError

if TYPE_CHECKING:
    from core.request import RequestOutput


def print_text(outputs: Sequence[RequestOutput], stream: TextIO | None = None) -> None:
    """Print each prompt followed by its completion, under a line with its number, tokens and finish reason."""
    stream = sys.stdout if stream is None else stream
    for number, output in enumerate(outputs, start=1):
        if output.error is None:
            head = f"=== {number}/{len(outputs)}: {len(output.token_ids)} tokens, {output.finish_reason.value}"
            print(f"{head}\n{_prompt_text(output)}{_completion(output)}\n", file=stream)
    stream.flush()


def refusals(outputs: Sequence[RequestOutput]) -> list[str]:
    """One line for each request that was refused."""
    return [
        f"request {number}/{len(outputs)} was refused: {' '.join(output.error.split())}"
        for number, output in enumerate(outputs, start=1)
        if output.error is not None
    ]


def write_json_lines(outputs: Sequence[RequestOutput], path: Path) -> None:
    """Write one JSON object per request, in the prompts' order; refused ones have an `error`.

    Raises: ConfigError if the file cannot be written; what was there before is then still there.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(_as_json(index, output)) + "\n" for index, output in enumerate(outputs))
        _give_usual_mode(temporary)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise ConfigError(f"output={path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _as_json(index: int, output: RequestOutput) -> dict[str, Any]:
    return {
        "index": index,
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }


def _give_usual_mode(path: str) -> None:
    # mkstemp makes files that only their owner can read; results get the mode of any other new file.
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)


def _prompt_text(output: RequestOutput) -> str:
    return output.prompt if output.prompt is not None else f"({len(output.prompt_token_ids)} prompt tokens)\n"


def _completion(output: RequestOutput) -> str:
    return output.text or (f"(token ids {list(output.token_ids)})" if output.token_ids else "")
