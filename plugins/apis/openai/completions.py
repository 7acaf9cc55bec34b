"""/v1/completions: texts are continued, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hookline.core.outputs import Delta, FinishReason, RequestOutput, TokenLogprob
from hookline.core.serving import (
    Generation,
    Naming,
    ServedEngine,
    TokenSpelling,
    Usage,
    also_ignored,
    json_response,
    new_id,
    now_s,
    places_of,
    read,
    span,
)
from hookline.plugins.apis.openai.completion_request import CompletionRequest
from hookline.plugins.apis.openai.errors import OPENAI_ERRORS
from hookline.plugins.apis.openai.frames import DONE, ChoiceFrames, Frames
from hookline.plugins.apis.openai.logprobs import CompletionLogprobs, prompt_logprobs
from hookline.plugins.apis.openai.usage import finish_reason, usage_of


async def completions(engine: ServedEngine, request: Request) -> Response:
    """Continue texts, each n times.

    Raises: the errors that api_error converts to a response.
    """
    fields, headers = await read(request, CompletionRequest)
    name = engine.model_name(fields.model)
    fields.check()
    max_len = engine.facts.max_model_len
    engine.check_prompts(fields.prompt, fields.n or 1)
    given = fields.prompts
    prompts = await engine.token_ids(given, add_special_tokens=fields.add_special_tokens is not False)
    fields.check_scores(prompts)
    naming, wanted, ignored = Naming(fields.own_names), None, list[str]()
    if (form := fields.form) is not None:
        naming = Naming({**fields.own_names, "structured_outputs": form.place})
        size = len(await request.body())
        wanted, ignored = await engine.in_time(size, lambda: form.held(engine.schema_rules), has_schemas=True)
    asked, places = fields.asked(prompts, max_len, wanted, naming), places_of("prompt", prompts)
    work = _Answer(engine, fields, given, prompts, new_id("cmpl-", request), name)
    told = also_ignored(headers, ignored)
    return await engine.answer(work, asked, fields, request, told, OPENAI_ERRORS, naming, places)


class _Answer:
    """The response of one request. given: the prompts as they came; prompts: their token ids."""

    def __init__(
        self,
        engine: ServedEngine,
        fields: CompletionRequest,
        given: Sequence[str | list[int]],
        prompts: Sequence[list[int]],
        id: str,
        model: str,
    ) -> None:
        self._engine, self._fields, self._given, self._prompts = engine, fields, given, prompts
        self._named = (id, "text_completion", now_s(), model)
        self.span = span("text_completion", id)
        self._usage = Usage(sum(map(len, prompts)))
        self._n = fields.n or 1
        self._drops_token = fields.max_tokens == 0

    async def whole(self, generation: Generation, headers: Mapping[str, str]) -> Response:
        """The response with all choices."""
        outputs = await generation.outputs()
        choices = [self._choice(number, one) for number, found in enumerate(outputs) for one in found]
        id, object, created, model = self._named
        named = {"id": id, "object": object, "created": created, "model": model}
        return json_response({**named, "choices": choices, "usage": usage_of(self._usage)}, headers=headers)

    def _choice(self, number: int, output: RequestOutput) -> dict[str, Any]:
        fields, texts = self._fields, self._engine.spelling
        before = self._prompt_text(number) if fields.echo else ""
        prompt, ids, text = self._prompts[number], output.token_ids, output.text
        if self._drops_token:
            output = self._without_token(number, output)
            ids, text = [], ""
        logprobs = output.logprobs
        self._usage.add(len(ids))
        self._usage.add_end(output)
        found = None
        if logprobs is not None:
            shown_ids, shown = (
                ([*prompt, *ids], [*(output.prompt_logprobs or []), *logprobs]) if fields.echo else (ids, logprobs)
            )
            found = _logprobs(fields, texts, prompt, before, self._offset(number)).of(shown_ids, shown)
        choice = {
            "index": number * self._n + output.index,
            "text": before + text,
            "logprobs": found,
            "finish_reason": finish_reason(output),
            "stop_reason": output.stop_reason,
        }
        if fields.return_token_ids:
            choice |= {"prompt_token_ids": prompt, "token_ids": ids}
        if output.extensions is not None:
            choice["extensions"] = output.extensions
        if fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(texts, output.prompt_logprobs or [])
        return choice

    def _without_token(self, number: int, output: RequestOutput) -> RequestOutput:
        """The output of a request for a prompt's log-probabilities only."""
        logprobs = output.logprobs
        if self._fields.fills_up(self._prompts[number], self._engine.facts.max_model_len) and logprobs is not None:
            output = replace(output, prompt_logprobs=[*(output.prompt_logprobs or []), *logprobs])
        kept: list[TokenLogprob] | None = None if self._fields.logprobs is None else []
        return replace(output, finish_reason=FinishReason.LENGTH, logprobs=kept, extensions=None)

    def _prompt_text(self, number: int) -> str:
        """The text of the prompt that the model read; of token ids it is the decoded text."""
        given = self._given[number]
        return given if isinstance(given, str) else self._engine.codec.decode(given, skip_special_tokens=False)

    def _offset(self, number: int) -> int:
        """Number of characters in front of a completion, for text_offset, echoed or not."""
        return len(self._prompt_text(number)) if self._fields.logprobs is not None else 0

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The frames of a stream."""
        fields, usage = self._fields, self._usage
        frames = Frames(*self._named, ends_with_usage=fields.includes_usage)
        choices: dict[int, _ChoiceStream] = {}
        # A prompt's log-probabilities are known when its first completion ends; an echo with them has to wait.
        waits, held = bool(fields.echo and fields.logprobs is not None), _Held()
        async for number, delta in generation:
            index = number * self._n + delta.index
            choice = choices.get(index)
            if choice is None:
                texts = self._engine.spelling
                before = self._prompt_text(number) if fields.echo else ""
                choice = choices[index] = _ChoiceStream(
                    ChoiceFrames(frames, index, is_chat=False),
                    fields,
                    self._prompts[number],
                    before,
                    partial(_logprobs, fields, texts, self._prompts[number], before, self._offset(number)),
                )
            for one, told in held.of(number, choice, delta) if waits else [(choice, delta)]:
                if self._drops_token:
                    output = None if told.output is None else self._without_token(number, told.output)
                    kept: list[TokenLogprob] | None = None if fields.logprobs is None else []
                    told = Delta(told.request_id, told.prompt_index, told.index, "", [], output, kept)
                usage.add(len(told.token_ids))
                if told.output is not None:
                    usage.add_end(told.output)
                yield one.frame(told, usage_of(usage) if fields.shows_usage_always else None)
        if fields.includes_usage:
            yield frames.usage(usage_of(usage))
        yield DONE


class _Held:
    """Choices whose frames wait until their prompt's log-probabilities are known, which come with the first choice."""

    def __init__(self) -> None:
        self._scores: dict[int, list[TokenLogprob | None] | None] = {}
        self._waiting: dict[int, list[tuple[_ChoiceStream, Delta]]] = {}

    def of(self, number: int, choice: _ChoiceStream, delta: Delta) -> list[tuple[_ChoiceStream, Delta]]:
        """The choices of a prompt that are ready to be sent after this Delta. number: of the prompt."""
        joined = choice.join(delta)
        if joined is None:
            return []
        assert joined.output is not None
        if joined.index == 0:
            self._scores[number] = joined.output.prompt_logprobs
        self._waiting.setdefault(number, []).append((choice, joined))
        if number not in self._scores:
            return []
        return [(one, self._scored(number, whole)) for one, whole in self._waiting.pop(number)]

    def _scored(self, number: int, whole: Delta) -> Delta:
        assert whole.output is not None
        return replace(whole, output=replace(whole.output, prompt_logprobs=self._scores[number]))


class _ChoiceStream:
    """The frames of one completion: one for each Delta."""

    def __init__(
        self,
        frames: ChoiceFrames,
        fields: CompletionRequest,
        prompt: list[int],
        before: str,
        logprobs: Callable[[], CompletionLogprobs],
    ) -> None:
        self._frames, self._fields, self._prompt, self._before = frames, fields, prompt, before
        self._make_logprobs = logprobs
        self._is_first = True
        self._kept: Delta | None = None
        self._is_plain = fields.logprobs is None and not fields.return_token_ids

    @cached_property
    def _logprobs(self) -> CompletionLogprobs:
        """Made by the first Delta that has log-probabilities: most completions have none."""
        return self._make_logprobs()

    def join(self, delta: Delta) -> Delta | None:
        """Merge all Deltas into the last of them."""
        self._kept = delta if self._kept is None else self._kept.joined(delta)
        return self._kept if delta.output is not None else None

    def frame(self, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        """The frame of a Delta."""
        is_first, self._is_first = self._is_first, False
        text = self._before + delta.text if is_first else delta.text
        if self._is_plain and delta.output is None and usage is None and delta.extensions is None:
            return self._frames.plain(text)
        choice: dict[str, Any] = {"logprobs": self._logprobs_of(delta, is_first), "finish_reason": None}
        if delta.output is not None:
            choice |= {"finish_reason": finish_reason(delta.output), "stop_reason": delta.output.stop_reason}
        if self._fields.return_token_ids:
            choice |= ({"prompt_token_ids": self._prompt} if is_first else {}) | {"token_ids": delta.token_ids}
        if delta.extensions is not None:
            choice["extensions"] = delta.extensions
        return self._frames.text(text, choice, {} if usage is None else {"usage": usage})

    def _logprobs_of(self, delta: Delta, is_first: bool) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        if is_first and self._fields.echo and delta.output is not None:
            before = delta.output.prompt_logprobs or []
            return self._logprobs.of([*self._prompt, *delta.token_ids], [*before, *delta.logprobs])
        return self._logprobs.of(delta.token_ids, delta.logprobs)


def _logprobs(
    fields: CompletionRequest, texts: TokenSpelling, prompt: Sequence[int], echoed: str, offset: int
) -> CompletionLogprobs:
    as_ids, skips_special = bool(fields.return_tokens_as_token_ids), fields.skip_special_tokens is not False
    return CompletionLogprobs(texts, prompt, as_ids=as_ids, echoed=echoed, offset=offset, skips_special=skips_special)
