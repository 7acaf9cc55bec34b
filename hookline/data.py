"""Data sets answered by engines: `Generate` is for Ray Data's `Dataset.map_batches` (docs/cluster.md)."""

from hookline.core.data.generate import Generate

__all__ = ["Generate"]
