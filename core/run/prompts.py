"""Where the prompts of a command-line run come from: one of prompt, prompts, prompts_file, or standard input.

Reads text and JSON, and checks their form; whether a prompt can be served is the engine's matter. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hookline.core.cli.stdin import SOURCES, piped_text
from hookline.core.config.schema import unknown_key
from hookline.core.errors import ConfigError, RequestError, shown
from hookline.core.request_info import INFO_KEYS
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.json_lines import json_object, numbered_lines
from hookline.core.util.mappings import merge

DEFAULT_PROMPTS = ("def fibonacci(n):\n", "import os\n\nclass ", "# Read a file and ")
"""For a run that says nothing: the bundled checkpoint writes Python-looking code."""
_FORMS = ("prompt", "messages", "prompt_token_ids")


class Line(NamedTuple):
    """One prompt. info: what was given of INFO_KEYS, unchecked: a wrong value refuses this request alone."""

    prompt: Any
    params: SamplingParams
    info: Mapping[str, Any] = {}


Prompts = list[Line]


def read_prompts(
    tree: Mapping[str, Any],
    params: SamplingParams,
    stdin: Callable[[], str | None] | None = None,
    info: Mapping[str, Any] | None = None,
) -> Prompts:
    """The prompts, each with its sampling parameters and what it says of itself; params, info: of all of them.

    Without any source, standard input counts if it is piped and not empty, one prompt a line; else the default prompts.
    With a source it is not read: a script that runs Hookline in a loop keeps its own input.
    Raises: ConfigError for two sources, an unreadable file or a line of another form; RequestError for bad sampling.
    """
    given = [name for name in SOURCES if tree.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both set; give the prompts one way")
    if given == ["prompts_file"]:
        return _from_file(Path(str(tree["prompts_file"])), params, info or {})
    if given == ["prompts"]:
        prompts = _checked_list(tree["prompts"])
    elif given == ["prompt"]:
        prompts = [str(tree["prompt"])]
    else:
        prompts = _lines((stdin or piped_text)() or "") or [*DEFAULT_PROMPTS]
    return [Line(prompt, params, info or {}) for prompt in prompts]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _checked_list(prompts: Any) -> list[Any]:
    if not isinstance(prompts, list):
        raise ConfigError(f'prompts={shown(prompts)} is not a list; write prompts=\'["a", "b"]\', or prompt= for one')
    if not prompts:
        raise ConfigError("prompts=[] holds no prompt")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_list_of(prompt, int):
            what = f"prompts[{index}]={shown(prompt)}"
            raise ConfigError(f"{what} is neither a text nor a list of token ids; quote a text")
    return prompts


def _from_file(path: Path, params: SamplingParams, info: Mapping[str, Any]) -> Prompts:
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"prompts_file={path}: the name must end in .txt (a prompt a line) or .jsonl")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts_file={path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".txt":
        prompts = [Line(line, params, info) for line in _lines(text)]
    else:
        prompts = [_from_json(line, f"{path}:{number}", params, info) for number, line in numbered_lines(text)]
    if not prompts:
        raise ConfigError(f"prompts_file={path} holds no prompt")
    return prompts


def _from_json(line: str, place: str, params: SamplingParams, info: Mapping[str, Any]) -> Line:
    try:
        values = json_object(line)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    forms = [form for form in _FORMS if form in values]
    sampling = {key: value for key, value in values.items() if key not in (*_FORMS, *INFO_KEYS)}
    defaults = asdict(params)
    for key in sampling:
        if key not in defaults:
            raise ConfigError(f"{place}: {unknown_key(key, [*_FORMS, *INFO_KEYS, *defaults])}")
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise ConfigError(f"{place}: needs one of {', '.join(_FORMS)}; it has {found}")
    try:
        prompt, own = _checked_form(forms[0], values[forms[0]], place), SamplingParams.of(defaults | sampling)
    except RequestError as error:
        raise ConfigError(f"{place}: {error}") from error
    return Line(prompt, own, merge(info, {key: values[key] for key in INFO_KEYS if key in values}))


def _checked_form(form: str, value: Any, place: str) -> Any:
    if form == "prompt" and not isinstance(value, str):
        raise ConfigError(f"{place}: prompt={shown(value)} is not a text")
    if form == "prompt_token_ids" and not _is_list_of(value, int):
        raise ConfigError(f"{place}: prompt_token_ids={shown(value)} is not a list of token ids")
    if form == "messages" and not (value and _is_list_of(value, dict) and all("role" in one for one in value)):
        raise ConfigError(f"{place}: messages is not a list of objects with role and content")
    return value


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
