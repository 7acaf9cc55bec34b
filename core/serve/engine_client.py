"""The engine as endpoints see it: a client for completions, and facts of the served model.

Implementations: `core.serve.in_process` (an engine in this process), `core.serve.processes.remote_client` (in another
process), `core.serve.processes.replica_client` (several engines); `core.testing.engine_client` invents tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, Unpack

from hookline.core.frontend.completion_stream import CompletionStream, RequestStream
from hookline.core.pooling_params import SCORE

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM
    from hookline.core.pooling_params import PoolingParams
    from hookline.core.request_options import OptionKeys
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.tokenizer.codec import Codec, Prompt


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the loaded model that a server needs; plain values, sent between processes as JSON.

    root: the checkpoint's reference. folder: of its tokenizer; None: as the model's own source has it. max_model_len:
    tokens of prompt and output together. created_s: seconds since 1970. model: the name of its option.
    """

    root: str
    folder: str | None
    max_model_len: int
    vocab_size: int
    created_s: int
    model: str
    scored_by: str = SCORE
    """See core.pooling_params.PoolingDefaults."""
    no_embeddings: str | None = None
    """Why texts cannot be embedded, if the checkpoint asks for something that is not supported."""
    eos_token_ids: Sequence[int] = ()
    """Token ids that end a completion."""
    grammars: str | None = None
    """The name of the grammar back end; None without any."""
    opens_objects: bool = False
    """Whether grammars allow further properties where an object's schema does not mention any."""


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelFacts):
    """The served model from the endpoints' point of view; it never changes. names: that requests may use; the first is
    shown.
    """

    names: tuple[str, ...]
    codec: Codec


def facts_of(llm: LLM) -> ModelFacts:
    """Facts of a loaded model."""
    limits, folder = llm.engine.limits, llm.tokenizer_folder
    grammars = llm.structured_output.choice
    return ModelFacts(
        root=llm.engine.model_name,
        folder=None if folder is None else str(folder),
        max_model_len=limits.max_len,
        vocab_size=limits.vocab_size,
        created_s=int(time.time()),
        model=llm.config.model.name,
        scored_by=limits.poolers.defaults.scored_by,
        no_embeddings=limits.poolers.defaults.refusal,
        eos_token_ids=sorted(limits.eos_token_ids),
        grammars=None if grammars is None else grammars.entry.name,
        opens_objects=grammars is not None and grammars.opens_objects,
    )


def served_model(facts: ModelFacts, names: tuple[str, ...], codec: Codec) -> ServedModel:
    """A model and its tokenizer. names: from the configuration; if empty, the checkpoint's reference is the name."""
    return ServedModel(**vars(facts), names=names or (facts.root.removeprefix("package:"),), codec=codec)


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine. tokens_s: generated tokens a second, averaged over the last few seconds."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prompt_tokens_s: float = 0.0
    tokens_s: float = 0.0


@dataclass(frozen=True)
class ReplicaState:
    """An engine of several behind a server. death: why it is dead, in one line; None while it lives."""

    death: str | None
    load: EngineLoad


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """The sum of the loads of several engines."""
    return EngineLoad(*(sum(values) for values in zip(*(astuple(one) for one in loads), strict=True)))


DeltaStream: TypeAlias = CompletionStream | RequestStream
"""Iterates over the Deltas of one prompt's completions; see AsyncLLM.stream. `aclose` ends the requests early."""


class EngineClient(Protocol):
    """An engine from the endpoints' point of view. Methods are called on the event loop that made the client, and never
    block it.
    """

    facts: ServedModel

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        session: str | None = None,
        pooling: PoolingParams | None = None,
        **keys: Unpack[OptionKeys],
    ) -> DeltaStream:
        """Queue a prompt: a text, token ids or chat messages. Same arguments as AsyncLLM.stream.

        keys: the fields of RequestOptions. session: all requests of a session go to the same replica.
        pooling: replaces params, which are ignored then; there is one Delta, whose output has the vector.

        With params.n > 1 the Deltas' `index` tells the completions apart. The last Delta of a completion has its
        `output`. Raises: RequestError, at once or when the first Delta is asked for.
        """
        ...

    def load(self) -> EngineLoad:
        """The engine's load, at most about a second old."""
        ...

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """The state of each engine if there are several, else nothing."""
        ...

    async def metrics(self) -> str:
        """Metrics in Prometheus' text format; empty if no observer collects any."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: not while the engine starts or drains, or if it is dead."""
        ...

    @property
    def death(self) -> str | None:
        """Why the engine is dead, in one line; None while it lives."""
        ...

    async def aclose(self) -> None:
        """Cancel all requests and release the engine; a second call does nothing."""
        ...
