"""GGUF files (quant_method gguf): llama.cpp's form of a checkpoint, with metadata, tokenizer and tensors in one file.

All its types of values are dequantised when they are loaded, into the model's dtype. Imports neither torch nor gguf.
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
        types = (form.stated or {}).get("types")
        if not isinstance(types, Mapping):
            raise ConfigError(
                "quantization=gguf reads .gguf files, and this checkpoint is none; leave out quantization="
            )
        told = ", ".join(f"{count} {name}" for name, count in types.items())
        _log.info("the tensors of the GGUF file (%s) are dequantised to the model's dtype as they are loaded", told)

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
        """See Quantization: none is kept in few bits."""
        return None

    def matrix(self, pieces: Sequence[MatrixPiece], place: MatrixPlace) -> LoadingMatrix:
        """See Quantization."""
        raise AssertionError(f"{pieces[0].name} is plain, as all linears of a GGUF file are")
