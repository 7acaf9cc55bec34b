"""Pooling in a model that is cut into stages: the last one has the hidden states, the first one's host wants vectors.

A pooler may fail for single requests, and then the step must fail on every rank. So a step that pools ends only when
the last stage has told all others what came of it. Legend: P vectors of one pooler, F numbers of each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hookline.core.contracts import Stage
from hookline.core.errors import RequestFault
from hookline.core.worker.results.pooling import DeviceVectors
from hookline.core.worker.results.token_transfer import Rows
from hookline.core.worker.stages.returned_tokens import BackLink, ReturnedTokens, StageLink


class Links(StageLink, BackLink, Protocol):
    """See `core.distributed.stage_links.StageLinks`."""

    def on_host(self, x: Tensor) -> Tensor:
        """A received tensor on the host, once it is there."""
        ...


@dataclass(frozen=True)
class Pooled:
    """What the last stage made of a micro-batch: vectors, or why there are none."""

    vectors: DeviceVectors = field(default_factory=dict)
    fault: RequestFault | None = None


NOTHING_POOLED = Pooled()


class StagePooling:
    """One stage's part in ending a step that pools."""

    def __init__(self, stage: Stage, links: Links, device: torch.device) -> None:
        self._stage, self._links, self._device = stage, links, device

    def end_step(self, pooled: Sequence[Pooled], returned: ReturnedTokens | None) -> dict[str, Rows]:
        """End a step whose micro-batches are computed; the first stage returns its vectors, on their way to the host.

        pooled: of each micro-batch, in their order, on the last stage.
        Raises: RequestFault, on every rank the same, if a pooler failed for some of its requests.
        """
        vectors = _of_step(pooled)
        fault = next((one.fault for one in pooled if one.fault is not None), None)
        if self._stage.is_last:
            self._tell(vectors, fault)
        else:
            told = self._hear(returned)
            fault = (
                RequestFault(told["fault"], rows=told["rows"], is_refusal=told["is_refusal"]) if told["fault"] else None
            )
        if fault is not None:
            raise fault
        if self._stage.is_last:
            for vectors_PF in vectors.values():
                self._links.send_back(vectors_PF)
        if returned is None:
            return {}
        return {name: returned.receive(self._empty(*shape)) for name, shape in told["vectors"].items()}

    def _tell(self, vectors: DeviceVectors, fault: RequestFault | None) -> None:
        told = {
            "vectors": {name: list(vectors_PF.shape) for name, vectors_PF in vectors.items()},
            "fault": "" if fault is None else str(fault),
            "rows": [] if fault is None else list(fault.rows),
            "is_refusal": fault is not None and fault.is_refusal,
        }
        words = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8).to(self._device)
        self._links.send_back(torch.tensor([len(words)], device=self._device))
        self._links.send_back(words)

    def _hear(self, returned: ReturnedTokens | None) -> Any:
        """The last stage's message. The first stage gets it from the last one, each stage passes it on to the next."""
        length_1 = torch.empty(1, dtype=torch.int64, device=self._device)
        self._receive(length_1, is_first=returned is not None)
        words = torch.empty(int(self._links.on_host(length_1)[0]), dtype=torch.uint8, device=self._device)
        self._receive(words, is_first=returned is not None)
        if self._stage.index + 2 < self._stage.size:
            self._links.send(length_1)
            self._links.send(words)
        return json.loads(self._links.on_host(words).numpy().tobytes())

    def _receive(self, x: Tensor, *, is_first: bool) -> None:
        if is_first:
            self._links.receive_back(x)()
        else:
            self._links.receive(x)

    def _empty(self, num_vectors: int, width: int) -> Tensor:
        return torch.empty(num_vectors, width, dtype=torch.float32, device=self._device)


def _of_step(pooled: Sequence[Pooled]) -> DeviceVectors:
    """The vectors of all micro-batches, which have the step's chunks in their order."""
    names = dict.fromkeys(name for one in pooled for name in one.vectors)
    return {name: torch.cat([one.vectors[name] for one in pooled if name in one.vectors]) for name in names}
