"""The engine in this process, for endpoints: an `EngineClient` over AsyncLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from hookline.core.errors import EngineError, QueueFullError
from hookline.core.request_options import RequestOptions
from hookline.core.serve.engine_client import EngineLoad, facts_of, served_model
from hookline.core.serve.engine_metrics import metrics_of

if TYPE_CHECKING:
    from hookline.core.frontend.async_llm import AsyncLLM
    from hookline.core.frontend.completion_stream import RequestStream
    from hookline.core.pooling_params import PoolingParams
    from hookline.core.request_options import OptionKeys
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.serve.settings import ServeConfig
    from hookline.core.serve.throughput import Throughput
    from hookline.core.tokenizer.codec import Prompt


class InProcessClient:
    """`EngineClient` over an AsyncLLM, which it closes. throughput: counts the engine's steps."""

    replicas = ()

    def __init__(self, llm: AsyncLLM, settings: ServeConfig, throughput: Throughput | None = None) -> None:
        self._llm, self.facts = llm, served_model(facts_of(llm.llm), settings.names, llm.llm.codec)
        self._settings, self._throughput = settings, throughput
        self._is_closed = False

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        session: str | None = None,
        pooling: PoolingParams | None = None,
        **keys: Unpack[OptionKeys],
    ) -> RequestStream:
        """See EngineClient."""
        if self.death is not None:
            raise EngineError(self.death)
        if self._llm.num_open + params.n > self._settings.max_requests:
            full = QueueFullError("serve.max_requests", self._settings.max_requests, self._llm.num_open, 0)
            self._llm.refuse(full)
            raise full
        given = RequestOptions(**keys).limited(self._settings.timeout_s).given()
        if pooling is not None:
            return self._llm.pool(prompt, pooling, **given)
        return self._llm.stream(prompt, params, **given)

    def load(self) -> EngineLoad:
        """See EngineClient."""
        engine = self._llm.llm.engine
        rates = (0.0, 0.0) if self._throughput is None else self._throughput.rates()
        return EngineLoad(engine.num_running, engine.num_waiting, engine.num_free_blocks, engine.num_blocks, *rates)

    async def metrics(self) -> str:
        """See EngineClient."""
        return metrics_of(self._llm.observers)

    @property
    def is_ready(self) -> bool:
        """See EngineClient."""
        return not self._is_closed and self.death is None

    @property
    def death(self) -> str | None:
        """See EngineClient."""
        return self._llm.death

    async def aclose(self) -> None:
        """See EngineClient."""
        self._is_closed = True
        await self._llm.aclose()
