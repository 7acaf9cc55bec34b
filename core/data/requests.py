"""Converts rows of a table to requests: which columns have the prompt, and which the parameters. Needs no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import xxhash

from hookline.core.errors import RequestError, shown
from hookline.core.pooling_params import PoolingParams
from hookline.core.sampling_params import MAX_SEED, SamplingParams
from hookline.core.util.json_lines import json_fault

if TYPE_CHECKING:
    from hookline.core.tokenizer.codec import Prompt

COMPLETION, CHAT, STRUCTURED, EMBEDDINGS = TASKS = ("completion", "chat", "structured", "embeddings")
"""Tasks of a row: continue a text, answer a chat, either with a structured output (a grammar or JSON schema), or make a
vector."""
_PROMPTS = ("messages", "prompt", "prompt_token_ids")
_PROMPTS_OF = {COMPLETION: _PROMPTS[1:], CHAT: _PROMPTS[:1], STRUCTURED: _PROMPTS, EMBEDDINGS: _PROMPTS[1:]}
PARAMETERS = ("sampling", "structured_outputs", "json_schema")
"""Columns with a row's own parameters, which override the parameters of all rows; texts in them are JSON."""


def prompts_of(task: str) -> tuple[str, ...]:
    """Columns of which a row of the task must have one."""
    return _PROMPTS_OF[task]


@dataclass(frozen=True)
class Request:
    """The request of a row. params: None for a vector."""

    prompt: Prompt
    params: SamplingParams | None


@dataclass(frozen=True)
class RowReader:
    """Makes requests of rows. sampling: parameters of all rows, as a mapping; seed: for rows without any.

    Raises: RequestError if the task or the parameters of all rows are invalid.
    """

    task: str = COMPLETION
    sampling: Mapping[str, Any] = field(default_factory=dict)
    pooling: PoolingParams = field(default_factory=PoolingParams)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise RequestError(f"task={shown(self.task)} is not one of {', '.join(TASKS)}")
        object.__setattr__(self, "_params", self._checked(self.sampling))

    @property
    def wants_forms(self) -> bool:
        """Whether every row asks for a form, as far as it is known before a row is read."""
        params: SamplingParams = vars(self)["_params"]
        return self.task != EMBEDDINGS and (self.task == STRUCTURED or params.structured_outputs is not None)

    def request_of(self, row: Mapping[str, Any], number: int = 0) -> Request:
        """The request of a row. number: its place in its batch.

        A row without a seed gets one that follows from its prompt, its number and the engine's seed. A batch that is
        answered again after its process died therefore gets the same tokens.
        Raises: RequestError naming the missing column or the invalid value.
        """
        prompt = self._prompt(row)
        if self.task == EMBEDDINGS:
            return Request(prompt, None)
        own = self._own(row)
        params: SamplingParams = self._checked({**self.sampling, **own}) if own else vars(self)["_params"]
        if self.task == STRUCTURED and params.structured_outputs is None:
            raise RequestError(
                "the row does not say what form its answer has: give it json_schema or structured_outputs, or give "
                "sampling.structured_outputs for all rows"
            )
        if params.seed is None and params.temperature != 0:
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
            hashed = xxhash.xxh64_intdigest(f"{self.seed}:{number}:{text}".encode(errors="surrogatepass"))
            params = replace(params, seed=hashed & MAX_SEED)
        return Request(prompt, params)

    def _checked(self, values: Mapping[str, Any]) -> SamplingParams:
        params = SamplingParams.of(values)
        if params.n != 1:
            raise RequestError(f"sampling.n={params.n} must be 1: a row has one answer; repeat the row for more")
        return params

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        names = prompts_of(self.task)
        given = [name for name in names if row.get(name) is not None]
        if len(given) != 1:
            raise RequestError(f"a row needs one of {', '.join(names)}; it has {' and '.join(given) or 'none'}")
        (name,) = given
        value = row[name]
        if name == "messages":
            return _messages(value)
        if name == "prompt" and not isinstance(value, str):
            raise RequestError(f"prompt={shown(value)} is not a text")
        if name == "prompt_token_ids" and not (isinstance(value, Sequence) and not isinstance(value, str)):
            raise RequestError(f"prompt_token_ids={shown(value)} is not a list of token ids")
        found: Prompt = value
        return found

    def _own(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of the row; null counts as unset, because other rows of the table may have a value there."""
        own = _without_nulls(_mapping(row, "sampling"))
        if row.get("structured_outputs") is not None:
            own["structured_outputs"] = _without_nulls(_mapping(row, "structured_outputs"))
        if row.get("json_schema") is not None:
            own["structured_outputs"] = {"json": row["json_schema"]}
        return own


def _mapping(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if value is None:
        return {}
    found = _parsed(name, value)
    if not isinstance(found, Mapping):
        raise RequestError(f"{name}={shown(value)} must be a mapping, or one as JSON")
    return found


def _messages(value: Any) -> Prompt:
    found = _parsed("messages", value)
    is_list = (
        isinstance(found, list)
        and found
        and all(isinstance(one, Mapping) and one.get("role") is not None for one in found)
    )
    if not is_list:
        raise RequestError(f"messages={shown(value)} must be a list of mappings with role and content, or one as JSON")
    return [{key: part for key, part in one.items() if part is not None or key == "content"} for one in found]


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}={shown(value)} is not JSON: {json_fault(error)}") from None


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
