"""Output heads that share the embedding's weight by their config.json, in all forms in which checkpoints store them.

A checkpoint may store a copy of the embedding as its head, or a different head, as merged adapters do, or the head
alone. The results are those of transformers. Knows no model: targets say which head shares whose weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hookline.core.checkpoint.safetensors_files import PACKED, StoredTensor, open_file
from hookline.core.contracts import CheckpointSource, Ranks, WeightTarget

TIED = "tie_word_embeddings"
"""The key of a config.json."""
_CHUNK_BYTES = 2**25
_NUM_READERS = 4

Targets = Mapping[str, WeightTarget]


def with_either_stored(targets: Targets, names: Mapping[str, Any]) -> dict[str, WeightTarget]:
    """The targets for a checkpoint with these tensors: if it stores only a tied head, the head fills the embedding."""
    found = dict(targets)
    for head, embedding in _ties(targets).items():
        if head in names and embedding not in names:
            found[head], found[embedding] = targets[embedding], WeightTarget.ignored()
    return found


def unlike_head(
    targets: Targets, stored: Mapping[str, Any], source: CheckpointSource | None, ranks: Ranks
) -> str | None:
    """The name of a tied head that the checkpoint stores with other values than the embedding; None if there is none.

    stored: the tensors of the checkpoint's files under the model's names, or the shapes of its source's tensors. Values
    are compared in the embedding's dtype, as they would be loaded. Each rank compares its share of the rows only, so
    the head is tied only if no rank finds a difference.
    """
    for head, embedding in _ties(targets).items():
        if any(f"{head.removesuffix('.weight')}{end}" in stored for end in PACKED):
            return head
        if head not in stored or embedding not in stored:
            continue
        shape, other_shape = (one if source else one.shape for one in (stored[head], stored[embedding]))
        view = targets[embedding].view
        assert view is not None
        if shape != other_shape:
            return head
        one, other = (source.read(name) if source else _rows(stored[name], name) for name in (head, embedding))
        if not _equal(one, other, shape, view.dtype, ranks):
            return head
    return None


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with a separate head."""
    return {**config, TIED: False}


def _ties(targets: Targets) -> dict[str, str]:
    """Name of each tied head -> name of the embedding whose memory it shares, if this rank has the embedding."""
    names = {_memory(one.view): name for name, one in targets.items() if one.view is not None}
    tied = {name: _memory(one.tied_to) for name, one in targets.items() if one.tied_to is not None}
    return {head: names[memory] for head, memory in tied.items() if memory and memory in names}


def _memory(view: torch.Tensor) -> int:
    """The address of its storage, also on a rank whose rows are all padding; 0 if nothing is allocated."""
    return view.untyped_storage().data_ptr()


def _rows(tensor: StoredTensor, name: str) -> Any:
    """The tensor as an object to index by ranges of rows, which reads only these rows."""
    return open_file(tensor.path).get_slice(tensor.name or name)


def _equal(one: Any, other: Any, shape: tuple[int, ...], dtype: torch.dtype, ranks: Ranks) -> bool:
    first, end = (shape[0] * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    step = max(1, _CHUNK_BYTES // max(1, shape[1] * dtype.itemsize))

    def is_equal(start: int) -> bool:
        rows = slice(start, min(start + step, end))
        return torch.equal(one[rows].to(dtype), other[rows].to(dtype))

    readers = ThreadPoolExecutor(_NUM_READERS)
    try:
        return all(readers.map(is_equal, range(first, end, step)))
    finally:
        readers.shutdown(cancel_futures=True)
