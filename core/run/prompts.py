"""Where the prompts of a command-line run come from: one of prompt, prompts, prompts_file, or standard input.

Reads text and JSON, and checks their form; whether a prompt can be served is the engine's matter. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hookline.core.cli.stdin import SOURCES, piped_text
from hookline.core.config.schema import unknown_key
from hookline.core.errors import ConfigError, RequestError, shown
from hookline.core.request_options import LINE_KEYS
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.files import path_of, read_bounded
from hookline.core.util.json_lines import BOM, json_object, numbered_lines
from hookline.core.util.mappings import merge

DEFAULT_PROMPTS = ("def fibonacci(n):\n", "import os\n\nclass ", "# Read a file and ")
"""The prompts of a run without any: the bundled checkpoint writes Python-looking code."""
_FORMS = ("prompt", "messages", "prompt_token_ids")


class PromptLine(NamedTuple):
    """A prompt of a run. options: the values of LINE_KEYS that were given, unchecked.

    place: its file and line number. error: why the line is no valid prompt; it alone is refused then.
    """

    prompt: Any
    params: SamplingParams
    options: Mapping[str, Any] = {}
    place: str = ""
    error: str = ""

    def refused(self, error: Exception) -> PromptLine:
        """The line with this error, which names its place."""
        text = str(error)
        return self._replace(error=text if text.startswith(self.place) else f"{self.place}: {text}")


Prompts = list[PromptLine]


def read_prompts(
    tree: Mapping[str, Any],
    params: SamplingParams,
    stdin: Callable[[], str | None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Prompts:
    """The prompts, each with its sampling parameters and options. params, options: defaults for all prompts.

    Without any source, standard input counts if it is piped and not empty, one prompt a line; else the default prompts.
    With a source it is not read: a script that runs Hookline in a loop keeps its own input.
    A line of a file that is not a valid prompt is refused alone: it has an `error`.
    Raises: ConfigError for two sources, or for a file that is unreadable or has no valid line; RequestError for invalid
    sampling parameters.
    """
    given = [name for name in SOURCES if tree.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both set; give the prompts one way")
    if given == ["prompts_file"]:
        return _from_file(path_of(tree["prompts_file"]), params, options or {})
    if given == ["prompts"]:
        prompts = _checked_list(tree["prompts"])
    elif given == ["prompt"]:
        prompts = [str(tree["prompt"])]
    else:
        prompts = _lines((stdin or piped_text)() or "") or [*DEFAULT_PROMPTS]
    return [PromptLine(prompt, params, options or {}) for prompt in prompts]


def _lines(text: str) -> list[str]:
    return [line for _, line in numbered_lines(text.removeprefix("\ufeff"))]


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


def _from_file(path: Path, params: SamplingParams, options: Mapping[str, Any]) -> Prompts:
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"prompts_file={path}: the name must end in .txt (a prompt a line) or .jsonl")
    data = read_bounded(path, "prompts_file")
    read = _from_json if path.suffix == ".jsonl" else _from_text
    lines = []
    for number, text in _decoded(data.removeprefix(BOM)):
        line = PromptLine(None, params, options, f"{path}:{number}")
        try:
            lines.append(read(text, line))
        except (ConfigError, RequestError) as error:
            lines.append(line.refused(error))
    if not lines:
        raise ConfigError(f"prompts_file={path} holds no prompt")
    check_any_good(lines)
    return lines


def check_any_good(lines: Prompts) -> None:
    """Raise ConfigError with the first line's fault if all lines have one: then nothing has to be started."""
    if all(line.error for line in lines):
        raise ConfigError(lines[0].error)


def _decoded(data: bytes) -> Iterator[tuple[int, str | UnicodeDecodeError]]:
    """The non-blank lines of a file, each with its number; in place of a line that is not UTF-8, the error."""
    try:
        yield from numbered_lines(data.decode("utf-8"))
        return
    except UnicodeDecodeError:
        lines = data.replace(b"\r\n", b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            if (text := line.decode("utf-8")).strip():
                yield number, text
        except UnicodeDecodeError as error:
            yield number, error


def _from_text(text: str | UnicodeDecodeError, line: PromptLine) -> PromptLine:
    if not isinstance(text, str):
        raise ConfigError(f"not UTF-8 text: {text}")
    return line._replace(prompt=text)


def _from_json(text: str | UnicodeDecodeError, line: PromptLine) -> PromptLine:
    if not isinstance(text, str):
        raise ConfigError(f"not UTF-8 text: {text}")
    try:
        values = json_object(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    forms = [form for form in _FORMS if form in values]
    sampling = {key: value for key, value in values.items() if key not in (*_FORMS, *LINE_KEYS)}
    defaults = asdict(line.params)
    for key in sampling:
        if key not in defaults:
            raise ConfigError(unknown_key(key, [*_FORMS, *LINE_KEYS, *defaults]))
    if len(forms) != 1:
        raise ConfigError(f"needs one of {', '.join(_FORMS)}; it has {' and '.join(forms) or 'none'}")
    prompt, params = _checked_form(forms[0], values[forms[0]]), SamplingParams.of(defaults | sampling)
    own = {key: values[key] for key in LINE_KEYS if key in values}
    return line._replace(prompt=prompt, params=params, options=merge(line.options, own))


def _checked_form(form: str, value: Any) -> Any:
    if form == "prompt" and not isinstance(value, str):
        raise ConfigError(f"prompt={shown(value)} is not a text")
    if form == "prompt_token_ids" and not (value and _is_list_of(value, int) and 0 <= min(value)):
        raise ConfigError(f"prompt_token_ids={shown(value)} is not a list of token ids: one or more, none below 0")
    if form == "messages" and not (value and _is_list_of(value, dict) and all("role" in one for one in value)):
        raise ConfigError("messages is not a list of objects with role and content")
    return value


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
