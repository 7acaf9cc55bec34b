"""The fields that /v1/completions and /v1/chat/completions share, and SamplingParams made of them.

Names are OpenAI's, then vLLM's, then ours. None is unset.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import msgspec

from hookline.core.contracts import ApiError
from hookline.core.errors import shown
from hookline.core.sampling_params import MAX_SEED, SamplingParams
from hookline.core.serve.endpoints.body import Shape
from hookline.core.serve.endpoints.request_options import ServiceFields
from hookline.core.serve.endpoints.structured import ALIASES, FORMAT_SHAPE, AnswerForm, answer_form
from hookline.core.serve.errors import invalid, too_long


class StreamOptions(msgspec.Struct, kw_only=True):
    """Usage that a stream reports besides the text."""

    include_usage: bool | None = None
    """Whether a last chunk, before [DONE], has the request's usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far."""


class SamplingFields(ServiceFields, kw_only=True):
    """Fields of sampling and output. SHAPE: the known fields of fields that are mappings."""

    SHAPE: ClassVar[Shape] = {
        "response_format": FORMAT_SHAPE,
        "stream_options": dict.fromkeys(StreamOptions.__struct_fields__),
    }

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    """A stop string or several: they end the completion, and are left out of it."""
    seed: int | None = None
    """Makes sampling repeatable; -1 does not. Any sign."""
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    """Server-sent events as the text grows, and [DONE]."""
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    """Type text, json_object, or json_schema with json_schema.schema; also regex, grammar and structural_tag."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str | list[int]] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    """A mapping with one of the keys json, regex, choice, grammar, structural_tag."""
    guided_json: Any = None
    """Other servers' name for a key of structured_outputs; so are the next fields."""
    guided_json_object: bool | None = None
    guided_choice: list[str] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    format: Any = None
    """A JSON schema, or "json"."""
    regex: str | None = None
    ebnf: str | None = None
    grammar: Any = None
    structural_tag: Any = None
    return_token_ids: bool | None = None
    """Return the token ids of the prompt and the completion."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens as token_id:N in log-probabilities."""
    extra_args: dict[str, Any] | None = None

    def check_stream(self) -> None:
        """Check fields that need each other.

        Raises: ApiError for a field that needs `stream`, or that excludes it.
        """
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options goes with stream=true only", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs are not available with stream=true", "prompt_logprobs")

    @property
    def answer_format(self) -> dict[str, Any] | None:
        """The value of response_format, or of the field that this API has for it."""
        return self.response_format

    @property
    def may_have_schemas(self) -> bool:
        """Whether a field that may contain a schema is set."""
        names = ("tools", "text", "output_config", "output_format", "response_format", "structured_outputs", *ALIASES)
        return any(getattr(self, name, None) is not None for name in names)

    @property
    def own_names(self) -> dict[str, str]:
        """The name in errors -> the name in this request, of each field that has another name here."""
        return {}

    @property
    def form(self) -> AnswerForm | None:
        """The form that the answer must have; None if it is free.

        Raises: ApiError for an invalid form, or for more than one.
        """
        aliases = {name: value for name in ALIASES if (value := getattr(self, name)) is not None}
        return answer_form(self.answer_format, self.structured_outputs, aliases, self.own_names)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def shows_usage_always(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


_CONVERTED = ("stop", "seed", "max_tokens", "structured_outputs")
_AS_THEY_ARE = [
    one.name
    for one in dataclasses.fields(SamplingParams)
    if one.name in SamplingFields.__struct_fields__ and one.name not in _CONVERTED
]
"""Fields that SamplingParams takes as a request has them."""


def sampling_params(fields: SamplingFields, max_tokens: int, **further: Any) -> SamplingParams:
    """The sampling parameters for the engine. further: fields of SamplingParams that override the request's.

    Raises: RequestError naming the field, the value and the allowed range.
    """
    values = {name: value for name in _AS_THEY_ARE if (value := getattr(fields, name)) is not None}
    if stops := [one for one in (fields.stop if isinstance(fields.stop, list) else [fields.stop]) if one]:
        values["stop"] = stops  # an empty stop string would end nothing
    if fields.seed is not None:
        values["seed"] = seed(fields.seed)
    further = {name: value for name, value in further.items() if value is not None}
    return SamplingParams(**{**values, "max_tokens": max_tokens, **further})


def seed(value: int) -> int | None:
    """A seed in the engine's range, from one of any sign. -1 means no seed, as it does for vLLM."""
    return None if value == -1 else value & MAX_SEED


def max_new_tokens(
    asked: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int, *, prompt: str, limit: str
) -> int:
    """The limit of generated tokens: the request's, else the default, else as many as there is room for.

    prompt, limit: names of the fields with the prompt and with `asked`, for errors.
    Raises: ApiError if there is no room for the prompt, or for as many tokens as the request asks for.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(
            max_model_len,
            f"However, your prompt has {num_prompt_tokens} tokens, which leaves no room for a completion. Please "
            "reduce the length of the prompt.",
            prompt,
            lengths=(num_prompt_tokens, asked or 1),
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise too_long(
            max_model_len,
            f"However, you requested {shown(num_prompt_tokens + asked)} tokens ({num_prompt_tokens} in the prompt, "
            f"{shown(asked)} in the completion). Please reduce the length of the prompt or completion.",
            limit,
            lengths=(num_prompt_tokens, asked),
        )
    return asked


def smallest_limit(**limits: int | None) -> tuple[str, int | None]:
    """The name and the value of the smallest of several limits of generated tokens, as a request names them; those that
    are None are unset. Without any, the first name and None.
    """
    given = {name: limit for name, limit in limits.items() if limit is not None}
    name = min(given or limits, key=lambda one: given.get(one, 0))
    return name, given.get(name)


def at_least(name: str, value: int | None, least: int) -> None:
    """Check a lower bound.

    Raises: ApiError if the number is set and smaller than the bound.
    """
    if value is not None and value < least:
        raise ApiError(400, f"{name}={shown(value)} must be at least {least}", param=name)


def are_ids(value: object) -> bool:
    """Whether a value is a non-empty list of integers."""
    return isinstance(value, list) and set(map(type, value)) == {int}  # 40 times as fast as checking each value
