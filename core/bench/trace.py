"""Recorded requests as a load: a .jsonl file with one request a line, in order of arrival or not.

A line holds `arrival_s` (seconds after the start), `output_tokens` (how many to generate) and the prompt: as
`prompt_token_ids`, as text in `prompt`, or as a number of random tokens in `prompt_tokens`. It may hold `priority`,
`tags`, `deadline_s`, `cache_salt` and `slo`, a mapping of bounds. Further keys belong to the recorder, so the
requests.jsonl of a benchmark is a trace, too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import MAX_PROMPT_TOKENS, Load, LoadRequest, TokenSource, WorkloadConfig
from hookline.core.config.schema import build
from hookline.core.errors import ConfigError, RequestError, shown
from hookline.core.request_options import LINE_KEYS, RequestOptions
from hookline.core.sampling_params import as_float
from hookline.core.util.files import path_of, read_bounded
from hookline.core.util.json_lines import json_object, numbered_lines

PROMPT_KEYS = ("prompt_token_ids", "prompt", "prompt_tokens")


def read_trace(
    workload: WorkloadConfig,
    vocab_size: int,
    repetition: int = 0,
    encode: Callable[[str], list[int]] | None = None,
) -> Load:
    """The load that workload.trace recorded.

    encode: makes token ids of text; without it a trace with texts is refused.
    Raises: ConfigError naming the file, the line, the key and what it must be.
    """
    assert workload.trace is not None
    path = path_of(workload.trace)
    rng = random.Random(workload.seed)
    source = TokenSource(rng, workload.max_token_id, vocab_size, repetition)
    requests = []
    for number, line in numbered_lines(_text(path)):
        try:
            requests.append(_request(json_object(line), workload, source, encode))
        except (ValueError, RequestError, ConfigError) as error:
            raise ConfigError(f"workload.trace={path}, line {number}: {error}") from None
    if not requests:
        raise ConfigError(f"workload.trace={path} holds no request")
    return Load(requests)


def _text(path: Path) -> str:
    try:
        return read_bounded(path, "workload.trace").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.trace={path} cannot be read: {error}") from None


def _request(
    line: Mapping[str, Any], workload: WorkloadConfig, source: TokenSource, encode: Callable[[str], list[int]] | None
) -> LoadRequest:
    arrival_s = as_float(line.get("arrival_s"))
    if not 0 <= arrival_s < math.inf:
        raise ValueError(f"arrival_s={shown(line.get('arrival_s'))} must be a number of seconds, at least 0")
    max_tokens = _count("output_tokens", line.get("output_tokens"))
    params = workload.params(max_tokens)
    options = RequestOptions(**{key: line[key] for key in LINE_KEYS if line.get(key) is not None}).checked()
    return LoadRequest(_prompt(line, source, encode), params, arrival_s, options=options, slo=_slo(line.get("slo")))


def _slo(bounds: Any) -> Slo:
    if not isinstance(bounds, Mapping | None):
        raise ValueError(f"slo={shown(bounds)} must be a mapping of ttft_s, tpot_s or e2e_s to seconds")
    slo: Slo = build(Slo, bounds or {}, "slo")
    return slo


def _prompt(line: Mapping[str, Any], source: TokenSource, encode: Callable[[str], list[int]] | None) -> list[int]:
    key = next((key for key in PROMPT_KEYS if key in line), None)
    if key is None:
        raise ValueError(f"no prompt; give one of {', '.join(PROMPT_KEYS)}")
    value = line[key]
    if key == "prompt_tokens":
        count = _count(key, value)
        if count > MAX_PROMPT_TOKENS:
            raise ValueError(f"prompt_tokens={shown(value)} must be at most {MAX_PROMPT_TOKENS}")
        return source.draw(count)
    if key == "prompt_token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ValueError("prompt_token_ids must be a list of whole numbers")
        return value
    if not isinstance(value, str):
        raise ValueError(f"prompt={shown(value)} must be text")
    if encode is None:
        raise ValueError("a prompt as text needs a tokenizer; give prompt_token_ids or prompt_tokens")
    return encode(value)


def _count(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={shown(value)} must be a whole number of at least 1")
    return value
