"""The asynchronous front: any number of coroutines share one engine, which runs in a thread of its own.

Long prompts are tokenized in threads of their own, since they would hold up the event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from hookline.core.config.settings import Config
from hookline.core.errors import HooklineError, QueueFullError, RequestError, one_short_line, shown
from hookline.core.frontend.async_pooling import AsyncPoolingCalls
from hookline.core.frontend.completion_stream import CompletionStream, RequestStream
from hookline.core.frontend.engine_thread import EngineThread
from hookline.core.frontend.llm import LLM, ServingLLM
from hookline.core.outputs import RequestOutput, merge_completions
from hookline.core.plugin.host import PluginHost
from hookline.core.request_options import CHAT_TRACE, OptionKeys, RequestOptions, options_of
from hookline.core.sampling_params import SamplingParams
from hookline.core.tokenizer.codec import Prompt, is_chat, snapshot, takes_long, with_word_ids

TOKENIZER_THREADS = 4
"""Long prompts that are tokenized in parallel, so that a very long one does not hold up the others. Each is queued once
its tokens are known: the order of a caller's long prompts is not kept."""


class AsyncLLM(AsyncPoolingCalls):
    """An engine that coroutines share; options and errors as for `LLM`, which is loaded before this returns.

    Its methods are called inside a running event loop; several loops may share it. Close it, or use it with
    `async with`.
    """

    def __init__(self, checkpoint: str | None = None, **options: Any) -> None:
        self._start(_settled(ServingLLM(checkpoint, **options)))

    @classmethod
    def from_config(cls, config: Config, host: PluginHost) -> AsyncLLM:
        """An AsyncLLM from a validated configuration, as the command line makes it."""
        llm = cls.__new__(cls)
        llm._start(_settled(ServingLLM.from_config(config, host)))
        return llm

    def _start(self, llm: LLM) -> None:
        self.llm = llm
        """The LLM whose engine the thread drives. Its config, codec and limits may be read; its methods not called."""
        try:
            llm.codec.make_ready()
        except BaseException:
            llm.close()
            raise
        self._tokenizing = ThreadPoolExecutor(TOKENIZER_THREADS, "hookline-tokenizer")
        self._untokenized: dict[CompletionStream, int] = {}
        """Prompts that are being tokenized, and how many completions each asks for."""
        self._thread = EngineThread(llm.output_processor, llm.enter_thread)
        self._thread.start()
        self._stop = weakref.finalize(self, self._thread.stop)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{repr(self.llm).removeprefix(type(self.llm).__name__)}"

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[OptionKeys],
    ) -> RequestOutput:
        """Complete a prompt. Arguments and result as for LLM.generate, for one prompt.

        Raises: RequestError if it cannot be served, QueueFullError among them; EngineError if the engine breaks off.
        """
        stream = self._submit(prompt, params, options_of(**options))
        return merge_completions([delta.output async for delta in stream if delta.output is not None])

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cumulative: bool = False,
        **options: Unpack[OptionKeys],
    ) -> RequestStream:
        """Queue a prompt and return its Deltas as they come. Arguments as for LLM.stream, for one prompt.

        trace: for observers that trace, see RequestBegin.
        Raises: what generate does when the first Delta is asked for; of a short prompt, what tokenizing raises at once.
        """
        return self._submit(prompt, params, options_of(**options), follows=True, is_cumulative=cumulative)

    def _submit(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, **further: Any
    ) -> RequestStream:
        params, loop = SamplingParams() if params is None else params, asyncio.get_running_loop()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params={shown(params)} must be SamplingParams")
        is_cumulative = further.get("is_cumulative", False)
        stream = CompletionStream(loop, params.n, self._thread.cancel, is_cumulative=is_cumulative)
        if isinstance(options.tags, Mapping):
            options = replace(options, tags=dict(options.tags))  # the engine's thread reads them later
        if options.trace is None and is_chat(prompt):
            options = replace(options, trace=CHAT_TRACE)
        given = {**further, "options": options, "prompt": prompt if isinstance(prompt, str) else None}
        given["arrival_s"] = self.llm.output_processor.engine.clock()
        if not takes_long(prompt, params):
            try:
                prepared = self._prepare(prompt, params)
            except RequestError as error:
                self._thread.refuse(error, **given)
                raise
            self._thread.submit(stream, *prepared, **given)
            return RequestStream(stream)
        if not self._stop.alive:
            raise HooklineError("the engine is closed; make a new one")

        limit = self.llm.output_processor.engine.limits.max_queued_requests
        if limit is not None and len(self._untokenized) >= limit:  # the engine's own queue may be empty meanwhile
            full = QueueFullError("engine.max_queued_requests", limit, len(self._untokenized), 0)
            self._thread.refuse(full, **given)
            stream.fail(full)
            return RequestStream(stream)
        prompt = snapshot(prompt)
        self._untokenized[stream] = params.n

        def _prepare_if_open() -> tuple[list[int], SamplingParams]:
            try:
                return self._prepare(prompt, params) if stream.is_open else ([], params)
            finally:  # here, for the loop may be closed by then
                self._untokenized.pop(stream, None)

        def _submit_prepared(prepared: asyncio.Future[tuple[list[int], SamplingParams]]) -> None:
            prepared.exception()  # read, so that asyncio does not warn about it if the caller has left
            if not stream.is_open:
                return
            try:
                self._thread.submit(stream, *prepared.result(), **given)
                return
            except HooklineError as error:
                problem = error
            except Exception as error:
                problem = RequestError(f"the prompt cannot be tokenized: {one_short_line(error)}")
            if isinstance(problem, RequestError):
                self._thread.refuse(problem, **given)
            stream.fail(problem)

        loop.run_in_executor(self._tokenizing, _prepare_if_open).add_done_callback(_submit_prepared)
        return RequestStream(stream)

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """Tokenize a prompt and the texts in its parameters, such as bad words, outside the engine's thread."""
        token_ids, params = self.llm.codec.encode(prompt), with_word_ids(params, self.llm.codec)
        if params.stop:
            _ = params.stop_strings  # kept from now on
        return token_ids, params

    def refuse(self, error: RequestError) -> None:
        """Tell observers of a prompt that the caller, such as a server, refused itself."""
        self._thread.refuse(error)

    @property
    def observers(self) -> dict[str, Any]:
        """See LLM.observers."""
        return self.llm.observers

    @property
    def death(self) -> str | None:
        """Why the engine serves nothing more, in one line, if a fault ended it; None while it lives."""
        return self._thread.death

    @property
    def num_open(self) -> int:
        """Completions that are waiting or running."""
        return self._thread.num_open + sum(list(self._untokenized.values()))  # a copy: other threads take theirs out

    def close(self) -> Closed:
        """End all requests with finish_reason "abort", and release the engine's memory; a second call does nothing.

        It is done when the call returns, and may be awaited; `aclose` leaves the event loop free meanwhile.
        """
        self._stop()
        self._tokenizing.shutdown(wait=False)  # who waits for it hears that the engine is closed
        return Closed()

    async def aclose(self) -> None:
        """`close` in a thread of its own, so that the event loop goes on meanwhile."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Closed:
    """Returned by `close`, which has done its work already, so that `await llm.close()` works, too."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


def _settled(llm: LLM) -> LLM:
    """Returns the same LLM. Unless engine.freeze_gc=false, excludes all present objects from Python's full garbage
    collections, since a full collection would stop all streams.
    """
    if llm.config.engine.freeze_gc is None:
        llm.output_processor.freeze_heap()
    return llm
