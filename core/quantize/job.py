"""The job of a call of `hookline quantize`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.core.config.settings import Config


@dataclass(frozen=True)
class Job:
    """A checkpoint to write. config: reads and quantises the source, on a CPU. target: the folder to write.

    texts: a file by which the perplexity is measured before and after; None: it is not. is_calibrated: whether values
    are rounded for the inputs that these texts give. device: where the texts are computed.
    """

    config: Config
    target: Path
    texts: Path | None = None
    is_calibrated: bool = False
    device: str = "auto"
