"""`FakeEngineClient`: an engine client without an engine, for tests of endpoints and for measuring a front end alone.

It has a real tokenizer and answers with tokens that are made up beforehand, at a pace that the test sets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from hookline.core.checkpoint.locate import locate
from hookline.core.config.settings import validate
from hookline.core.errors import EngineError, HooklineError, PromptTooLongError
from hookline.core.frontend.completion import Completion
from hookline.core.frontend.completion_stream import CompletionStream
from hookline.core.outputs import Delta, FinishReason, RequestOutput, Timings, TokenLogprob
from hookline.core.plugin.host import PluginHost
from hookline.core.pooling_params import EMBED
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.engine_client import EngineLoad, ReplicaState, ServedModel
from hookline.core.tokenizer.codec import Codec, Prompt

NUM_DIMENSIONS = 16
"""Numbers of a vector that a FakeEngineClient makes up."""


@cache
def bundled_checkpoint() -> str:
    """The reference of the checkpoint that the default model has."""
    reference: str = validate({}, PluginHost.load()).model.config.checkpoint
    return reference


@cache
def _bundled_codec(max_model_len: int) -> Codec:
    codec = Codec(locate(bundled_checkpoint()), max_len=max_model_len)
    assert codec.tokenizer is not None  # it is read here, which takes ten times as long as a copy
    return codec


def tiny_model(names: tuple[str, ...] = ("fake",), max_model_len: int = 4096) -> ServedModel:
    """The facts of the bundled checkpoint, under other names."""
    root = bundled_checkpoint()
    codec = copy(_bundled_codec(max_model_len))
    codec._tokenizer = copy(codec.tokenizer)  # a test may give it another chat template
    vocab_size, now_s, eos_ids = len(codec.tokenizer), int(time.time()), (codec.tokenizer.eos_token_id,)
    return ServedModel(
        root, None, max_model_len, vocab_size, now_s, "fake", eos_token_ids=eos_ids, names=names, codec=codec
    )


@dataclass
class Asked:
    """A call of `stream` by an endpoint.

    prompt, params, options: its arguments. prompt_token_ids: the token ids of the prompt.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    params: SamplingParams
    options: dict[str, Any]
    is_cancelled: bool = False
    """Whether it was closed before its end."""


@dataclass
class FakeEngineClient:
    """`EngineClient` that answers every prompt with the tokens of `reply`.

    reply: a text, token ids, or a function of the prompt's ids and the completion's index that returns either.
    pause_s: before each token. one_by_one: a token comes only once the one before it was read, so none are merged.
    error: the error that every stream raises, after error_after tokens. asked: the calls of `stream`, in their order.
    death, is_ready, facts, replicas: see EngineClient. now: what `load` returns. num_open: streams that have neither
    ended nor been closed.
    """

    reply: str | Sequence[int] | Callable[[list[int], int], str | Sequence[int]] = " Hello world"
    pause_s: float = 0.0
    one_by_one: bool = False
    error: HooklineError | None = None
    error_after: int = 0
    death: str | None = None
    is_ready: bool = True
    facts: ServedModel = field(default_factory=tiny_model)
    now: EngineLoad = field(default_factory=EngineLoad)
    replicas: Sequence[ReplicaState] = ()
    asked: list[Asked] = field(default_factory=list)
    num_open: int = 0

    def load(self) -> EngineLoad:
        """See EngineClient."""
        return self.now

    async def metrics(self) -> str:
        """See EngineClient."""
        return "# HELP fake Nothing.\n"

    async def aclose(self) -> None:
        """See EngineClient."""
        self.is_ready = False

    def stream(self, prompt: Prompt, params: SamplingParams, **options: Any) -> CompletionStream:
        """See EngineClient.

        Raises: EngineError if there is a death, PromptTooLongError for a prompt that is too long.
        """
        if self.death is not None:
            raise EngineError(self.death)
        ids = self.facts.codec.encode(prompt)
        if len(ids) >= self.facts.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; at most {self.facts.max_model_len - 1} are allowed"
            )
        asked = Asked(prompt, ids, params, options)
        self.asked.append(asked)
        return _stream(self, asked)

    def reply_to(self, asked: Asked, index: int) -> list[int]:
        """Tokens of a completion, before stop strings and max_tokens are applied."""
        reply = self.reply(asked.prompt_token_ids, index) if callable(self.reply) else self.reply
        if not isinstance(reply, str):
            return list(reply)
        ids: list[int] = self.facts.codec.tokenizer.encode(reply, add_special_tokens=False)
        return ids


def _stream(client: FakeEngineClient, asked: Asked) -> CompletionStream:
    """The stream of the client's answer."""

    def _leave(stream: CompletionStream) -> None:
        asked.is_cancelled = True
        task.cancel()

    def _end(task: object) -> None:
        client.num_open -= 1

    stream = CompletionStream(asyncio.get_running_loop(), asked.params.n, _leave)
    client.num_open += 1
    task = asyncio.ensure_future(_answer(client, asked, stream))
    task.add_done_callback(_end)
    return stream


async def _answer(client: FakeEngineClient, asked: Asked, stream: CompletionStream) -> None:
    if "pooling" in asked.options:
        if client.error is not None:
            stream.fail(client.error)
        else:
            stream.put(_pooled(client, asked))
        return
    completions = [_Completion(client, asked, i, one) for i, one in enumerate(asked.params.each())]
    num_steps = 0
    while open_ := [one for one in completions if not one.is_ended]:
        await asyncio.sleep(client.pause_s)
        while client.one_by_one and not stream.is_read:
            await asyncio.sleep(0)
        if client.error is not None and num_steps >= client.error_after:
            stream.fail(client.error)
            return
        num_steps += 1
        for one in open_:
            stream.put(one.step())


def _pooled(client: FakeEngineClient, asked: Asked) -> Delta:
    """A vector that depends on the prompt alone."""
    rng, wish = np.random.default_rng(asked.prompt_token_ids), asked.options["pooling"]
    vector = rng.normal(size=wish.dimensions or NUM_DIMENSIONS).astype(np.float32)
    if wish.task != EMBED:
        vector = rng.uniform(size=1).astype(np.float32)
    elif wish.normalize is not False:
        vector /= np.linalg.norm(vector)
    prompt = asked.prompt if isinstance(asked.prompt, str) else None
    output = RequestOutput(0, prompt, asked.prompt_token_ids, [], FinishReason.STOP, vector=vector)
    return Delta(0, 0, 0, "", [], output)


class _Completion(Completion):
    def __init__(self, client: FakeEngineClient, asked: Asked, index: int, params: SamplingParams) -> None:
        super().__init__(index)
        facts = client.facts
        self.begin(index, lambda completion: None)
        self.prepare(asked.prompt_token_ids, params, facts.codec, facts.eos_token_ids)
        room = facts.max_model_len - len(asked.prompt_token_ids)
        reply, self._max_tokens = client.reply_to(asked, index), params.num_tokens_in(room)
        self._reply = reply * (self._max_tokens // max(1, len(reply)) + 1) if params.ignore_eos else reply
        self._eos = facts.codec.tokenizer.eos_token_id
        self._asked, self._arrival_s = asked, time.monotonic()
        self.is_ended = False

    def step(self) -> Delta:
        """Add a token, and return the Delta since the last call."""
        place, params = len(self.token_ids), self._params
        token_id = self._reply[place] if place < len(self._reply) else self._eos
        reason = FinishReason.LENGTH if place + 1 >= self._max_tokens else None
        is_stop = token_id in params.stop_token_ids or (token_id == self._eos and not params.ignore_eos)
        reason = FinishReason.STOP if is_stop else reason
        self.add_logprobs([_logprob(token_id)])
        stop = self.see(token_id, reason)
        reason = FinishReason.STOP if stop is not None else reason
        if reason is not None:
            self.is_ended = True
            self.end(self._output(reason, stop or (token_id if token_id in params.stop_token_ids else None)))
        return self.take()

    def _output(self, reason: FinishReason, stop_reason: str | int | None) -> RequestOutput:
        prompt, times = self._asked.prompt_token_ids, self._arrival_s
        return RequestOutput(
            self.request_id,
            self._asked.prompt if isinstance(self._asked.prompt, str) else None,
            prompt,
            self.token_ids,
            reason,
            stop_reason=stop_reason,
            timings=Timings(times, times, times, time.monotonic()),
            prompt_logprobs=None if self._params.prompt_logprobs is None else [None, *map(_logprob, prompt[1:])],
        )


def _logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, ((token_id, -0.5), ((token_id + 1) % 50, -1.5)))
