"""Pooling in a model that is cut into stages: the last one has the hidden states, the first one's host wants vectors.

A pooler may fail for single requests, and then the step must fail on every rank. So a step that pools ends only when
the last stage has told all others what came of it. Legend: P vectors of one pooler, F numbers of each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hookline.core.contracts import Stage
from hookline.core.errors import RequestFault
from hookline.core.step.message import Axis
from hookline.core.step.micro_batches import MicroBatch
from hookline.core.worker.results.pooling import DeviceVectors, Vectors
from hookline.core.worker.stages.returned_tokens import BackLink, ReturnedTokens, StageLink


class Links(StageLink, BackLink, Protocol):
    """See `core.distributed.stage_links.StageLinks`."""

    def on_host(self, x: Tensor) -> Tensor:
        """A received tensor on the host, once it is there."""
        ...


@dataclass(frozen=True)
class Pooled:
    """What the last stage made of a micro-batch: vectors, or why there are none."""

    vectors: DeviceVectors = ()
    fault: RequestFault | None = None


NOTHING_POOLED = Pooled()


class StagePooling:
    """One stage's part in ending a step that pools."""

    def __init__(self, stage: Stage, links: Links, device: torch.device) -> None:
        self._stage, self._links, self._device = stage, links, device

    def end_step(
        self, parts: Sequence[MicroBatch], pooled: Sequence[Pooled], returned: ReturnedTokens | None
    ) -> Vectors | None:
        """End a step whose micro-batches are computed; the first stage returns its vectors, on their way to the host.

        pooled: of each micro-batch, on the last stage.
        Raises: RequestFault, on every rank the same, if a pooler failed for some of its requests.
        """
        vectors = _of_step(parts, pooled)
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
            for vectors_PF, _ in vectors:
                self._links.send_back(vectors_PF)
        if returned is None:
            return None
        told = told["vectors"]
        return Vectors([(returned.receive(self._empty(len(ids), width)), np.array(ids)) for ids, width in told])

    def _tell(self, vectors: DeviceVectors, fault: RequestFault | None) -> None:
        told = {
            "vectors": [[chunks.tolist(), vectors_PF.shape[1]] for vectors_PF, chunks in vectors],
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


def _of_step(parts: Sequence[MicroBatch], pooled: Sequence[Pooled]) -> DeviceVectors:
    """The vectors of all micro-batches, by the indices of their chunks among the step's."""
    return [
        (vectors_PF, part.places(Axis.CHUNK)[chunks])
        for part, one in zip(parts, pooled, strict=bool(pooled))
        for vectors_PF, chunks in one.vectors
    ]
