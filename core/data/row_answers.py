"""Answers rows by an engine: admits them in order, gives a bad row its error, and returns the answers in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hookline.core.data.admission import Admission
from hookline.core.data.requests import Request, RowReader
from hookline.core.data.tables import Answer
from hookline.core.errors import EngineError, HooklineError, QueueFullError, RequestError
from hookline.core.sampling_params import NOT_SAMPLED
from hookline.core.tokenizer.codec import takes_long

if TYPE_CHECKING:
    from hookline.core.config.settings import Config
    from hookline.core.frontend.async_llm import AsyncLLM
    from hookline.core.outputs import RequestOutput
    from hookline.core.plugin.host import PluginHost

Row = Mapping[str, Any] | RequestError
"""A row by its columns, or the error that made it unreadable."""
RETRY_S = 0.05
"""Seconds before a row is tried again that found the queue full."""


def engine_for_rows(config: Config, host: PluginHost, wants_forms: bool) -> AsyncLLM:
    """The engine of a batch. In contrast to a server, no stream would stall while a grammar back end is made later, so
    it is made at the start only if rows are known to need it, or if engine.prepare_grammars says so.
    """
    from hookline.core.frontend.async_llm import AsyncLLM

    if config.engine.prepare_grammars is None:
        config = replace(config, engine=replace(config.engine, prepare_grammars=wants_forms))
    return AsyncLLM.from_config(config, host)


class RowAnswers:
    """Answers rows by an AsyncLLM, which it does not close."""

    def __init__(self, llm: AsyncLLM, reader: RowReader, admission: Admission) -> None:
        self._llm, self._reader, self._admission = llm, reader, admission

    async def answers(self, rows: Iterable[Row], progress: Callable[[Answer], None] | None = None) -> list[Answer]:
        """Answer each row, in order; progress is called after each.

        Raises: EngineError if the engine is dead.
        """
        tasks = [asyncio.create_task(self._answer(row, number, progress)) for number, row in enumerate(rows)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, row: Row, number: int, progress: Callable[[Answer], None] | None) -> Answer:
        try:
            if isinstance(row, RequestError):
                raise row
            answer = await self._answered(self._reader.request_of(row, number))
        except RequestError as error:
            answer = {"error": str(error)}
        if progress is not None:
            progress(answer)
        return answer

    async def _answered(self, request: Request) -> Answer:
        token_ids = await self._encode(request)
        async with self._admission.room(len(token_ids)):
            while True:
                try:
                    output = await self._ask(token_ids, request)
                except QueueFullError:
                    await asyncio.sleep(RETRY_S)
                    continue
                except RequestError:
                    raise
                except HooklineError as error:
                    raise EngineError(self._llm.death or str(error)) from error
                if self._llm.death is not None:
                    raise EngineError(self._llm.death)
                return _columns(output)

    async def _encode(self, request: Request) -> list[int]:
        codec = self._llm.llm.codec
        if takes_long(request.prompt, request.params or NOT_SAMPLED):
            return await asyncio.to_thread(codec.encode, request.prompt)
        return codec.encode(request.prompt)

    async def _ask(self, token_ids: list[int], request: Request) -> RequestOutput:
        if request.params is None:
            return await self._llm.embed(token_ids, self._reader.pooling)
        return await self._llm.generate(token_ids, request.params)


def _columns(output: RequestOutput) -> Answer:
    if output.error is not None:
        return {"error": output.error}
    counted = {"num_prompt_tokens": len(output.prompt_token_ids)}
    if output.vector is not None:
        return {"embedding": output.vector, **counted}
    return {
        "text": output.text,
        "finish_reason": str(output.finish_reason),
        "num_completion_tokens": len(output.token_ids),
        **counted,
    }
