"""GGUF files (quant_method gguf): llama.cpp's form of a checkpoint, with metadata, tokenizer and tensors in one file.

A linear whose values are integers times scales of groups, less minimums or not, becomes a matrix of these if kernels
compute it; all others are dequantised when they are loaded. Imports neither torch nor gguf.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hookline.core.contracts import (
    CheckpointSource,
    LoadingMatrix,
    MatrixPiece,
    MatrixPlace,
    ModelConfig,
    Quantization,
    StoredForm,
)
from hookline.core.errors import CheckpointError, ConfigError

_log = logging.getLogger("hookline")


class Gguf(Quantization):
    """Opens a .gguf file, and says how the linears of its types are loaded."""

    def __init__(self, config: Any, form: StoredForm) -> None:
        """See Quantization."""
        stated = form.stated or {}
        types, linears = stated.get("types"), stated.get("linears")
        if not isinstance(types, Mapping) or not isinstance(linears, Mapping):
            raise ConfigError(
                "quantization=gguf reads .gguf files, and this checkpoint is none; leave out quantization="
            )
        self.kinds = linears
        told = ", ".join(f"{count} {name}" for name, count in types.items())
        what = (
            "all its tensors are dequantised to the model's dtype as they are loaded"
            if getattr(config, "dequantize", False)
            else "what the kernels compute stays in few bits, and the rest is dequantised to the model's dtype"
        )
        _log.info("the GGUF file has %s: %s", told, what)

    @classmethod
    def open_checkpoint(cls, config: ModelConfig) -> CheckpointSource | None:
        """See OpensCheckpoint."""
        if find_spec("gguf") is None:
            raise CheckpointError(
                f"{config.checkpoint} is a GGUF file, and the package that reads it is not installed: "
                "pip install 'hookline[gguf]'"
            )
        from hookline.plugins.quantizations.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(Path(config.checkpoint))

    def stores(self, name: str) -> Hashable:
        """See Quantization: the type, if it can be taken apart; joined linears are of one type then."""
        from hookline.plugins.quantizations.gguf_blocks import PARTS

        kind = self.kinds.get(name)
        return kind if kind in PARTS else None

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        """See Quantization."""
        from hookline.plugins.quantizations.gguf_blocks import PARTS
        from hookline.plugins.quantizations.gguf_matrix import PartsLoading

        return PartsLoading(pieces, place, PARTS[self.kinds[pieces[0].name]])
