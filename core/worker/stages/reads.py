"""Reading prompts with pipeline stages: the last stage has the hidden states, and the host of the first stage wants the
readers' rows.

A plugin's reader may fail for single requests, and then the step must fail on every rank. So a step with such a reader
ends only when the last stage has told all other stages its outcome. Legend: P rows of one reader, F numbers of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hookline.core.contracts import Stage
from hookline.core.errors import RequestFault
from hookline.core.worker.results.prompt_readers import DeviceRows
from hookline.core.worker.results.token_transfer import Rows
from hookline.core.worker.stages.returned_tokens import BackLink, ReturnedTokens, StageLink


class Links(StageLink, BackLink, Protocol):
    """See `core.distributed.stage_links.StageLinks`."""

    def on_host(self, x: Tensor) -> Tensor:
        """A received tensor on the host, once it is there."""
        ...


@dataclass(frozen=True)
class PartReads:
    """The rows that the last stage's readers made of a micro-batch's prompts, or the fault that left none."""

    rows: DeviceRows = field(default_factory=dict)
    fault: RequestFault | None = None


NOTHING_READ = PartReads()


class StageReads:
    """A stage's part in ending a step that reads prompts."""

    def __init__(self, stage: Stage, links: Links, device: torch.device) -> None:
        self._stage, self._links, self._device = stage, links, device

    def end_step(
        self,
        parts: Sequence[PartReads],
        returned: ReturnedTokens | None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Rows]:
        """End a step whose micro-batches are computed; the first stage returns its rows, on their way to the host.

        parts: of the micro-batches in their order, from the last stage. shapes: of the rows, by name, if no reader may
        fail; None: the last stage sends the shapes to the others.
        Raises: RequestFault, on every rank the same, if a reader failed for some of its requests.
        """
        rows = _of_step(parts)
        if shapes is None:
            shapes = self._agreed(rows, parts, returned)
        if self._stage.is_last:
            for name in shapes:
                self._links.send_back(rows[name])
        if returned is None:
            return {}
        return {name: returned.receive(self._empty(*shape)) for name, shape in shapes.items()}

    def _agreed(
        self, rows: DeviceRows, parts: Sequence[PartReads], returned: ReturnedTokens | None
    ) -> Mapping[str, Sequence[int]]:
        """The shapes of the rows, which the last stage sends to all others. Raises: RequestFault as `end_step` does."""
        fault = next((one.fault for one in parts if one.fault is not None), None)
        shapes: Mapping[str, Sequence[int]] = {name: rows_PF.shape for name, rows_PF in rows.items()}
        if self._stage.is_last:
            self._tell(shapes, fault)
        else:
            told = self._hear(returned)
            shapes = told["shapes"]
            fault = (
                RequestFault(told["fault"], rows=told["rows"], is_refusal=told["is_refusal"]) if told["fault"] else None
            )
        if fault is not None:
            raise fault
        return shapes

    def _tell(self, shapes: Mapping[str, Sequence[int]], fault: RequestFault | None) -> None:
        told = {
            "shapes": {name: list(shape) for name, shape in shapes.items()},
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

    def _empty(self, num_rows: int, width: int) -> Tensor:
        return torch.empty(num_rows, width, dtype=torch.float32, device=self._device)


def _of_step(parts: Sequence[PartReads]) -> DeviceRows:
    """The rows of all micro-batches, which have the step's chunks in their order."""
    names = dict.fromkeys(name for one in parts for name in one.rows)
    return {name: torch.cat([one.rows[name] for one in parts if name in one.rows]) for name in names}
