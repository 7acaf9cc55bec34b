"""The host's half of pooling: which pooler a request asks for, and how a step names it.

A pooler's code is imported when a request first asks for it. The device's half, on each rank, is
`core.worker.results.pooling`. Both halves list the poolers in the same order, so that an index names a pooler; as
prompt readers their indices begin at FIRST_PLUGIN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.core.errors import EngineError, PluginError, PluginFault, RequestError, shown
from hookline.core.plugin.needs import Facts, unmet
from hookline.core.plugin.registry import POOLER, Entry
from hookline.core.pooling_params import EMBED, PoolingDefaults, PoolingParams
from hookline.core.requests.prompt_readers import FIRST_PLUGIN, ChunkRead
from hookline.core.util.arrays import TokenArray, VectorArray
from hookline.core.util.text import near_miss

SHORT_FOR = ("", "token", "_token", "_tokens")
"""Endings of sentence-transformers' modes that may be left out."""
BEGINS, ENDS, NORMALIZES = 1, 2, 4
"""Flags of a pooled chunk: it is the request's first, it is the last, and the vector is to be scaled to length 1."""


@dataclass
class Pooling:
    """A PromptReader: a pooled request's resolved parameters, and its vector.

    num_dimensions: numbers of the vector to keep; 0 for all.
    """

    pooler: int
    needs_whole_prompt: bool
    normalizes: bool
    num_dimensions: int
    vector: VectorArray | None = None
    ends_request = True

    def read(self, tokens_L: TokenArray, start: int, length: int, *, is_last: bool) -> ChunkRead | None:
        """See PromptReader: a pooler that reads the last token alone skips all chunks but the last."""
        if not (is_last or self.needs_whole_prompt):
            return None
        begins = start == 0 or not self.needs_whole_prompt
        flags = BEGINS * begins | ENDS * is_last | NORMALIZES * self.normalizes
        return ChunkRead(FIRST_PLUGIN + self.pooler, start, int(is_last), flags, self.num_dimensions)

    def keep(self, chunk: ChunkRead, rows: VectorArray) -> EngineError | None:
        """See PromptReader: the numbers of the vector that were asked for."""
        if not np.isfinite(rows).all():
            return EngineError(
                "the vector holds NaN or infinity: the model's hidden states do not suit the dtype, or are broken"
            )
        self.vector = rows[0, : self.num_dimensions or None].copy()
        return None

    def output(self) -> Mapping[str, Any]:
        """See PromptReader."""
        return {"vector": self.vector}


class Poolers:
    """The poolers of an engine. chosen: the pooler that the configuration names; None: the checkpoint decides."""

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        facts: Facts | None = None,
        *,
        chosen: str | None = None,
        defaults: PoolingDefaults | None = None,
        hidden_size: int = 0,
    ) -> None:
        self.entries = pooler_entries(entries)
        self._facts, self._chosen, self._hidden_size = facts, chosen, hidden_size
        self._classes: dict[int, Any] = {}
        self.defaults = PoolingDefaults() if defaults is None else defaults

    def default(self, task: str) -> str:
        """The pooler of requests that name none: the configuration's if it is for the task, else the checkpoint's, else
        the pooler of the highest priority.

        Raises: RequestError if there is none, or if the checkpoint's cannot be computed.
        """
        if self._chosen is not None and self._class(self._index(self._chosen)).task == task:
            return self._chosen
        if task == EMBED and self.defaults.refusal is not None:
            raise RequestError(self.defaults.refusal)
        if task == EMBED and self.defaults.pooler is not None:
            return self.defaults.pooler
        for entry in sorted(self.entries, key=lambda entry: -entry.priority):
            if self._class(self.entries.index(entry)).task == task:
                return entry.name
        raise RequestError(f"there is no pooler whose task is {task}")

    def prepare(self, params: PoolingParams) -> Pooling:
        """Resolve a request's parameters.

        Raises: RequestError for a pooler that is not installed, does not fit or is broken, and for parameters that it
        does not support.
        """
        if not isinstance(params, PoolingParams):
            raise RequestError(f"pooling={shown(params)} must be PoolingParams")
        name = self.default(params.task) if params.pooler is None else params.pooler
        index = self._index(name)
        cls = self._class(index)
        if cls.task == EMBED:
            size = params.dimensions or 0
            if size > self._hidden_size:
                raise RequestError(
                    f"pooling.dimensions={size} is more than the {self._hidden_size} numbers that the model's hidden "
                    "states have"
                )
            normalizes = self.defaults.normalizes if params.normalize is None else params.normalize
            return Pooling(index, bool(cls.reads_all_tokens), normalizes, size)
        if params.dimensions is not None or params.normalize:
            what = "dimensions" if params.dimensions is not None else "normalize"
            raise RequestError(f"pooling.{what} is for embeddings, which pooler '{name}' does not make; leave it out")
        return Pooling(index, bool(cls.reads_all_tokens), False, 0)

    def _index(self, name: str) -> int:
        names = [entry.name for entry in self.entries]
        for spelling in (f"{name}{ending}" for ending in SHORT_FOR):
            if spelling in names:
                return names.index(spelling)
        raise RequestError(
            f"there is no pooler {shown(name)}.{near_miss(name, names)} Poolers: {', '.join(names) or 'none'}"
        )

    def _class(self, index: int) -> Any:
        entry = self.entries[index]
        if index in self._classes:
            return self._classes[index]
        reasons = unmet(entry.needs, self._facts) if self._facts is not None else ()
        if reasons:
            raise RequestError(f"{entry} does not fit: {'; '.join(reasons)}")
        try:
            found = self._classes[index] = entry.load()
        except PluginError as error:
            raise PluginFault(str(error)) from error
        return found


def pooler_entries(entries: Iterable[Entry]) -> Sequence[Entry]:
    """The poolers among some entries, in the order that indices count."""
    return [entry for entry in entries if entry.kind == POOLER]
