"""Adds a vector to the residual stream of the requests that ask for it.

Legend: T tokens of a step, D hidden, R rows of the request table, K vectors, L layers of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hookline.core.contracts import ExtensionSpec, LayerRows, RequestFacts, StepExtension
from hookline.core.errors import RequestError
from hookline_steering import SteeringArguments


class Steering(StepExtension):
    """`vectors_KLD` holds every vector of the file for each layer, and `vector_R` which of them a row is steered by."""

    def __init__(self, spec: ExtensionSpec) -> None:
        config, like = spec.config, {"device": spec.device, "dtype": spec.dtype}
        self.layers = config.layers or [spec.num_layers // 2]
        if not config.file:
            raise RequestError("no vectors are loaded; set extensions.steering.file to a safetensors file")
        named = load_file(config.file)
        forms = (spec.hidden_size,), (spec.num_layers, spec.hidden_size)
        for name, vector in named.items():
            if vector.shape not in forms:
                raise RequestError(
                    f"vector '{name}' of {config.file} has shape {tuple(vector.shape)}, not one of {forms}"
                )
        self.places = {number_of(name): place for place, name in enumerate(named)}
        self.names = sorted(named)
        self.vectors_KLD = torch.stack([vector.to(**like).expand(forms[1]) for vector in named.values()])
        self.vector_R = torch.zeros(spec.num_rows, dtype=torch.int64, device=spec.device)

    @staticmethod
    def encode(arguments: SteeringArguments, request: RequestFacts) -> Sequence[int]:
        """A number for the vector's name: only the ranks know the file."""
        return [number_of(arguments.vector)]

    def load(self, row: int, values_X: Tensor) -> None:
        """Look the vector up."""
        if not len(values_X):
            return  # the row's strength is 0 now
        place = self.places.get(int(values_X[0]))
        if place is None:
            raise RequestError(f"steering.vector is not in the file; there is: {', '.join(self.names)}")
        self.vector_R[row] = place

    def after_layer(self, layer: int, hidden_TD: Tensor, rows: LayerRows) -> Tensor:
        """Add each row's vector, as strongly as its request asks; nothing to rows of other requests."""
        vector_TD = self.vectors_KLD[:, layer].index_select(0, self.vector_R.index_select(0, rows.rows_T))
        strength_T1 = rows.columns["strength"].to(hidden_TD.dtype).unsqueeze(1)
        return hidden_TD.addcmul_(strength_T1, vector_TD)


def number_of(name: Any) -> int:
    """63 bits that stand for a name."""
    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "little") >> 1
