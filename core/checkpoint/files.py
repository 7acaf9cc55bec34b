"""Checkpoints that are a single file in another format, e.g. GGUF, which a quantization opens.

A file NAME.METHOD is opened by the quantization that has METHOD among its methods and has `open_checkpoint`. A folder
without safetensors that holds one such file stands for the file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookline.core.contracts import CheckpointSource, ModelConfig
from hookline.core.errors import CheckpointError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import unavailable
from hookline.core.plugin.registry import QUANTIZATION, Entry

_LATER_PART = re.compile(r"-(?!0*1-of)\d+-of-\d+$")
"""The end of the stem of a later part of a split file: NAME-00002-of-00003."""


def open_source(
    model: ModelConfig, model_class: Any, host: PluginHost | None
) -> tuple[CheckpointSource, Path | None] | None:
    """The checkpoint that a model class or a quantization opens, and the folder of the quantization's file.

    None: core reads the checkpoint itself.
    Raises: CheckpointError if it cannot be opened, or if a folder holds several files.
    """
    source = model_class.open_checkpoint(model) if _opens(model_class) else None
    if source is not None:
        return source, None
    readers = {} if host is None else _readers(host)
    path = _file(model.checkpoint, readers)
    if path is None:
        return None
    reader: Any = readers[path.suffix[1:]].load()
    source = reader.open_checkpoint(replace(model, checkpoint=str(path))) if _opens(reader) else None
    return None if source is None else (source, path.parent)


def _readers(host: PluginHost) -> dict[str, Entry]:
    """The quantization of each method; of several for one method, the quantization with the highest priority."""
    entries = [entry for entry in host.registry.of_kind(QUANTIZATION) if not unavailable(entry.needs)]
    return {method: entry for entry in sorted(entries, key=lambda one: one.priority) for method in entry.methods}


def _opens(reader: Any) -> bool:
    """Whether a class can open checkpoints itself; see OpensCheckpoint."""
    return hasattr(reader, "open_checkpoint")


def _file(reference: str, readers: dict[str, Entry]) -> Path | None:
    """The file of a reference, or in its folder; None if no quantization has the file's suffix among its methods."""
    try:
        path = Path(reference).expanduser()
        if path.is_file():
            return path if path.suffix[1:] in readers else None
        if not reference or not path.is_dir() or next(path.glob("*.safetensors"), None) is not None:
            return None
        found = [
            one for one in sorted(path.iterdir()) if one.suffix[1:] in readers and not _LATER_PART.search(one.stem)
        ]
    except (OSError, RuntimeError):  # core.checkpoint.locate reports the error in the name
        return None
    found = [one for one in found if _opens(readers[one.suffix[1:]].load())]
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:3])
        raise CheckpointError(f"{reference} holds {len(found)} checkpoints ({names}); give the file that is meant")
    return found[0] if found else None
