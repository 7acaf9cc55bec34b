"""Shows finished outputs: readable text on standard output, or JSON lines in a file, whole or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hookline.core.util.files import write_whole

if TYPE_CHECKING:
    from hookline.core.outputs import RequestOutput, TokenLogprob
    from hookline.core.run.prompts import PromptLine
    from hookline.core.util.arrays import VectorArray

MAX_NUMBERS = 8
"""Of a vector, as text."""


def print_text(outputs: Sequence[RequestOutput], stream: TextIO | None = None, *, is_chat: bool = False) -> None:
    """Print each prompt followed by a completion, under a line with its number, tokens and finish reason.

    is_chat: prompts are messages and completions answers, which begin a new line.
    """
    stream = sys.stdout if stream is None else stream
    for number, output in enumerate(outputs, start=1):
        for completion in output.completions if output.error is None else ():
            which = f"{number}/{len(outputs)}" + (f", completion {completion.index + 1}" if output.others else "")
            if completion.vector is not None:
                shown = f"{_prompt_text(output)}\n{_vector_text(completion.vector)}"
                print(f"=== {which}: {len(completion.vector)} numbers\n{shown}\n", file=stream)
                continue
            head = f"=== {which}: {len(completion.token_ids)} tokens, {completion.finish_reason.value}"
            between = "\n" if is_chat and output.prompt is not None else ""
            print(f"{head}\n{_prompt_text(output)}{between}{_completion(completion)}\n", file=stream)
    stream.flush()


def usage_line(outputs: Sequence[RequestOutput]) -> str:
    """A line with a run's tokens in all, and the mean times of its served requests."""
    usages = [output.usage for output in outputs]
    num_prompt, num_cached, num_completion = (
        sum(getattr(usage, name) for usage in usages)
        for name in ("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens")
    )
    line = f"{num_prompt} prompt tokens ({num_cached} cached), {num_completion} completion tokens"
    timings = [one.timings for output in outputs for one in output.completions if one.timings is not None]
    first = [timing.time_to_first_token_s for timing in timings if timing.time_to_first_token_s is not None]
    if not first:
        return line
    queue_s = sum(timing.queue_s for timing in timings) / len(timings)
    total_s = sum(timing.total_s for timing in timings) / len(timings)
    return f"{line}; means: queued {queue_s:.3f} s, first token {sum(first) / len(first):.3f} s, end {total_s:.3f} s"


def failures(outputs: Sequence[RequestOutput]) -> list[str]:
    """A line for each request that was refused or failed, with its error."""
    return [
        f"request {number}/{len(outputs)} {_what_happened(output)}: {' '.join(output.error.split())}"
        for number, output in enumerate(outputs, start=1)
        if output.error is not None
    ]


def _what_happened(output: RequestOutput) -> str:
    has_begun = output.timings is not None and output.timings.scheduled_s is not None
    return "failed" if output.is_fault or has_begun else "was refused"


def of_lines(lines: Iterable[PromptLine], outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """An output for each line of a run, in order; that of a refused line has the id -1. outputs: of the other lines.

    Errors of prompts from a file begin with its name and line.
    """
    from hookline.core.outputs import FinishReason, RequestOutput

    rest, found = iter(outputs), []
    for line in lines:
        if line.error:
            found.append(RequestOutput(-1, None, [], [], FinishReason.ERROR, error=line.error))
            continue
        output = next(rest)
        is_placed = bool(line.place) and output.error is not None
        found.append(replace(output, error=f"{line.place}: {output.error}") if is_placed else output)
    return found


def write_results(outputs: Sequence[RequestOutput], path: Path) -> None:
    """Write vectors as an array if the name ends in .npy, else JSON lines.

    Raises: as `write_json_lines`.
    """
    if path.suffix != ".npy":
        write_json_lines(outputs, path)
        return
    from io import BytesIO

    import numpy as np

    found = [output.vector for output in outputs]
    size = max((len(vector) for vector in found if vector is not None), default=0)
    rows = [np.full(size, np.nan, dtype=np.float32) if vector is None else vector for vector in found]
    file = BytesIO()
    np.save(file, np.stack(rows))
    write_whole(path, [file.getvalue()], "output")


def write_json_lines(outputs: Sequence[RequestOutput], path: Path) -> None:
    """Write one JSON object per request, in the prompts' order; refused ones have an `error`.

    Raises: ConfigError if the file cannot be written; an existing file is unchanged then.
    """
    write_whole(path, (json.dumps(_as_json(index, output)) + "\n" for index, output in enumerate(outputs)), "output")


def _as_json(index: int, output: RequestOutput) -> dict[str, Any]:
    return {
        "index": index,
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        **_completion_json(output),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
        **_info_json(output),
        **({} if output.prompt_logprobs is None else {"prompt_logprobs": _logprobs_json(output.prompt_logprobs)}),
        **({"others": [_completion_json(other) for other in output.others]} if output.others else {}),
    }


def _info_json(output: RequestOutput) -> dict[str, Any]:
    """The request's priority, tags and deadline, as far as they are set."""
    info = {"priority": output.priority, "tags": output.tags, "deadline_s": output.deadline_s}
    return {key: value for key, value in info.items() if value}


def _completion_json(completion: RequestOutput) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        **({} if completion.logprobs is None else {"logprobs": _logprobs_json(completion.logprobs)}),
        **({} if completion.vector is None else {"vector": completion.vector.tolist()}),
    }


def _logprobs_json(logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    return [None if one is None else asdict(one) for one in logprobs]


def _prompt_text(output: RequestOutput) -> str:
    return output.prompt if output.prompt is not None else f"({len(output.prompt_token_ids)} prompt tokens)\n"


def _vector_text(vector: VectorArray) -> str:
    """The first numbers of a vector."""
    more = ", …" * (len(vector) > MAX_NUMBERS)
    return f"[{', '.join(f'{number:.6g}' for number in vector[:MAX_NUMBERS].tolist())}{more}]"


def _completion(output: RequestOutput) -> str:
    return output.text or (f"(token ids {list(output.token_ids)})" if output.token_ids else "")
